"""ConveRT: its encoding rate, its size, and its R@1 beside BM25 and TF-IDF.

The rate is that of the paper's size with random weights: it does not depend on what they are, but on how many
subwords a text has, so the vocabulary is learnt from the corpus whose responses are encoded. The peer is
all-MiniLM-L6-v2 through sentence-transformers at its defaults, on the same texts.
"""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from jobs.benchmark import Config
from jobs.benchmarks.inputs import minilm_folder
from jobs.benchmarks.measure import BenchmarkRow, in_turn
from pipeline.artifact import Artifact, open_artifact
from pipeline.evaluation.baselines import BM25, TfIdf, known_texts
from pipeline.evaluation.metrics import recall_at
from pipeline.evaluation.protocols import PROTOCOLS
from pipeline.evaluation.questions import Questions, questions
from pipeline.evaluation.ranking import Scorer, load_scorer, rank
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


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    size, corpus = config.size, open_artifact(config.corpus[0], "corpus")
    model = open_artifact(config.model, "ranker") if config.model else None
    peer = minilm_folder()  # refuses before anything is learnt
    texts = known_texts(corpus, _TEXTS[size])
    ours, megabytes = _model_of_papers_size(corpus, _LEARNT_FROM[size], work / "convert")
    rows = [*_rates(ours, peer, texts, _ROUNDS[size], _ALONE[size]), megabytes]
    rows += _rates_in_8_bits(ours, work / "convert", texts, _ROUNDS[size])
    if model is not None:
        split = "test" if corpus.rows("test/") else "valid"
        rule = PROTOCOLS["polyai"]
        draw = (rule.source, rule.candidates, _QUESTIONS[size], 0, True)
        question_set = questions(corpus, split, *draw)
        rows += [
            _points_over_words(corpus, model, question_set),
            _points_lost_in_8_bits(model, question_set),
        ]
    return rows


def _model_of_papers_size(
    corpus: Artifact, examples: int, folder: Path
) -> tuple[Ranker, BenchmarkRow]:
    """A single-context model of the paper's size, loaded from its files, and the size of the files."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "vocabulary").mkdir(parents=True)
    tokenizer_config = TokenizerConfig(kind="subwords", vocabulary=_SUBWORDS, max_examples=examples)
    subwords = tokenizer.learn([corpus], tokenizer_config)
    tokenizer.save(subwords, folder / "vocabulary")
    new_ranker(ConvertConfig(), folder / "vocabulary", seed=0).save(folder / "model")
    size = sum(path.stat().st_size for path in (folder / "model").iterdir()) / 1e6
    (seconds,) = in_turn({"load": lambda: load_ranker(folder / "model")}, 3).values()
    ranker = load_ranker(folder / "model")
    tensors = itertools.chain(ranker.network.buffers(), ranker.network.parameters())
    parameters = sum(tensor.numel() for tensor in tensors)
    note = f"{len(subwords):,} subwords (the paper: {_SUBWORDS:,})."
    detail = {"load, seconds": round(min(seconds), 3), "parameters": parameters,
              "subwords": len(subwords), "note": note}  # fmt: skip
    return ranker, BenchmarkRow("convert.saved_megabytes", size, "MB", detail=detail)


def _rates(
    ranker: Ranker, peer_folder: Path, texts: list[str], rounds: int, alone_count: int
) -> list[BenchmarkRow]:
    """Both encoders in turn, so that both have the same machine; a ratio is the median of the rounds'."""
    from sentence_transformers import SentenceTransformer

    inference.prepare(ranker, torch.device("cpu"))
    peer = SentenceTransformer(str(peer_folder), device="cpu")
    encoders: dict[str, Callable[[list[str]], Any]] = {
        "ours": lambda batch: inference.candidate_vectors(ranker, batch),
        "minilm": lambda batch: peer.encode(batch, show_progress_bar=False),
    }
    ways = {name: functools.partial(encode, texts) for name, encode in encoders.items()}
    seconds = in_turn(ways, rounds)
    ways_alone = {
        (text, name): functools.partial(encode, [text])
        for text in texts[:alone_count]
        for name, encode in encoders.items()
    }
    seconds_alone = in_turn(ways_alone, 1)
    ratios = [b / a for a, b in zip(seconds["ours"], seconds["minilm"], strict=True)]
    tokens = [len(row) for row in ranker.candidate_rows(texts)]
    detail = {
        "texts": len(texts), "tokens in a text": round(float(np.mean(tokens)), 1),
        "precision": ranker.precision, "threads": torch.get_num_threads(),
        "note": f"{len(texts):,} texts of {np.mean(tokens):.0f} tokens in the mean.",
        "seconds, by round": {k: [round(s, 3) for s in v] for k, v in seconds.items()},
    }  # fmt: skip
    name = "convert.encode_vs_minilm_sentence_transformers"
    ms = {
        side: 1e3 * median(times[0] for (_, name), times in seconds_alone.items() if name == side)
        for side in encoders
    }
    return [
        BenchmarkRow(name, len(texts) / min(seconds["ours"]), "texts/s",
            peer=len(texts) / min(seconds["minilm"]), ratio=median(ratios), detail=detail),
        BenchmarkRow(f"{name}.alone", ms["ours"], "ms a text", peer=ms["minilm"],
            ratio=ms["minilm"] / ms["ours"], detail={"note": f"{alone_count} texts."}),
    ]  # fmt: skip


