"""Names of MLflow's registry, `models:/name@alias`, and the server that knows them.

A registered version points to a ranker where it lies, and nothing is copied.
"""

from __future__ import annotations

import functools
import os
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Any, TypeVar
from urllib.parse import urlsplit

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput, Stopped, require

REGISTRY = "models:/"
_URI_TAG = "polyrank.uri"
"""The tag of a version that names the place of its model. Before there was a tag, it was the source."""
_MAX_SOURCE_CHARACTERS = 500  # of MLflow's tables; PostgreSQL refuses more

ResultT = TypeVar("ResultT")

# The end of a long chain of exceptions, and what a person can do about it.
_CAUSES = re.compile(
    r"(Read|Connection to \S+) timed out.*?\d\)|\[Errno -?\d+\] [\w ]+|Failed to resolve '[^']*'"
    r"|too many \d+ error responses|error code \d+ != 200.*|connection to server .*"
    r"|\[SSL: \w+\] [^('\"]*[^('\" ]|Connection reset by peer|Remote end closed connection"
    r"|got unsupported URI '[^']*'|The filesystem tracking backend .*? is in maintenance mode"
    r"|[^:]*return character\(s\) in header value"  # not the value, which is a secret
)
_NO_SCHEME = re.compile(r"[\w.-]+:\d+(?:/.*)?")  # localhost:5000
_CREDENTIALS = "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
_HINTS = {
    "Invalid Host header": "name the host of this address in the server's --allowed-hosts",
    "locate revision": "another version of MLflow made this data base",
    "CERTIFICATE_VERIFY_FAILED": "MLFLOW_TRACKING_SERVER_CERT_PATH names the file of its authority",
    "WRONG_VERSION_NUMBER": "the server may speak http in place of https",
    "unsupported URI": "allowed: http://, https://, sqlite:///FILE, postgresql://",
    "filesystem tracking": "name a server, or a data base as sqlite:///FILE",
    "error code 401": f"set {_CREDENTIALS}",
    "UNAUTHENTICATED": f"set {_CREDENTIALS}",
    "in header value": f"no line ends are allowed in {_CREDENTIALS}",
    "deleted experiment ''": "the server may not be MLflow's",
    "deleted experiment": "MLFLOW_EXPERIMENT_NAME names another one",
}


def limit_waits() -> None:
    """Lets MLflow's client give up after 17 s, unless the environment says otherwise. Its own defaults add up
    to 4 minutes for a server that is away, and to 16 for one that takes requests and does not answer."""
    for name, value in {
        "MLFLOW_HTTP_REQUEST_TIMEOUT": "8",
        "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
        # A server that refuses for now may say to come again in minutes.
        "MLFLOW_HTTP_RESPECT_RETRY_AFTER_HEADER": "false",
        "PGCONNECT_TIMEOUT": "8",
    }.items():
        os.environ.setdefault(name, value)


def client(server: str = "") -> Any:
    """An mlflow.MlflowClient whose methods are `bounded`; "": of the server that MLflow is set to."""
    import mlflow

    return _BoundedClient(mlflow.MlflowClient(server or None))


class _BoundedClient:
    def __init__(self, unbounded: Any) -> None:
        self._unbounded = unbounded

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._unbounded, name)
        return functools.partial(bounded, method, server=self._unbounded.tracking_uri)


def bounded(
    ask: Callable[..., ResultT], *arguments: Any, server: str = "", **options: Any
) -> ResultT:
    """What `ask` returns. Raises TimeoutError where a server, of runs or of models, takes four times as long
    as MLflow's timeouts allow. These begin anew with each byte, so alone they would let a server that sends
    one byte a second take for ever. A data base's driver has none: it waits for a machine that hangs.
    """
    import mlflow
    from mlflow.environment_variables import (
        MLFLOW_HTTP_REQUEST_MAX_RETRIES,
        MLFLOW_HTTP_REQUEST_TIMEOUT,
    )

    servers = (server or mlflow.get_tracking_uri(), mlflow.get_registry_uri())
    if not any(re.match("http|postgresql|mysql|mssql", address) for address in servers):
        return ask(*arguments, **options)
    result = Future[ResultT]()

    def work() -> None:
        try:
            result.set_result(ask(*arguments, **options))
        except BaseException as error:
            result.set_exception(error)

    # Not of a pool: the end of Python waits for its threads.
    threading.Thread(target=work, daemon=True).start()
    bound_s = 4 * MLFLOW_HTTP_REQUEST_TIMEOUT.get() * (1 + MLFLOW_HTTP_REQUEST_MAX_RETRIES.get())
    try:
        return result.result(bound_s)
    except TimeoutError:
        raise TimeoutError(f"no whole answer within {bound_s} s") from None


