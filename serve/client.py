"""A client of the ranking service, for blocking code and for asyncio.

    with Client("http://localhost:8000") as client:
        for result in client.rank(["hi", "hello , what do you do ?"], pool="replies").results:
            print(result.score, result.text)

Requests change nothing, so they are sent again: after 429 and 503, when `Retry-After` has passed, after a
connection that was refused, and once after a replica died. The timeout covers all of this, waiting included.
The client sends it along (`x-timeout-ms`), so the service computes nothing that would be late.

HTTP is httpx2's, as in openai's and Hugging Face's clients: `pip install -e '.[client]'`.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Annotated, Any, Concatenate, NamedTuple, ParamSpec, TypeVar

import httpx2
from pydantic import AliasPath, Field, TypeAdapter, ValidationError

from serve.answers import ClassifyResponse, Explanation, Result
from serve.limits import MAX_TIMEOUT_MS

_RETRIED_STATUSES = (429, 503)
_FIRST_WAIT_S = 0.1  # after a lost connection; twice as long each time
_MOST_DOUBLINGS = 4  # then 1.6 s each: ever longer waits would use half of the client's time
_JITTER = 0.5  # the wait before a retry is stretched by up to 50 % at random
_MOST_DEATHS = 2  # of replicas under one request, which may be what kills them
_CODES_OF_RAY = {
    404: "not_ready",
    408: "too_late",
    429: "overloaded",
    500: "replica_died",
    503: "not_ready",
}
"""What errors in plain text mean, which Serve's proxy and HAProxy give where no replica answers. Both say 500
where a replica dies under a request; Serve's proxy says 404 until the application is deployed."""
_SHOWN_CHARACTERS = 200  # of an answer that is not the service's

ParamsT = ParamSpec("ParamsT")
ResultT = TypeVar("ResultT")


@dataclass(frozen=True)
class Question:
    """Candidates to rank for a context. They come with the request, or from a pool."""

    context: str | Sequence[str]
    """The turns so far, newest last; a text is one turn."""
    candidates: Sequence[str] | Mapping[str, str] | None = None
    """Texts; or texts by ids, which the results name."""
    pool: str | None = None
    top_k: int = 10
    where: Mapping[str, Sequence[str]] | None = None
    """With a pool: columns, and the values that count."""
    allow: Sequence[str] | None = None
    """With a pool: the ids that count."""
    deny: Sequence[str] | None = None
    """With a pool: the ids that do not count."""
    explain: bool = False
    """Ask for the ranking's explanation, and the weights of its results. Not with a cross-encoder."""

    def body(self) -> dict[str, Any]:
        """The question as JSON."""
        body = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.candidates, Mapping):
            texts = self.candidates.items()
            body["candidates"] = [{"id": key, "text": text} for key, text in texts]
        return body


@dataclass(frozen=True)
class Ranking:
    """Best first."""

    results: list[Result]
    certified: bool
    """Whether this is provably the exact top k; with a second stage: whether it scored
    the exact best rows."""
    model: str
    """Fingerprint of the ranker."""
    milliseconds: float
    """The service's time."""
    pool: Annotated[str | None, Field(validation_alias=AliasPath("pool", "name"))] = None
    pool_version: Annotated[str | None, Field(validation_alias=AliasPath("pool", "version"))] = None
    missing_shards: Annotated[
        Sequence[int], Field(validation_alias=AliasPath("pool", "missing_shards"))
    ] = ()
    """Parts of the pool that did not answer: better rows may be there."""
    explanation: Explanation | None = None
    """Only with `explain`, and if there are results."""
    second_stage: str | None = None
    """Fingerprint of the model that scored the best rows of the pool again."""
    context_tokens: int = 0
    """Tokens of the context that were read; 0: the service does not say."""


_RANKING, _RANKINGS = TypeAdapter(Ranking), TypeAdapter(list[Ranking])
_CLASSIFICATIONS, _INFO = TypeAdapter(ClassifyResponse), TypeAdapter(dict[str, Any])


