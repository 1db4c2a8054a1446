"""Inputs of the serving benchmarks: contexts, a pool, and the models of others' services."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path

import torch

from jobs.benchmarks.inputs import read_contexts, read_texts
from jobs.benchmarks.measure import run_job
from pipeline.artifact import Artifact, open_artifact
from pipeline.models.sources import open_encoder


def read_questions_and_candidates(
    corpora: Sequence[Artifact], contexts: int, texts: int
) -> tuple[list[list[str]], list[str]]:
    """(at most so many contexts of the first corpus, so many different texts)"""
    turns, rng = read_texts(corpora, texts), random.Random(0)
    candidates = dict.fromkeys(turns)
    while len(candidates) < texts:  # two turns make one more
        candidates[f"{rng.choice(turns)} {rng.choice(turns)}"] = None
    return read_contexts(corpora[0], contexts), list(candidates)


def embed_texts(model: Artifact, texts: Sequence[str], name: str, work: Path) -> str:
    """The URI of a pool of these texts."""
    file, pools = work / "candidates.jsonl", work / "pools" / model.fingerprint
    lines = (
        json.dumps({"id": f"c{number:07d}", "text": text}) for number, text in enumerate(texts)
    )
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
    run_job(
        "embed_pool", "--model", model.uri, "--candidates", file, "--pools", pools, "--name", name
    )
    return str(pools / name)


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