@contextmanager
def answers(question: str = "") -> Iterator[None]:
    """Says in one line that MLflow, asked inside for `question`, refuses or fails.

    Raises BadInput for a refusal, which another try meets again, and Stopped for a server that is away,
    slow or broken.
    """
    limit_waits()
    import mlflow  # a second and a half
    from alembic.util import CommandError
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    _require_address(mlflow.get_tracking_uri())
    try:
        yield
    except (MlflowException, SQLAlchemyError, CommandError, OSError, ImportError) as error:
        status = error.get_http_status_code() if isinstance(error, MlflowException) else 500
        is_final = isinstance(error, ImportError | CommandError)
        is_refusal = is_final or (400 <= status < 500 and status != 429)
        place = f"MLFLOW_TRACKING_URI {shown(mlflow.get_tracking_uri())}"
        if mlflow.get_registry_uri() != mlflow.get_tracking_uri():
            place += f", MLFLOW_REGISTRY_URI {shown(mlflow.get_registry_uri())}"
        if is_refusal and question and status not in (401, 403):
            place = ""
        where = ": ".join(filter(None, (question, place)))
        raise (BadInput if is_refusal else Stopped)(f"{where}: {reason_of(error)}") from None


def _require_address(address: str) -> None:
    """Raises BadInput for an address that names no server: MLflow would try it, or take it for a folder."""
    name = "MLFLOW_TRACKING_URI"
    require(not _NO_SCHEME.fullmatch(address), name, address, f"http://{address}")
    if re.match(r"\s*https?:", address):
        try:
            parts = urlsplit(address)
            is_address = address == address.strip() and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no port, or half of an IPv6 address
            is_address = False
        require(is_address, name, shown(address), "such as http://host:5000")


def reason_of(error: Exception) -> str:
    """Why MLflow failed, in one line and without a password."""
    text = shown(" ".join(str(error).split())) or repr(error)
    found = _CAUSES.search(text)
    hint = next((f"; {hint}" for mark, hint in _HINTS.items() if mark in text), "")
    return f"{found[0] if found else text:.300}{hint}"


def shown(text: str) -> str:
    """Without the user and password of an address."""
    return re.sub(r"//[^/@\s]*@", "//", text)


def model_uri(target: str) -> str:
    """The URI of a model; for an alias, of the model that it means now.

    Raises BadInput where the registry has no such alias, and Stopped where it does not answer.
    """
    if not target.startswith(REGISTRY):
        return target
    name, _, alias = target.removeprefix(REGISTRY).partition("@")
    if not alias:
        raise BadInput(f"model: {target!r} is not allowed; allowed: models:/name@alias, or a URI")
    with answers(f"model: {target}"):
        return uri_of(client().get_model_version_by_alias(name, alias))


def uri_of(version: Any) -> str:
    """The place of the model of a version (mlflow.entities.model_registry.ModelVersion)."""
    return str(version.tags.get(_URI_TAG) or version.source)


def location(model: Artifact, server: str) -> dict[str, Any]:
    """`source` and `tags` of the version that points to a model, for a registry at the address `server`.

    A server refuses local paths as sources, also those that are the same on all machines. For one of these
    the source is the manifest that the model's run keeps; the tag names the path.
    """
    has_path = storage.is_local(model.uri) and server.startswith("http")
    run_file = f"runs:/{model.manifest['run_id']}/manifest.json"
    source = run_file if has_path or len(model.uri) > _MAX_SOURCE_CHARACTERS else model.uri
    return {"source": source, "tags": {"fingerprint": model.fingerprint, _URI_TAG: model.uri}}


def require_name(field: str, name: str) -> None:
    """Raises BadInput for a name that MLflow's registry refuses, or that `models:/name@alias` cannot hold."""
    fits = re.fullmatch(r"(?!\.\.|\.$|\s)[^/:@'\"`\\\x00-\x1f\x7f]{1,255}(?<!\s)", name)
    allowed = "1 to 255 characters without / : @ \\ quotes, line breaks, spaces at the ends; not `.` or `..`"
    require(bool(fits), field, name, allowed)


def require_alias(field: str, alias: str) -> None:
    """Raises BadInput for an alias that MLflow's registry refuses."""
    fits = re.fullmatch(r"[\w-]{1,240}", alias) and not re.fullmatch(r"(?i)latest|v\d+", alias)
    require(bool(fits), field, alias,
            "1 to 240 letters, digits, - and _, other than `latest` and `v1`, `v2`, …")  # fmt: skip
