"""What tests of a pool's nights share: rows, and what a night has left."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from pipeline.models.precision import resolve_precision
from pipeline.pools import embedder
from pipeline.pools.pool import Pool
from tests.helpers import INTERRUPTED

Rows = dict[str, str]
FIRST = {str(n): f"text {n}" for n in range(30)}
# A text alone in its batch has the same vector, to the bit, whichever texts are embedded beside it.
_AUTO = resolve_precision("auto", torch.device("cpu"))
OTHER_PRECISION = ("--embed.precision", "fp32" if _AUTO == "bf16" else "bf16")
"""Another one than a night has by default on this machine."""
EXACT = ("--embed.batch-tokens", 1, "--embed.precision", "fp32", "--gate.sample", 0)


def current(pools: Path) -> str:
    return (pools / "p" / "CURRENT").read_text().strip()


def versions(pools: Path) -> list[str]:
    return sorted(path.name for path in (pools / "p").glob("v-*"))


def contents(uri: str) -> dict[str, tuple[str, list[float]]]:
    """(text, vector) by id."""
    pool = Pool.open(uri)
    vectors = pool.vectors_at(np.arange(len(pool)))
    rows = [pool.row(place) for place in range(len(pool))]
    return {row.id: (row.text, v.tolist()) for row, v in zip(rows, vectors, strict=True)}


def columns(uri: str) -> dict[str, dict[str, str | None]]:
    """The values to filter by, by id."""
    rows = [row for table in Pool.open(uri).rows for row in table.to_pylist()]
    names = ("id", "text", "content_hash")
    return {row["id"]: {k: v for k, v in row.items() if k not in names} for row in rows}


def embedded(summary: dict) -> int:
    """How many rows went through the model."""
    return Pool.open(summary["output"]).artifact.manifest["embedded"]["rows"]


def changed(rows: Rows) -> Rows:
    """The next night's: two gone, one changed, one new."""
    next_rows = {name: text for name, text in rows.items() if name not in ("3", "17")}
    return {**next_rows, "5": "another text 5", "new": "new text"}


def interrupted(finished) -> None:
    """Ctrl-C says how to go on."""
    assert finished.code == INTERRUPTED
    lines = finished.stderr.splitlines()
    assert "python -m jobs.embed_pool: interrupted; the same command resumes" in lines
    assert "Traceback" not in finished.stderr


def stop_after(shards: int, monkeypatch) -> None:
    """Ends the job, as Ctrl-C does, when it has made so many shards."""
    made, write = [], embedder.build.write_shard

    def killed(*arguments):
        made.append(arguments)
        if len(made) > shards:
            raise KeyboardInterrupt
        return write(*arguments)

    monkeypatch.setattr(embedder.build, "write_shard", killed)
