"""ConveRT: its encoding rate, its size, and its R@1 beside BM25 and TF-IDF.

The rate is that of the paper's size with random weights: it does not depend on what they are, but on how many
subwords a text has, so the vocabulary is learnt from the corpus whose responses are encoded. The peer is
all-MiniLM-L6-v2 through sentence-transformers at its defaults, on the same texts.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import torch

from jobs.benchmark import Config
from jobs.benchmarks.inputs import minilm_folder
from jobs.benchmarks.measure import BenchmarkRow, in_turn
from pipeline.artifact import Artifact, open_artifact
from pipeline.evaluation.baselines import BM25, TfIdf, known_texts
from pipeline.evaluation.metrics import recall_at
from pipeline.evaluation.protocols import PROTOCOLS
from pipeline.evaluation.questions import Questions, questions
from pipeline.evaluation.ranking import Scorer, rank, scorer
from pipeline.models import inference
from pipeline.models.ranker import Ranker, load_ranker, new_ranker
from pipeline.models.settings import ConvertConfig
from pipeline.training import tokenizer
from pipeline.training.settings import TokenizerConfig

_SUBWORDS = 31_476  # the paper's
_LEARNT_FROM = {"small": 20_000, "full": 200_000}  # examples
_TEXTS = {"small": 500, "full": 4_000}
_ALONE = {"small": 50, "full": 300}
_ROUNDS = {"small": 3, "full": 5}
_QUESTIONS = {"small": 1_000, "full": 10_000}


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    size, corpus = config.size, open_artifact(config.corpus[0], "corpus")
    model = open_artifact(config.model, "ranker") if config.model else None
    peer = minilm_folder()  # refuses before anything is learnt
    texts, folder = known_texts(corpus, _TEXTS[size]), work / "convert"
    saved = _model_of_papers_size(corpus, _LEARNT_FROM[size], folder)
    ours = load_ranker(folder / "model")
    yield from _rates(ours, peer, texts, _ROUNDS[size], _ALONE[size])
    yield saved
    if model:
        split, rule = "test" if corpus.rows("test/") else "valid", PROTOCOLS["polyai"]
        draw = (rule.source, rule.candidates, _QUESTIONS[size], 0, True)
        yield from _points(corpus, model, questions(corpus, split, *draw))


def _model_of_papers_size(corpus: Artifact, examples: int, folder: Path) -> BenchmarkRow:
    """Saves a single-context model of the paper's size."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "vocabulary").mkdir(parents=True)
    tokenizer_config = TokenizerConfig(kind="subwords", vocabulary=_SUBWORDS, max_examples=examples)
    subwords = tokenizer.learn([corpus], tokenizer_config)
    tokenizer.save(subwords, folder / "vocabulary")
    new_ranker(ConvertConfig(), folder / "vocabulary", seed=0).save(folder / "model")
    size = sum(path.stat().st_size for path in (folder / "model").iterdir()) / 1e6
    note = f"{len(subwords):,} subwords (the paper: {_SUBWORDS:,})."
    return BenchmarkRow.alone("convert.saved_megabytes", size, "MB", note)


def _rates(
    ranker: Ranker, peer_folder: Path, texts: list[str], rounds: int, alone_count: int
) -> Iterator[BenchmarkRow]:
    """Both encoders in turn, so that both have the same machine."""
    from sentence_transformers import SentenceTransformer

    inference.prepare(ranker, torch.device("cpu"))
    peer = SentenceTransformer(str(peer_folder), device="cpu")
    encoders: dict[str, Callable[[list[str]], Any]] = {
        "ours": lambda batch: inference.candidate_vectors(ranker, batch),
        "minilm": lambda batch: peer.encode(batch, show_progress_bar=False),
    }
    ways = {name: functools.partial(encode, texts) for name, encode in encoders.items()}
    seconds = in_turn(ways, rounds).values()
    ours, theirs = ([len(texts) / passed for passed in times] for times in seconds)
    ways_alone = {
        (name, text): functools.partial(encode, [text])
        for text in texts[:alone_count]
        for name, encode in encoders.items()
    }
    alone = in_turn(ways_alone, 1)
    ours_ms, theirs_ms = (
        1e3 * median(alone[name, text][0] for text in texts[:alone_count]) for name in encoders
    )
    tokens = fmean(len(row) for row in ranker.candidate_rows(texts))
    note = f"{len(texts):,} texts of {tokens:.0f} tokens in the mean."
    name = "convert.encode_vs_minilm_sentence_transformers"
    yield BenchmarkRow.of_rounds(name, ours, theirs, "texts/s", note)
    name, note = f"{name}.alone", f"{alone_count} texts."
    ratio = theirs_ms / ours_ms
    yield BenchmarkRow.beside(name, ours_ms, theirs_ms, "ms a text", note, ratio=ratio)


def _points(corpus: Artifact, model: Artifact, question_set: Questions) -> Iterator[BenchmarkRow]:
    """R@1 above the better of BM25 and TF-IDF; and R@1 in float32 less that of blocks in 8 bits."""

    def percent(asked: Scorer) -> float:
        return 100 * recall_at(rank(asked.prepare(question_set), question_set).ranks_N, 1)

    texts = known_texts(corpus)
    scorers: list[Scorer] = [scorer(model), BM25.fit(texts), TfIdf.fit(texts)]
    ours, bm25, tf_idf = map(percent, scorers)
    exact = scorer(model, precision="fp32")
    float32 = percent(exact)
    exact.ranker.quantise()
    int8, count = percent(exact), f"{len(question_set):,} questions among 100"
    name, unit = "convert.reddit_1_of_100.points_over_bm25", "points of R@1"
    note = f"ConveRT {ours:.1f}, TF-IDF {tf_idf:.1f}, BM25 {bm25:.1f}; {count}."
    yield BenchmarkRow.alone(name, ours - max(bm25, tf_idf), unit, note)
    note = f"{float32:.2f} in float32, {int8:.2f} with blocks of 8 bits, of {count}."
    yield BenchmarkRow.alone("convert.int8.points_lost", float32 - int8, unit, note)
