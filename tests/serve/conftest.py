"""Published pools of tiny rankers, services over them, and real HTTP."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import http.client
import json
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from fastapi.testclient import TestClient

from jobs import classify_intents, embed_pool
from pipeline.artifact import Artifact
from pipeline.classification.settings import EncodeConfig, HeadConfig
from pipeline.classification.texts import ReadConfig
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.pools.pool import make_current
from pipeline.pools.shard import ROWS
from pipeline.ranking.results import Result
from serve import app
from serve.engine import Engine
from serve.http.api import create_app
from serve.service import CandidateText, RankAnswer, RankQuery, Service
from tests.helpers import computing_in_fp32

from . import live

INTERFACE = json.loads(Path(app.__file__).with_name("openapi.json").read_text())
REPLIES = {f"r{number:02d}": text for number, text in enumerate((
    "i am a nurse .", "it rains .", "we sold the boat last year", "hi !", "my dog likes snow",
    "tea , please", "the harbour froze in 1741", "no", "a long reply that is cut somewhere in it",
    "do you play chess ?", "yes", "I PAINT WALLS",
))}  # fmt: skip


INTENTS = {
    "pay": "please pay my bill",
    "block": "BLOCK THE CARD NOW",
    "greet": "hello there ?",
    "oos": "££ øø ¥¥ ßß",
}


@pytest.fixture(scope="module", autouse=True)
def fp32() -> Iterator[None]:
    """Where the hardware has bf16, a batch and one row differ in the third digit."""
    with computing_in_fp32():
        yield


@pytest.fixture(scope="session")
def tiny_pool(
    tmp_path_factory: pytest.TempPathFactory, publish_pool: Callable[..., Artifact]
) -> Callable[..., str]:
    """`tiny_pool(model, "replies")`: the URI of a pool that holds REPLIES."""

    @functools.cache
    def publish(model_uri: str, fingerprint: str, name: str) -> str:
        pools = tmp_path_factory.mktemp("pools")
        uri = str(pools / name / "v-1")
        config = embed_pool.Config(model=model_uri, candidates=(), pools=str(pools), name=name)
        model = {"uri": model_uri, "kind": "ranker", "fingerprint": fingerprint}
        texts = list(REPLIES.values())
        vectors = inference.candidate_vectors(load_ranker(Path(model_uri)), texts).numpy()
        table = pa.table([list(REPLIES), texts, texts], ROWS)
        publish_pool(uri, table, vectors, [5], config=config, model=model)
        make_current(str(pools), name, "v-1")
        return str(pools / name)

    def pool(model: Artifact, name: str = "replies") -> str:
        return publish(model.uri, model.fingerprint, name)

    return pool


@pytest.fixture(scope="session")
def tiny_classifier(
    tmp_path_factory: pytest.TempPathFactory, tracking_uri: str
) -> Callable[[Artifact], str]:
    """`tiny_classifier(model)`: the URI of a head over this encoder, for the intents of INTENTS."""

    @functools.cache
    def publish(uri: str) -> str:
        folder = tmp_path_factory.mktemp("classifier")
        lines = [f"{text} {at},{intent}" for intent, text in INTENTS.items() for at in range(12)]
        (folder / "mine.csv").write_text("\n".join(["text,label", *lines, ""]))
        config = classify_intents.Config(
            encoder=uri,
            input=(str(folder / "mine.csv"),),
            output=str(folder / "out"),
            read=ReadConfig(out_of_scope_label="oos"),
            encode=EncodeConfig(precision="fp32"),
            head=HeadConfig(epochs=60, dropout=0.2),
        )
        return str(classify_intents.run(config)["output"])

    return lambda model: publish(model.uri)


class Asking:
    """A service over an engine, asked from outside of an event loop."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.service = Service(lambda: engine, max_wait_s=60.0)

    def rank(self, context: Sequence[str], texts: Sequence[str], top_k: int) -> list[Result]:
        candidates = [CandidateText(str(place), text) for place, text in enumerate(texts)]
        return self.answer(RankQuery(context, candidates, None, top_k)).results

    def rank_pool(self, context: Sequence[str], pool: str, top_k: int, **more: Any) -> list[Result]:
        return self.answer(RankQuery(context, None, pool, top_k, **more)).results

    def answer(self, query: RankQuery) -> RankAnswer:
        (answer,) = run(self.service.work(time.monotonic() + 60).rank([query]))
        return answer


class Clock:
    """Stands for the module `time`; seconds pass when a test says so."""

    now = 1000.0

    def monotonic(self) -> float:
        return self.now


def run(work: Coroutine[Any, Any, Any]) -> Any:
    """The result of a coroutine, on a loop of its own."""
    return asyncio.run(work)


@pytest.fixture(scope="module")
def asking() -> Iterator[Callable[..., Asking]]:
    """`asking(model, *pools)`: a service over them; `precision` and `second_stage` as for Engine."""
    made: list[Asking] = []

    def make(model: Artifact, *pools: str, **more: Any) -> Asking:
        made.append(Asking(Engine(model.uri, pools, **more)))
        return made[-1]

    yield make
    for one in made:
        one.service.close()
        one.engine.close()


def error_of(response: Any, status: int = 422) -> dict[str, Any]:
    """The error of an answer, in the one shape."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    body = response.json()
    assert list(body) == ["error"]
    error: dict[str, Any] = body["error"]
    assert set(error) == {"code", "message", "field"}
    assert error["message"] and "\n" not in error["message"]
    return error


def hash_of(token: str) -> str:
    return hashlib.sha256(token.encode()).hexdigest()


@pytest.fixture(scope="module")
def poly(tiny_ranker, tiny_pool, asking) -> Asking:
    """A service of a poly-encoder and its pool "replies"."""
    model = tiny_ranker("poly")
    return asking(model, tiny_pool(model))


@pytest.fixture(scope="module")
def client(poly) -> TestClient:
    return TestClient(create_app(poly.service), raise_server_exceptions=False)


@contextmanager
def serving(app: Any) -> Iterator[int]:
    """The port of an application under a real server."""
    with live.serving(app) as url:
        yield int(url.rpartition(":")[2])


def ask(
    port: int,
    method: str,
    path: str,
    body: Any = None,
    encode_chunked: bool = False,
    headers: Mapping[str, str] | None = None,
) -> tuple[int, Any]:
    """(status, JSON) of a request; a list or dictionary is sent as JSON."""
    data = json.dumps(body) if isinstance(body, (list, dict)) else body
    sent = {"content-type": "application/json", **(headers or {})}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, data, sent, encode_chunked=encode_chunked)
        with connection.getresponse() as response:
            text = response.read()
            try:
                return response.status, json.loads(text) if text else None
            except ValueError:
                raise AssertionError(f"{response.status} {text[:500]!r} is no JSON") from None
