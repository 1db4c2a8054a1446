"""A client of the ranking service, for blocking code and for asyncio.

    with Client("http://localhost:8000") as client:
        for result in client.rank(["hi", "hello , what do you do ?"], pool="replies").results:
            print(result.score, result.text)

Requests change nothing, so they are sent again: after 429 and 503, when `Retry-After` has passed, and after a
connection that was refused or lost. All of it, waiting included, ends with the timeout, which the service is
told (`x-timeout-ms`): it computes nothing that would come too late. The blocking client looks at the clock
between two reads of the answer's body, so it may end one read later, at most another timeout.

HTTP is httpx2's, as in openai's and Hugging Face's clients: `pip install 'polyrank[client]'`.
"""

from __future__ import annotations

import asyncio
import random
import time
import uuid
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, TypeVar

import httpx2

from serve.limits import MAX_TIMEOUT_MS

_RETRIED_STATUSES = (429, 503)
_FIRST_WAIT_S = 0.1  # after a lost connection; twice as long each time
_JITTER = 0.5  # clients that were refused together come back over so much more of the wait
_SHOWN_CHARACTERS = 200  # of an answer that is not the service's

ResultT = TypeVar("ResultT")


class ServiceError(Exception):
    """The service refused a request, or gave no answer."""

    def __init__(
        self,
        code: str,
        message: str,
        field: str | None = None,
        status: int = 0,
        request_id: str = "",
    ) -> None:
        super().__init__(message)
        self.code = code
        """The service's; or unreachable, too_late, not_understood."""
        self.message = message
        self.field = field
        """The wrong field of the request."""
        self.status = status
        """HTTP status; 0: no answer came."""
        self.request_id = request_id
        """The request's id in the service's log."""


@dataclass(frozen=True)
class Question:
    """Candidates to rank for a context: of the request, or of a pool."""

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

    def body(self) -> dict[str, Any]:
        """The question as JSON."""
        body = {name: value for name, value in vars(self).items() if value is not None}
        if isinstance(self.candidates, Mapping):
            texts = self.candidates.items()
            body["candidates"] = [{"id": key, "text": text} for key, text in texts]
        return body


@dataclass(frozen=True)
class Result:
    """A candidate; `id` is the pool's or the caller's, or its place among the texts given."""

    id: str
    text: str
    score: float
    columns: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Ranking:
    """Best first."""

    results: list[Result]
    certified: bool
    """Whether this is provably the exact top k."""
    model: str
    """Fingerprint of the ranker."""
    pool: str | None
    pool_version: str | None
    milliseconds: float
    """The service's time."""
    missing_shards: Sequence[int] = ()
    """Parts of the pool that did not answer: better rows may be there."""


class Client:
    """Blocks. Threads may share one."""

    _sleep = staticmethod(time.sleep)

    def __init__(
        self, url: str, token: str = "", timeout_s: float = 10.0, retries: int = 3
    ) -> None:
        self._calls = _Calls(token, timeout_s, retries)
        self._http = httpx2.Client(base_url=url)

    def rank(
        self,
        context: str | Sequence[str],
        candidates: Sequence[str] | Mapping[str, str] | None = None,
        pool: str | None = None,
        top_k: int = 10,
        where: Mapping[str, Sequence[str]] | None = None,
        allow: Sequence[str] | None = None,
        *,
        request_id: str = "",
    ) -> Ranking:
        """Ranks candidates, or those of a pool; the arguments are those of `Question`.

        `request_id`: for the service's log; "": a new one. Raises ServiceError.
        """
        question = Question(context, candidates, pool, top_k, where, allow)
        return self._run(self._calls.rank(question, request_id))

    def rank_many(self, questions: Sequence[Question], *, request_id: str = "") -> list[Ranking]:
        """Answers several questions by the same versions of model and pools. Raises ServiceError."""
        return self._run(self._calls.rank_many(questions, request_id))

    def info(self) -> dict[str, Any]:
        """The served model and pools. Raises ServiceError."""
        return self._run(self._calls.info())

    def ready(self) -> bool:
        """Whether the service answers and has loaded its model. Asks once. Raises ServiceError."""
        return self._run(self._calls.ready())

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _run(self, call: _Call[ResultT]) -> ResultT:
        try:
            attempt = next(call)
            while True:
                self._sleep(attempt.wait_s)
                attempt = call.send(self._outcome(attempt))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    def _outcome(self, attempt: _Attempt) -> _Outcome:
        deadline = time.monotonic() + attempt.timeout_s
        content = bytearray()
        try:
            with self._http.stream(**attempt.request, timeout=attempt.timeout_s) as response:
                for chunk in response.iter_raw():
                    content += chunk
                    if time.monotonic() > deadline:
                        return _too_late()
            return httpx2.Response(
                response.status_code,
                headers=response.headers,
                content=bytes(content),
                request=response.request,
            )
        except httpx2.RequestError as error:
            return error