def _rates_in_8_bits(ours: Ranker, work: Path, texts: list[str], rounds: int) -> list[BenchmarkRow]:
    """Blocks of 8 bits beside those of bf16, and through ONNX Runtime where that is installed."""
    ranker = load_ranker(work / "model")
    ranker.quantise()
    encoders: dict[str, Callable[[], object]] = {"bf16": lambda: inference.candidate_vectors(ours, texts),
            "int8": lambda: inference.candidate_vectors(ranker, texts)}  # fmt: skip
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        encoders["onnx"] = _onnx_encoder(ranker, work / "onnx", texts)
    inference.prepare(ranker, torch.device("cpu"))
    seconds = in_turn(encoders, rounds)
    best_rates = {name: len(texts) / min(times) for name, times in seconds.items()}
    detail = {"note": f"{len(texts):,} texts.", "seconds, by round": {k: [round(s, 3) for s in v] for k, v
              in seconds.items()}}  # fmt: skip
    return [
        BenchmarkRow(f"convert.encode_{name}_vs_bf16", rate, "texts/s", peer=best_rates["bf16"],
            ratio=rate / best_rates["bf16"], detail=detail)
        for name, rate in best_rates.items() if name != "bf16"
    ]  # fmt: skip


def _onnx_encoder(ranker: Ranker, folder: Path, texts: list[str]) -> Callable[[], None]:
    """A function that encodes the texts as `inference` does: by length, some 2,048 tokens at a time."""
    import onnxruntime

    from pipeline.models.interop import to_onnx

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    to_onnx.export(ranker, folder)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = onnxruntime.InferenceSession(str(folder / to_onnx.MODEL), options)

    def encode() -> None:
        rows = sorted(ranker.candidate_rows(texts), key=len, reverse=True)
        while rows:
            count = max(1, 2_048 * torch.get_num_threads() // len(rows[0]))
            ids = ranker.tokenizer.batch(rows[:count]).ids_BT.numpy()
            session.run(["candidate"], {"ids": ids})
            rows = rows[count:]

    return encode


def _points_lost_in_8_bits(model: Artifact, question_set: Questions) -> BenchmarkRow:
    """R@1 of the model in float32 less that of its blocks in 8 bits."""
    scorer = load_scorer(model, precision="fp32")
    points = {"float32": _points(scorer, question_set)}
    scorer.ranker.quantise()
    points["int8"] = _points(scorer, question_set)
    lost = points["float32"] - points["int8"]
    detail = {"R@1/100": points, "note": f"{len(question_set):,} questions."}
    return BenchmarkRow("convert.int8.points_lost", lost, "points of R@1", detail=detail)


def _points_over_words(corpus: Artifact, model: Artifact, question_set: Questions) -> BenchmarkRow:
    """R@1 above the better of BM25 and TF-IDF."""
    texts = known_texts(corpus)
    scorers: dict[str, Scorer] = {
        "convert": load_scorer(model), "bm25": BM25.fit(texts), "tf-idf": TfIdf.fit(texts),
    }  # fmt: skip
    points = {name: _points(scorer, question_set) for name, scorer in scorers.items()}
    over = points["convert"] - max(points["bm25"], points["tf-idf"])
    detail = {"R@1/100": points, "note": f"{len(question_set):,} questions."}
    row = "convert.reddit_1_of_100.points_over_bm25"
    return BenchmarkRow(row, over, "points of R@1", detail=detail)


def _points(scorer: Scorer, question_set: Questions) -> float:
    """R@1 in percent."""
    return 100 * recall_at(rank(scorer.prepare(question_set), question_set).ranks_N, 1)
