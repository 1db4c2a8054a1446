"""A folder where the paths of the examples lead to tiny rankers and a pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa
import pytest
import torch

from jobs import embed_pool
from pipeline.artifact import Artifact
from pipeline.models.interop import sentence_transformers
from pipeline.models.ranker import Ranker as RankerModule
from pipeline.models.ranker import new_ranker
from pipeline.models.settings import BiConfig, PolyConfig
from pipeline.pools.pool import make_current
from pipeline.pools.settings import EmbedConfig
from pipeline.pools.shard import ROWS
from pipeline.ranking.ranker import Ranker
from tests.helpers import computing_in_fp32

REPLIES = {
    "r1": ("it rains again", "weather"),
    "r2": ("i like hot tea", "drinks"),
    "r3": ("a cup of coffee , please", "drinks"),
    "r4": ("we sold the boat in 1741", "trade"),
    "r5": ("no", "answers"),
}


@pytest.fixture(scope="module", autouse=True)
def fp32() -> Iterator[None]:
    """Where the hardware has bf16, a batch and one row differ in the third digit."""
    with computing_in_fp32():
        yield


@pytest.fixture(scope="session")
def made(
    tmp_path_factory: pytest.TempPathFactory,
    tiny_ranker: Callable[..., Artifact],
    publish_pool: Callable[..., Artifact],
) -> Path:
    """`rankers/poly`, a plain folder: like texts have like vectors. Published ones of every architecture
    beside it; `pools/replies`, embedded by the poly-encoder; `st/bi`, of sentence-transformers."""
    folder = tmp_path_factory.mktemp("home")
    encoder = tiny_ranker("bi").local() / "context_encoder"
    texts = {"max_context_tokens": 48, "max_candidate_tokens": 32, "share_towers": True}
    poly = new_ranker(PolyConfig(m=3, vector_length=3.0, **texts), encoder, 0)
    _bag_of_bytes(poly)
    poly.save(folder / "rankers" / "poly")
    for name in ("bi", "cross", "convert"):
        (folder / "rankers" / name).symlink_to(tiny_ranker(name).local())
    (folder / "st").mkdir()
    bi = new_ranker(BiConfig(vector_length=1.0, **texts), encoder, 0)
    _bag_of_bytes(bi)
    sentence_transformers.export(bi, folder / "st")
    pools = folder / "pools"
    config = embed_pool.Config(
        model="rankers/poly",
        candidates=(),
        pools=str(pools),
        name="replies",
        embed=EmbedConfig(filter_columns=("topic",)),
    )
    ranker = Ranker.load(folder / "rankers" / "poly", "fp32")
    model = {"uri": ranker.uri, "kind": "ranker", "fingerprint": ranker.fingerprint}
    rows = [
        {"id": key, "text": text, "content_hash": text, "topic": topic}
        for key, (text, topic) in REPLIES.items()
    ]
    table = pa.Table.from_pylist(rows, schema=ROWS.append(pa.field("topic", pa.string())))
    vectors = ranker.encode_candidates([row["text"] for row in rows])
    publish_pool(pools / "replies" / "v-1", table, vectors, config=config, model=model)
    make_current(str(pools), "replies", "v-1")
    return folder


def _bag_of_bytes(ranker: RankerModule) -> None:
    """Leaves of the encoder the tokens' own vectors, so that texts of the same letters have like ones."""
    with torch.no_grad():
        for name, value in ranker.named_parameters():
            if "word_embeddings" in name:
                value.normal_()
            elif "encoder." in name and "LayerNorm" not in name:
                value.zero_()


@pytest.fixture
def home(made: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder."""
    monkeypatch.chdir(made)
    return made
