"""Object stores on this machine: S3 and GCS by moto's server, Azure by the class below."""

from __future__ import annotations

import json
import re
import threading
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote
from xml.sax.saxutils import escape

from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
from werkzeug.http import http_date
from werkzeug.serving import make_server
from werkzeug.wrappers import Request, Response

# Which an overloaded store answers, each in turn.
_OVERLOADED = ("503 Slow Down", "500 Internal Error", "429 Too Many Requests")
_AS_S3 = "AWS4-HMAC-SHA256 Credential=k/20260101/us-east-1/s3/aws4_request"
_PAGE = 1000


@dataclass
class Store:
    """An object store, which counts what it is asked."""

    scheme: str
    application: Callable[..., Any]
    endpoint: str = ""
    """All clients of this process, and of those that it starts, go to it."""
    requests: Counter[str] = field(default_factory=Counter)
    fail_every: int = 0
    """Of so many requests it refuses one; 0: none."""
    cut_every: int = 0
    """Of so many answers to GET one ends in its middle; 0: none."""
    delay_s: float = 0.0
    """Before each answer."""
    forbid: str = ""
    """What it answers to all, such as 403 Forbidden."""
    access_keys: set[str] = field(default_factory=set)
    """Those of the requests about objects in S3."""

    def bucket(self, name: str) -> str:
        """The URI of a new bucket."""
        self._put(f"{name}?restype=container" if self.scheme == "az" else name)
        return f"{self.scheme}://{name}"

    def put(self, bucket: str, key: str) -> None:
        """Writes an empty object, also one with a name that obstore does not write."""
        self._put(f"{bucket.partition('://')[2]}/{key}")

    def _put(self, path: str) -> None:
        account = "/devstoreaccount1" if self.scheme == "az" else ""
        request = urllib.request.Request(f"{self.endpoint}{account}/{path}", b"", method="PUT")
        urllib.request.urlopen(request).close()

    @contextmanager
    def at_its_worst(self, fail_every: int, cut_every: int, delay_s: float) -> Iterator[None]:
        """Meanwhile it is slow, and requests fail."""
        self.fail_every, self.cut_every, self.delay_s = fail_every, cut_every, delay_s
        try:
            yield
        finally:
            self.fail_every, self.cut_every, self.delay_s = 0, 0, 0.0

    @contextmanager
    def counted(self) -> Iterator[Counter[str]]:
        """How often each method is used meanwhile."""
        before = Counter(self.requests)
        during: Counter[str] = Counter()
        yield during
        during.update(self.requests - before)

    @contextmanager
    def served(self) -> Iterator[None]:
        server = make_server("127.0.0.1", 0, self._answer, threaded=True)
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        self.endpoint = f"http://127.0.0.1:{server.server_port}"
        yield
        server.shutdown()
        thread.join()

    def _answer(self, environ: dict[str, Any], start_response: Any) -> Any:
        method = environ["REQUEST_METHOD"]
        self.requests[method] += 1
        credentials = environ.get("HTTP_AUTHORIZATION", "")
        self.access_keys |= set(re.findall("Credential=(.+?)/.*/s3/", credentials))
        number = self.requests.total()
        refusal = self.forbid
        if self.fail_every and number % self.fail_every == 0:
            refusal = _OVERLOADED[number // self.fail_every % 3]
        if refusal:
            environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0))
            start_response(refusal, [("Content-Type", "application/xml")])
            return [b"<Error><Code>No</Code><Message>no</Message></Error>"]
        time.sleep(self.delay_s)
        answer = self.application(environ, start_response)
        if method == "GET" and self.cut_every and self.requests["GET"] % self.cut_every == 0:
            whole = b"".join(answer)
            return [whole[: len(whole) // 2]]  # of the length that the header promises
        return answer


def s3_application() -> Callable[..., Any]:
    """moto in server mode."""
    application = DomainDispatcherApplication(create_backend_app)
    # moto looks and then writes: two threads may both find nothing. A real store creates in one step.
    creates = threading.Lock()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        if environ["PATH_INFO"] == "/federation/credentials":  # of SSO, which moto does not know
            keys = {
                "accessKeyId": "SSO",
                "secretAccessKey": "s",
                "sessionToken": "t",
                "expiration": 2e12,
            }
            start_response("200 OK", [("Content-Type", "application/json")])
            return [json.dumps({"roleCredentials": keys}).encode()]
        environ.setdefault("HTTP_AUTHORIZATION", _AS_S3)
        with creates if "HTTP_IF_NONE_MATCH" in environ else nullcontext():
            return application(environ, start_response)

    return answer


def gcs_application() -> Callable[..., Any]:
    """GCS's XML interface, by which obstore talks: that of S3 but for credentials, the condition under which
    an object is made, and that a missing object is not deleted."""
    application = s3_application()

    def answer(environ: dict[str, Any], start_response: Any) -> Any:
        environ["HTTP_AUTHORIZATION"] = _AS_S3
        if environ.pop("HTTP_X_GOOG_IF_GENERATION_MATCH", None) == "0":
            environ["HTTP_IF_NONE_MATCH"] = "*"
        if environ["REQUEST_METHOD"] == "DELETE" and not environ["QUERY_STRING"]:
            statuses = list[str]()
            application(
                {**environ, "REQUEST_METHOD": "HEAD"}, lambda status, *_: statuses.append(status)
            )
            if statuses[0].startswith("404"):
                start_response(statuses[0], [("Content-Type", "application/xml")])
                return [b"<Error><Code>NoSuchKey</Code></Error>"]
        return application(environ, start_response)

    return answer


class Azure:
    """Azure's blobs, as far as obstore asks for them."""

    def __init__(self) -> None:
        self._containers = set[str]()
        # Both by <container>/<name>.
        self._blobs = dict[str, tuple[bytes, datetime]]()
        self._blocks: defaultdict[str, dict[str, bytes]] = defaultdict(dict)
        self._one_at_a_time = threading.Lock()

    def __call__(self, environ: dict[str, Any], start_response: Any) -> Any:
        with self._one_at_a_time:
            answer = self._answer(Request(environ))
        return answer(environ, start_response)

    def _answer(self, request: Request) -> Response:
        path = request.path.removeprefix("/devstoreaccount1/")
        container, operation = path.partition("/")[0], request.args.get("comp", request.method)
        if operation == "PUT" and "restype" in request.args:
            self._containers.add(container)
            return Response(status=201)
        if container not in self._containers:
            return _error(404, "ContainerNotFound")
        if operation == "list":
            return self._listed(f"{container}/", request.args)
        if operation == "batch":
            return self._deleted(request.get_data(as_text=True))
        if request.method == "PUT":
            return self._written(path, operation, request)
        if path not in self._blobs:
            return _error(404, "BlobNotFound")
        if operation == "DELETE":
            del self._blobs[path]
            return Response(status=202)
        data, written = self._blobs[path]
        found = Response(data, headers={"ETag": '"e"', "Last-Modified": http_date(written)})
        return found.make_conditional(request, accept_ranges=True, complete_length=len(data))

    def _written(self, path: str, operation: str, request: Request) -> Response:
        data = request.get_data()
        if operation == "block":
            self._blocks[path][request.args["blockid"]] = data
            return Response(status=201)
        if operation == "blocklist":
            blocks = self._blocks.pop(path)
            data = b"".join(blocks[each] for each in re.findall(r">([^<>\s]+)</", data.decode()))
        elif request.headers.get("If-None-Match") == "*" and path in self._blobs:
            return _error(409, "BlobAlreadyExists")
        self._blobs[path] = data, datetime.now(UTC)
        return Response(status=201, headers={"ETag": '"e"'})

    def _listed(self, container: str, options: Any) -> Response:
        root, delimiter = container + options.get("prefix", ""), options.get("delimiter")
        entries = dict[str, str]()  # by name; a folder once
        for path, (data, written) in sorted(self._blobs.items()):
            if path.startswith(root):
                folder, mark, _ = path[len(root) :].partition(delimiter or "\0")
                name = (root + folder + mark if mark else path).removeprefix(container)
                properties = (
                    f"<Last-Modified>{http_date(written)}</Last-Modified><Content-Type/>"
                    f"<Content-Length>{len(data)}</Content-Length>"
                )
                entries[name] = (
                    f"<BlobPrefix><Name>{escape(name)}</Name></BlobPrefix>"
                    if mark
                    else f"<Blob><Name>{escape(name)}</Name><Properties>{properties}</Properties></Blob>"
                )
        start = int(options.get("marker") or 0)
        page = "".join(list(entries.values())[start : start + _PAGE])
        following = start + _PAGE if start + _PAGE < len(entries) else ""
        text = f"<Blobs>{page}</Blobs><NextMarker>{following}</NextMarker>"
        return Response(
            f"<EnumerationResults>{text}</EnumerationResults>", mimetype="application/xml"
        )

    def _deleted(self, batch: str) -> Response:
        answer = ""
        for number, path in enumerate(re.findall(r"DELETE /devstoreaccount1/(\S+) HTTP", batch)):
            status = "202 Accepted" if self._blobs.pop(unquote(path), None) else "404 Not Found"
            head = f"--b\nContent-Type: application/http\nContent-ID: {number}\n"
            answer += f"{head}\nHTTP/1.1 {status}\n\n\n"
        body = f"{answer}--b--\n".replace("\n", "\r\n")
        return Response(body, 202, content_type="multipart/mixed; boundary=b")


def _error(status: int, code: str) -> Response:
    return Response(f"<Error><Code>{code}</Code></Error>", status, mimetype="application/xml")
