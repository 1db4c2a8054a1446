"""The middleware before every route: request ids, bearer tokens, limits on bodies, deadlines, early refusals.
It names the model of an answer in a header, and records it with its time: errors, and some formats of other
services, have no field for the model, so nobody would see that a candidate model is slow or fails.

It runs in each replica, so it is the same behind Serve's proxy, HAProxy, Envoy, or without any of them.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import re
import time
import uuid
import zlib
from collections.abc import Callable
from contextlib import suppress
from ipaddress import ip_address
from typing import TextIO
from urllib.parse import quote, urlsplit

from cachetools import TTLCache
from fastapi import Request
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve import tracing
from serve.batcher import SENDER, lower_priority
from serve.engine import Engine
from serve.http import errors
from serve.http.bearer_tokens import BearerTokens
from serve.limits import LIMITS, MAX_TIMEOUT_MS, Limits
from serve.refusals import Refusal
from serve.service import Service, Work

TIMEOUT = "x-timeout-ms"
MODEL = "x-polyrank-model"
"""Header of an answer: the fingerprint of the model."""
_PATHS_WITHOUT_TOKEN = frozenset({"/health", "/ready"})
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:-]{1,128}")
_SMALL_BODY_BYTES = 65_536
_WRONG_HOST = (
    "host: allowed from this machine without tokens: an IP address, or a name without a dot"
)
# uvicorn leaves the body of such a request out. Java's client sends the header unless told otherwise.
_UPGRADE = (
    "upgrade: the body is lost; allowed: HTTP/1.1 without it (Java: HttpClient.Version.HTTP_1_1)"
)
_LINGER_S = 2.0
_LINGER_BYTES = 16 * 2**20
_MAX_PATH_CHARACTERS = 200  # in the log
_SAFE_IN_PATHS = "/:@!$&'()*+,;="  # beside letters, digits and -._~ (RFC 3986)
_SAVED_S = 10.0  # for which a sender may save up requests
_MOST_SENDERS = 10_000  # without tokens a sender is an address
_TOGETHER_S = 0.1
_METHODS_WITH_BODY = ("POST", "PUT", "PATCH")
_log = logging.getLogger("polyrank.serve")
_access = logging.getLogger("polyrank.serve.access")


RecordAnswer = Callable[[str, str, int, float], None]
"""Records a model's answer to a request, or its failure: the model's fingerprint, the route, the HTTP status
(499: the client was gone before) and the seconds since the request was read."""


def work_of(request: Request, service: Service, engine: Engine | None = None) -> Work:
    """The work of a request. Notes its engine before it begins: a refusal then names the model, too."""
    state = request.state
    work = service.work(state.deadline, engine)
    state.model, state.route = work.engine.model.fingerprint, request.scope["route"].path
    tracing.tag(model=state.model, request_id=state.request_id)
    return work


class Guard:
    """An ASGI middleware."""

    def __init__(
        self,
        app: ASGIApp,
        limits: Limits,
        tokens: BearerTokens,
        refusal: Callable[[float], Refusal | None],
        record_answer: RecordAnswer,
        record_error: Callable[[int], None],
        echoes_request_id: bool,
    ) -> None:
        """`refusal`: returns the refusal if the replica accepts no request with this deadline now.
        For metrics: `record_answer`, and `record_error`, which takes the status of each error.
        `echoes_request_id`: false where the server, as Ray Serve's, adds a request's id to its answer.
        """
        self._app, self._limits, self._tokens, self._refusal = app, limits, tokens, refusal
        self._record_answer, self._record_error = record_answer, record_error
        self._echoes_request_id = echoes_request_id
        self._held_bytes = 0  # of the bodies of all requests
        # Of a sender: (requests saved up, when). One that has asked for nothing since is as a new one.
        seconds = max(_SAVED_S, 1 / (limits.requests_per_s or 1))
        self._rates = TTLCache[str, tuple[float, float]](_MOST_SENDERS, seconds, time.monotonic)
        self._has_lowered_priority = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if not self._has_lowered_priority:
            self._has_lowered_priority = True
            lower_priority()
        exchange = _Exchange(scope, receive, send, self._echoes_request_id)
        try:
            await self._serve(exchange)
        except Refusal as refusal:
            await exchange.refuse(refusal)
        except asyncio.CancelledError:
            exchange.status = 499
            raise
        except ClientDisconnect:
            return
        finally:
            if "model" in exchange.state:
                seconds = time.monotonic() - exchange.read_at
                model, route = exchange.state["model"], exchange.state["route"]
                self._record_answer(model, route, exchange.status, seconds)
        if exchange.status >= 400:
            self._record_error(exchange.status)
        exchange.log()

    async def _serve(self, exchange: _Exchange) -> None:
        """Answers a request. Raises Refusal if its route may not."""
        scope, headers, began = exchange.scope, exchange.headers, exchange.began
        exchange.sender = self._check_token(scope, headers)
        SENDER.set(exchange.sender)
        LIMITS.set(self._limits)
        has_body = scope["method"] in _METHODS_WITH_BODY
        if has_body:
            self._check_rate(exchange.sender, began)
        deadline = exchange.state["deadline"] = began + self._timeout_s(headers)
        try:
            body = await self._read_body(exchange) if has_body else b""
            exchange.read_at = time.monotonic()
            if has_body:
                if refusal := self._refusal(deadline):
                    raise refusal  # before it is parsed
                body = self._decoded(exchange, body)
            await self._answer(exchange, body)
        finally:
            self._held_bytes -= exchange.held_bytes

    def _check_token(self, scope: Scope, headers: Headers) -> str:
        """The sender of a request: of its token, or where none is needed its address. Raises Refusal."""
        if _needs_no_token(scope):
            return ""
        if (sender := self._tokens.sender(headers.get("authorization", ""))) is None:
            raise Refusal("unauthorized")
        address = str((scope.get("client") or ("", 0))[0])
        if not (sender or _is_safe_host(address, headers.get("host", ""))):
            raise Refusal("invalid_request", _WRONG_HOST, "host")
        return sender or address

    def _check_rate(self, sender: str, now: float) -> None:
        """Counts a request of the sender. Raises Refusal if it is one too many."""
        if (rate := self._limits.requests_per_s) is None:
            return
        most = max(1.0, rate * _SAVED_S)
        saved, since = self._rates.get(sender, (most, now))
        saved = min(most, saved + rate * (now - since))
        if saved < 1:
            message = f"a sender may ask {rate:g} times a second"
            raise Refusal("overloaded", message, retry_after_s=(1 - saved) / rate)
        self._rates[sender] = saved - 1, now

    def _timeout_s(self, headers: Headers) -> float:
        text = headers.get(TIMEOUT, str(self._limits.timeout_ms))
        if not (text.isdecimal() and len(text) < 10 and 1 <= int(text) <= MAX_TIMEOUT_MS):
            raise Refusal("invalid_request", f"{TIMEOUT}: allowed: 1 to {MAX_TIMEOUT_MS}", TIMEOUT)
        return int(text) / 1000

    async def _answer(self, exchange: _Exchange, body: bytes) -> None:
        """Lets the route answer, and answers for one that fails."""
        unread = [body]

        async def receive_read() -> Message:
            if unread:
                return {"type": "http.request", "body": unread.pop(), "more_body": False}
            return await exchange.receive()

        try:
            await self._app(dict(exchange.scope), receive_read, exchange.send)
        except Exception:
            if exchange.status:  # too late to say so
                raise
            _log.exception("%s failed", exchange.path)
            await exchange.refuse(Refusal("internal"))

    def _hold(self, exchange: _Exchange, size: int) -> None:
        """Counts so many more bytes of a request's body among those of all requests. Raises Refusal."""
        exchange.held_bytes += size
        self._held_bytes += size
        is_full = self._held_bytes > self._limits.all_bodies_bytes
        if is_full and exchange.held_bytes > _SMALL_BODY_BYTES:
            message = "the bodies of other requests take the memory"
            raise Refusal("overloaded", message, retry_after_s=1.0)

    async def _read_body(self, exchange: _Exchange) -> bytes:
        """Raises Refusal."""
        headers = exchange.headers
        length, most = headers.get("content-length", "")[:18], self._limits.body_bytes
        if length.isdecimal() and int(length) > most:
            raise Refusal("too_large", f"the body has {int(length):,} bytes; allowed: {most:,}")
        media = headers.get("content-type", "").partition(";")[0].strip().lower()
        if media != "application/json" and not media.endswith("+json"):
            raise _unsupported("content-type", "application/json")
        if _encoding(headers) not in ("", "identity", "gzip", "x-gzip"):
            raise _unsupported("content-encoding", "gzip, or none")
        body = bytearray()
        try:
            async with asyncio.timeout(self._limits.upload_s):
                async for part in Request(exchange.scope, exchange.receive).stream():
                    self._hold(exchange, len(part))
                    body += part
                    self._require_size(body)
        except TimeoutError:
            message = f"the body was not there after {self._limits.upload_s:g} s"
            raise Refusal("upload_too_slow", message) from None
        return bytes(body)

    def _decoded(self, exchange: _Exchange, body: bytes) -> bytes:
        """The body without its compression. Raises Refusal."""
        if not body and "upgrade" in exchange.headers:
            raise Refusal("invalid_request", _UPGRADE, "upgrade")
        if not _encoding(exchange.headers).endswith("gzip"):
            return body
        decoder = zlib.decompressobj(wbits=31)
        try:
            decoded = decoder.decompress(body, self._limits.body_bytes + 1)
        except zlib.error:
            raise Refusal("invalid_json", "the body is not gzip") from None
        self._require_size(decoded)
        if not decoder.eof:
            raise Refusal("invalid_json", "the body's gzip is truncated")
        if decoder.unused_data.strip(b"\0"):  # to read all takes the square of their number
            raise Refusal("invalid_json", "the body's gzip has several members; allowed: one")
        self._hold(exchange, len(decoded) - len(body))
        return decoded

    def _require_size(self, body: bytes | bytearray) -> None:
        if len(body) > (most := self._limits.body_bytes):
            raise Refusal("too_large", f"the body has over {most:,} bytes, which is the most")