class AsyncClient:
    """For asyncio; its methods are those of `Client`."""

    _sleep = staticmethod(asyncio.sleep)

    def __init__(
        self, url: str, token: str = "", timeout_s: float = 10.0, retries: int = 3
    ) -> None:
        self._calls = _Calls(token, timeout_s, retries)
        self._http = httpx2.AsyncClient(base_url=url)

    async def rank(
        self,
        context: str | Sequence[str],
        candidates: Sequence[str] | Mapping[str, str] | None = None,
        pool: str | None = None,
        top_k: int = 10,
        where: Mapping[str, Sequence[str]] | None = None,
        allow: Sequence[str] | None = None,
        *,
        request_id: str = "",
    ) -> Ranking:
        question = Question(context, candidates, pool, top_k, where, allow)
        return await self._run(self._calls.rank(question, request_id))

    async def rank_many(
        self, questions: Sequence[Question], *, request_id: str = ""
    ) -> list[Ranking]:
        return await self._run(self._calls.rank_many(questions, request_id))

    async def info(self) -> dict[str, Any]:
        return await self._run(self._calls.info())

    async def ready(self) -> bool:
        return await self._run(self._calls.ready())

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.close()

    async def _run(self, call: _Call[ResultT]) -> ResultT:
        try:
            attempt = next(call)
            while True:
                await self._sleep(attempt.wait_s)
                attempt = call.send(await self._outcome(attempt))
        except StopIteration as stop:
            result: ResultT = stop.value
            return result

    async def _outcome(self, attempt: _Attempt) -> _Outcome:
        try:
            async with asyncio.timeout(attempt.timeout_s):
                return await self._http.request(**attempt.request, timeout=attempt.timeout_s)
        except TimeoutError:
            return _too_late()
        except httpx2.RequestError as error:
            return error


# Shared by both clients: a call yields the next attempt, receives its outcome, and returns the result.


@dataclass(frozen=True)
class _Attempt:
    wait_s: float
    """Before it is sent."""
    timeout_s: float
    """For all of it. httpx2's own timeout is for each step, and for each read of an answer."""
    request: dict[str, Any]
    """Further arguments of httpx2's `request`."""


_Outcome = httpx2.Response | httpx2.RequestError
_Call = Generator[_Attempt, _Outcome, ResultT]