@dataclass(eq=False)
class ServiceError(Exception):
    """The service refused a request, or gave no answer."""

    code: str
    """The service's; or unreachable, too_late, replica_died, not_understood."""
    message: str
    field: str | None = None
    """The wrong field of the request."""
    status: int = 0
    """HTTP status; 0: no answer came."""
    request_id: str = ""
    """The request's id in the service's log."""

    def __str__(self) -> str:
        return self.message


class AsyncClient:
    """For asyncio. For one event loop at a time."""

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self, url: str, token: str = "", timeout_s: float = 10.0, retries: int = 3
    ) -> None:
        self._timeout_s, self._retries = timeout_s, retries
        headers = {"authorization": f"Bearer {token.strip()}"} if token.strip() else None
        self._new_http = functools.partial(
            httpx2.AsyncClient, base_url=url, headers=headers, timeout=None
        )
        self._http = self._new_http()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def rank(
        self,
        context: str | Sequence[str],
        candidates: Sequence[str] | Mapping[str, str] | None = None,
        pool: str | None = None,
        top_k: int = 10,
        where: Mapping[str, Sequence[str]] | None = None,
        allow: Sequence[str] | None = None,
        deny: Sequence[str] | None = None,
        explain: bool = False,
        *,
        request_id: str = "",
    ) -> Ranking:
        """Ranks candidates, or those of a pool; the arguments are those of `Question`.

        `request_id`: for the service's log; "": a new one. Raises ServiceError.
        """
        question = Question(context, candidates, pool, top_k, where, allow, deny, explain)
        return await self._call("POST", "/rank", _RANKING, question.body(), request_id)

    async def rank_many(
        self, questions: Sequence[Question], *, request_id: str = ""
    ) -> list[Ranking]:
        """Answers several questions by the same versions of model and pools. Raises ServiceError."""
        bodies = [question.body() for question in questions]
        return await self._call("POST", "/rank", _RANKINGS, bodies, request_id)

    async def classify(
        self, texts: Sequence[str], top_k: int = 3, *, request_id: str = ""
    ) -> ClassifyResponse:
        """The intents of texts, of each the `top_k` most probable. Raises ServiceError."""
        body = {"texts": list(texts), "top_k": top_k}
        return await self._call("POST", "/classify", _CLASSIFICATIONS, body, request_id)

    async def info(self) -> dict[str, Any]:
        """The served model and pools. Raises ServiceError."""
        return await self._call("GET", "/info", _INFO)

    async def ready(self) -> bool:
        """Whether the service answers and has loaded its model. Asks once. Raises ServiceError."""
        try:
            await self._call("GET", "/ready", _INFO, retries=0)
            return True
        except ServiceError as error:
            if error.status not in (0, 503):
                raise
            return False

    async def close(self) -> None:
        await self._http_of_loop().aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    async def _call(
        self,
        method: str,
        path: str,
        answer_type: TypeAdapter[ResultT],
        body: Any = None,
        request_id: str = "",
        retries: int | None = None,
    ) -> ResultT:
        """Raises ServiceError. `retries`: None: those of the client."""
        retries = self._retries if retries is None else retries
        deadline = time.monotonic() + self._timeout_s
        http = self._http_of_loop()
        headers = {"x-request-id": request_id or uuid.uuid4().hex}
        request = http.build_request(method, path, json=body, headers=headers)
        wait_s, attempts, deaths = 0.0, 0, 0
        while True:
            left_s = deadline - time.monotonic() - wait_s
            request.headers["x-timeout-ms"] = str(max(1, min(int(1000 * left_s), MAX_TIMEOUT_MS)))
            await self._sleep(wait_s)
            answer = await self._attempt(http, request, left_s, answer_type)
            if not isinstance(answer, _Failure):
                return answer
            attempts += 1
            deaths += answer.may_have_died
            wait_s = _FIRST_WAIT_S * 2 ** min(attempts - 1, _MOST_DOUBLINGS)
            wait_s = max(wait_s, answer.retry_after_s) * random.uniform(1, 1 + _JITTER)
            may_retry = answer.is_retried and attempts <= retries and deaths < _MOST_DEATHS
            if not may_retry or wait_s >= deadline - time.monotonic():
                answer.error.request_id = headers["x-request-id"]
                raise answer.error

    def _http_of_loop(self) -> httpx2.AsyncClient:
        """The connections of the running event loop. Nobody reads from those of an earlier loop, which has
        ended, or runs in the process that this one was forked from."""
        running = asyncio.get_running_loop()
        if self._loop not in (None, running):
            self._http = self._new_http()
        self._loop = running
        return self._http

    async def _attempt(
        self,
        http: httpx2.AsyncClient,
        request: httpx2.Request,
        left_s: float,
        answer_type: TypeAdapter[ResultT],
    ) -> ResultT | _Failure:
        try:
            async with asyncio.timeout(left_s):
                response = await http.send(request)
            if response.is_success:
                return answer_type.validate_json(response.content)
        except TimeoutError:
            return _Failure(ServiceError("too_late", f"no answer within {self._timeout_s:g} s"))
        except httpx2.RequestError as error:
            is_lost = isinstance(error, (httpx2.NetworkError, httpx2.RemoteProtocolError))
            may_have_died = is_lost and not isinstance(error, httpx2.ConnectError)
            message = str(error) or type(error).__name__
            return _Failure(ServiceError("unreachable", message), is_lost, may_have_died)
        except ValidationError:
            return _Failure(_unknown_answer(response))
        return _failure_of(response)