class _Exchange:
    """A request and its answer, which gets the request's id and the model."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, echoes_request_id: bool) -> None:
        self.began = time.monotonic()
        self.read_at, self.held_bytes = 0.0, 0
        """When the body was there (0: not yet), and how much of the memory for bodies it takes."""
        self.receive, self._send = receive, send
        self.headers = MutableHeaders(scope=scope)
        sent_id = self.headers.get("x-request-id", "")
        self._id = sent_id if _REQUEST_ID.fullmatch(sent_id) else uuid.uuid4().hex
        # Serve logs it too, so it must not be a megabyte long.
        self.headers["x-request-id"] = self._id
        self._adds_id = echoes_request_id or self._id != sent_id
        self.state = scope.setdefault("state", {})
        self.state["request_id"] = self._id
        # The server leaves the body of an answer to HEAD out.
        self.scope = {**scope, "method": "GET"} if scope["method"] == "HEAD" else scope
        self.sender, self.status = "", 0
        """Status of the answer; 0 until it begins."""

    @property
    def path(self) -> str:
        """The path for the log, as a client writes it in a URL, truncated. The decoded path may hold line
        ends and spaces, by which a client could write lines of the log itself."""
        path = quote(self.scope["path"], safe=_SAFE_IN_PATHS, errors="replace")
        return path[:_MAX_PATH_CHARACTERS]

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = int(message["status"])
            headers = MutableHeaders(scope=message)
            if self._adds_id:
                headers["x-request-id"] = self._id
            if "model" in self.state:
                headers[MODEL] = self.state["model"]
        await self._send(message)

    async def refuse(self, refusal: Refusal) -> None:
        """Answers at once. If the body was not read, it closes the connection a moment later.

        Until then it reads what still comes: closing over unread bytes resets the connection, and a client
        that is still sending would lose the answer.
        """
        response = errors.response(refusal)
        if self.read_at:
            await response(self.scope, self.receive, self.send)
            return
        response.headers["connection"] = "close"
        status, headers = response.status_code, response.raw_headers
        await self.send({"type": "http.response.start", "status": status, "headers": headers})
        await self.send({"type": "http.response.body", "body": response.body, "more_body": True})
        unread = _LINGER_BYTES
        with suppress(TimeoutError):
            async with asyncio.timeout(_LINGER_S):
                while unread > 0:
                    message = await self.receive()
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        break
                    unread -= len(message.get("body", b""))
        await self.send({"type": "http.response.body", "body": b"", "more_body": False})

    def log(self) -> None:
        _access.info(
            "%s %s %s %s %.1f ms%s", self._id, self.scope["method"], self.path, self.status,
            1000 * (time.monotonic() - self.began), f" {self.sender}" if self.sender else "",
        )  # fmt: skip


def _encoding(headers: Headers) -> str:
    """The compression of a body."""
    return headers.get("content-encoding", "").strip().lower()


def _unsupported(header: str, allowed: str) -> Refusal:
    return Refusal("unsupported_media_type", f"{header}: allowed: {allowed}", header)


def _needs_no_token(scope: Scope) -> bool:
    """Whether no token is needed. The playground's page asks the user for one; a browser's OPTIONS request
    cannot carry one."""
    method = scope["method"]
    # Ray's proxy leaves the prefix of the application in the path.
    path: str = scope["path"].removeprefix(scope.get("root_path", ""))
    is_page = method in ("GET", "HEAD") and (path == "/" or path.startswith("/playground/"))
    return is_page or path in _PATHS_WITHOUT_TOKEN or method == "OPTIONS"


@functools.lru_cache(64)  # few, as a host may be long; it takes 9 µs
def _is_safe_host(client: str, host: str) -> bool:
    """Whether a client without a token may ask by this value of the header Host.

    A page of the web may let its own name mean this machine (DNS rebinding). Its requests come from this
    machine then, and their Host is a name with a dot."""
    try:
        if not ip_address(client).is_loopback:
            return True
    except ValueError:  # a socket in the file system
        return True
    try:
        name = urlsplit(f"//{host}").hostname or ""
        return "." not in name or bool(ip_address(name))
    except ValueError:
        return False


class _TogetherHandler(logging.StreamHandler[TextIO]):
    """Writes the lines of a tenth of a second together, and a warning at once.

    Ray flushes stderr after each write, which passes the interpreter's lock to the thread that computes. At
    three times the load that a replica answers, the lines took a quarter of the event loop's time."""

    def __init__(self) -> None:
        super().__init__()
        self._records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self._records.append(record)
        if record.levelno > logging.INFO:
            self.flush()
        elif len(self._records) == 1:
            try:
                asyncio.get_running_loop().call_later(_TOGETHER_S, self.flush)
            except RuntimeError:  # another thread
                self.flush()

    def flush(self) -> None:
        self.acquire()
        try:
            records, self._records = self._records, []
            if records:
                self.stream.write("".join(f"{self.format(record)}\n" for record in records))
            super().flush()
        except Exception:
            self.handleError(records[-1])
        finally:
            self.release()


def log_to_stderr() -> logging.Handler:
    """Lets a replica write its log, with the access lines, to where Ray collects what it prints."""
    handler = _TogetherHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    _log.addHandler(handler)
    _log.setLevel(logging.INFO)
    return handler