@dataclass(frozen=True)
class _Calls:
    token: str
    timeout_s: float
    retries: int

    def rank(self, question: Question, request_id: str) -> _Call[Ranking]:
        return self._call("POST", "/rank", _ranking, question.body(), request_id)

    def rank_many(self, questions: Sequence[Question], request_id: str) -> _Call[list[Ranking]]:
        bodies = [question.body() for question in questions]
        return self._call("POST", "/rank", _rankings, bodies, request_id)

    def info(self) -> _Call[dict[str, Any]]:
        return self._call("GET", "/info", dict[str, Any])

    def ready(self) -> _Call[bool]:
        single_attempt = replace(self, retries=0)
        try:
            return (yield from single_attempt._call("GET", "/ready", lambda answer: True))
        except ServiceError as error:
            if error.status not in (0, 503):
                raise
            return False

    def _call(
        self,
        method: str,
        path: str,
        parse: Callable[[Any], ResultT],
        body: Any = None,
        request_id: str = "",
    ) -> _Call[ResultT]:
        deadline = time.monotonic() + self.timeout_s
        headers = {"x-request-id": request_id or uuid.uuid4().hex}
        if self.token:
            headers["authorization"] = f"Bearer {self.token}"
        request = {"method": method, "url": path, "json": body, "headers": headers}
        wait_s, attempts = 0.0, 0
        while True:
            left_s = deadline - time.monotonic() - wait_s
            headers["x-timeout-ms"] = str(max(1, min(int(1000 * left_s), MAX_TIMEOUT_MS)))
            outcome = yield _Attempt(wait_s, left_s, request)
            attempts += 1
            if isinstance(outcome, httpx2.Response) and outcome.is_success:
                return _parse_answer(outcome, parse)
            wait_s = _wait_s(outcome, attempts)
            is_over = attempts > self.retries or wait_s >= deadline - time.monotonic()
            if is_over or not _may_pass(outcome):
                raise self._error(outcome, headers["x-request-id"])

    def _error(self, outcome: _Outcome, request_id: str) -> ServiceError:
        if isinstance(outcome, httpx2.TimeoutException):
            message = f"no answer within {self.timeout_s:g} s"
            return ServiceError("too_late", message, request_id=request_id)
        if isinstance(outcome, httpx2.RequestError):
            message = str(outcome) or type(outcome).__name__
            return ServiceError("unreachable", message, request_id=request_id)
        try:
            error = outcome.json()["error"]
            problem = (str(error["code"]), str(error["message"]), error["field"])
        except (ValueError, LookupError, TypeError):
            return _unknown_answer(outcome)
        return ServiceError(*problem, outcome.status_code, request_id)


def _too_late() -> httpx2.RequestError:
    return httpx2.ReadTimeout("the answer is not complete in time")


def _may_pass(outcome: _Outcome) -> bool:
    if isinstance(outcome, httpx2.Response):
        return outcome.status_code in _RETRIED_STATUSES
    return isinstance(outcome, (httpx2.NetworkError, httpx2.RemoteProtocolError))


def _wait_s(outcome: _Outcome, attempts: int) -> float:
    wait_s: float = _FIRST_WAIT_S * 2 ** (attempts - 1)
    if isinstance(outcome, httpx2.Response):
        retry_after: str = outcome.headers.get("retry-after", "")
        wait_s = max(wait_s, float(retry_after) if retry_after.isdecimal() else 0.0)
    return wait_s * random.uniform(1, 1 + _JITTER)


def _parse_answer(answer: httpx2.Response, parse: Callable[[Any], ResultT]) -> ResultT:
    try:
        return parse(answer.json())
    except (ValueError, LookupError, TypeError):
        raise _unknown_answer(answer) from None


def _unknown_answer(answer: httpx2.Response) -> ServiceError:
    message = f"HTTP {answer.status_code}, not an answer of the service: {answer.text[:_SHOWN_CHARACTERS]!r}"
    return ServiceError("not_understood", message, None, answer.status_code,
                        answer.request.headers["x-request-id"])  # fmt: skip


def _ranking(answer: Any) -> Ranking:
    """Fields that a later service adds are left out."""
    pool = answer["pool"] or {"name": None, "version": None}
    results = [
        Result(row["id"], row["text"], row["score"], row["columns"]) for row in answer["results"]
    ]
    return Ranking(
        results, answer["certified"], answer["model"], pool["name"], pool["version"],
        answer["milliseconds"], pool.get("missing_shards", ()),
    )  # fmt: skip


def _rankings(answer: Any) -> list[Ranking]:
    return [_ranking(ranking) for ranking in answer]
