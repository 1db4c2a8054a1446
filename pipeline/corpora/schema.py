"""The data contract: the columns of a corpus, for every public format."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any, Literal, get_args

import pyarrow as pa

from pipeline.artifact import Artifact

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
_SPLIT_NAME = re.compile(
    r"(?:(train)|(valid|val|dev)|(test))(?:ing|ation|set|data)?(?![a-z])", re.IGNORECASE
)

EXAMPLE = pa.schema(
    [
        # Unique within a corpus.
        pa.field("example_id", pa.string(), nullable=False),
        # Thread, dialogue or article: what a split never cuts.
        pa.field("group_id", pa.string(), nullable=False),
        # Turns, OLDEST FIRST, NEWEST LAST; persona lines come before the first turn.
        pa.field("context", pa.list_(pa.string()), nullable=False),
        # The right answer: a reply, the next sentence, the rest of an article.
        pa.field("response", pa.string(), nullable=False),
        # The texts to choose from, the response among them; null where the source gives none.
        pa.field("candidates", pa.list_(pa.string())),
        # The response's place in candidates; null with them.
        pa.field("label", pa.int32()),
        # Which format the row was read from.
        pa.field("source", pa.string(), nullable=False),
        # The folder that the row lies in.
        pa.field("split", pa.string(), nullable=False),
    ]
)


def schema_with(*columns: tuple[str, pa.DataType]) -> pa.Schema:
    """The schema of a corpus with columns of its own, such as `subreddit` or `title`."""
    return pa.schema([*EXAMPLE, *(pa.field(name, kind) for name, kind in columns)])


def example_files(corpus: Artifact, *splits: Split) -> list[dict[str, Any]]:
    """Manifest entries of the shards of examples, in order, of all splits or of some; `others/` holds
    articles, no examples."""
    return [
        entry
        for entry in corpus.manifest["files"]
        if entry["path"].partition("/")[0] in (splits or SPLITS)
        and entry["path"].endswith(".parquet")
    ]


def named_split(name: str) -> Split | None:
    """The split that a name begins with, as `train-0.txt`, `validation`, `dev.csv` and `TEST` do."""
    match = _SPLIT_NAME.match(name)
    return SPLITS[match.lastindex - 1] if match and match.lastindex else None


def split_by_name_or_group(name: str, group_id: str) -> Split:
    """The split in the file's name. If it names none, groups are divided 90 : 5 : 5."""
    return named_split(name) or hash_split(group_id, (900, 50, 50))


def hash_split(group_id: str, parts_per_thousand: Sequence[int]) -> Split:
    """A group's split: the same in every run, on every machine, whatever else is in the corpus.

    `parts_per_thousand`: the shares of train, valid and test; they add up to 1,000.
    """
    place = int(hashlib.md5(group_id.encode(), usedforsecurity=False).hexdigest(), 16) % 1000
    train, valid, _ = parts_per_thousand
    return "train" if place < train else "valid" if place < train + valid else "test"