class _Failure(NamedTuple):
    """An attempt without an answer."""

    error: ServiceError
    is_retried: bool = False
    may_have_died: bool = False
    """Whether the replica, or a proxy, may have died under the request."""
    retry_after_s: float = 0.0


def _failure_of(response: httpx2.Response) -> _Failure:
    status, error = response.status_code, _unknown_answer(response)
    if response.headers.get("content-type", "").startswith("text/plain"):
        if code := _CODES_OF_RAY.get(status):
            message = f"HTTP {status}: {response.text[:_SHOWN_CHARACTERS]}"
            error = ServiceError(code, message, None, status)
    else:
        with suppress(ValueError, LookupError, TypeError):
            told = response.json()["error"]
            error = ServiceError(str(told["code"]), str(told["message"]), told["field"], status)
    is_retried = status in _RETRIED_STATUSES or error.code in ("not_ready", "replica_died")
    retry_after = response.headers.get("retry-after", "")
    retry_after_s = float(retry_after) if retry_after.isdecimal() else 0.0
    return _Failure(error, is_retried, error.code == "replica_died", retry_after_s)


def _unknown_answer(response: httpx2.Response) -> ServiceError:
    status, text = response.status_code, response.text[:_SHOWN_CHARACTERS]
    message = f"HTTP {status}, not an answer of the service: {text!r}"
    return ServiceError("not_understood", message, None, status)


def _blocking(
    call: Callable[Concatenate[AsyncClient, ParamsT], Coroutine[Any, Any, ResultT]],
) -> Callable[Concatenate[Client, ParamsT], ResultT]:
    """The method of `AsyncClient` for `Client`, run on the loop of the blocking clients."""

    @functools.wraps(call)
    def run(client: Client, /, *args: ParamsT.args, **options: ParamsT.kwargs) -> ResultT:
        with _loop_lock:
            loop = _loop_of_process(os.getpid())
        future = asyncio.run_coroutine_threadsafe(call(client._client, *args, **options), loop)
        try:
            return future.result()
        finally:
            future.cancel()  # after Ctrl-C

    return run


_loop_lock = threading.Lock()


@functools.cache
def _loop_of_process(process_id: int) -> asyncio.AbstractEventLoop:
    """A running event loop, on a thread of its own. A forked process has none of its parent's threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="polyrank-client", daemon=True).start()
    return loop


class Client:
    """Blocks. Threads may share one.

    It is an `AsyncClient` on the event loop of another thread: a blocking read cannot be ended from outside,
    and httpx2's own timeouts are for each read.
    """

    def __init__(
        self, url: str, token: str = "", timeout_s: float = 10.0, retries: int = 3
    ) -> None:
        self._client = AsyncClient(url, token, timeout_s, retries)

    rank = _blocking(AsyncClient.rank)
    rank_many = _blocking(AsyncClient.rank_many)
    classify = _blocking(AsyncClient.classify)
    info = _blocking(AsyncClient.info)
    ready = _blocking(AsyncClient.ready)
    close = _blocking(AsyncClient.close)

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
