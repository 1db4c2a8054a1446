"""Published pools of tiny rankers, and engines over them."""

from __future__ import annotations

import functools
import http.client
import json
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs import embed_pool
from pipeline.artifact import Artifact, draft
from pipeline.models import inference
from pipeline.models.ranker import load_ranker
from pipeline.retrieval.pools.embed import ROWS
from pipeline.retrieval.pools.pool import make_current

REPLIES = {f"r{number:02d}": text for number, text in enumerate((
    "i am a nurse .", "it rains .", "we sold the boat last year", "hi !", "my dog likes snow",
    "tea , please", "the harbour froze in 1741", "no", "a long reply that is cut somewhere in it",
    "do you play chess ?", "yes", "I PAINT WALLS",
))}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def fp32() -> Iterator[None]:
    """Where the hardware has bf16, a batch and one row differ in the third digit."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("pipeline.models.precision.use_bf16", lambda device: False)
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
        out = draft(uri, "pool", config, {"model": model})
        ranker = load_ranker(Path(model_uri))
        items = list(REPLIES.items())
        parts = []
        for part in (items[:5], items[5:]):
            rows = [{"id": key, "text": text, "content_hash": text} for key, text in part]
            vectors = inference.candidate_vectors(ranker, [text for _, text in part]).numpy()
            parts.append((pa.Table.from_pylist(rows, schema=ROWS), vectors))
        publish_pool(out, parts)
        make_current(str(pools), name, "v-1")
        return str(pools / name)

    def pool(model: Artifact, name: str = "replies") -> str:
        return publish(model.uri, model.fingerprint, name)

    return pool


def ask(
    port: int, method: str, path: str, body: Any = None, encode_chunked: bool = False
) -> tuple[int, Any]:
    """(status, JSON) of a request; a list or dictionary is sent as JSON."""
    data = json.dumps(body) if isinstance(body, (list, dict)) else body
    headers = {"content-type": "application/json"}
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        connection.request(method, path, data, headers, encode_chunked=encode_chunked)
        with connection.getresponse() as response:
            return response.status, json.loads(response.read())
