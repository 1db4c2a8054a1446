"""Our encoders on a CPU beside the engines that sentence-transformers can switch on there.

Their packages need another transformers than polyrank's, so each peer is a process of an environment of its own:
`pip install 'sentence-transformers[openvino,onnx]'`.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from jobs.benchmarks import engine_peer
from jobs.benchmarks.inputs import minilm_folder
from jobs.benchmarks.measure import BenchmarkRow, in_turn
from pipeline import Ranker

_ROUNDS = 5
_RERANKED = 100
_LONG = {"small": 64, "full": 400}
_SHORT = {"small": 500, "full": 3_000}


def measure(
    size: str, articles: Sequence[str], replies: Sequence[str], work: Path, peers: str
) -> list[BenchmarkRow]:
    """`peers`: the Python of the peers."""
    encoder = Ranker.from_sentence_transformers(str(minilm_folder()))
    cross_folder = _cross_encoder(work / "cross")
    cross = Ranker.from_sentence_transformers(str(cross_folder))
    long, short = list(articles[: _LONG[size]]), list(replies[: _SHORT[size]])
    query, *passages = [text[:1_000] for text in articles[: _RERANKED + 1]]
    rows = list[BenchmarkRow]()
    for name, texts, engines in (
        ("long", long, ("openvino", "onnx-int8")),
        ("short", short, ("openvino", "onnx-int8")),
    ):
        ours = lambda texts=texts: encoder.encode_candidates(texts)  # noqa: E731
        rates = _rates("embed", ours, engines, minilm_folder(), texts, work, peers)
        rows += [
            _row(f"embed.vs_{engine.replace('-', '_')}_{name}", "texts/s", len(texts), seconds)
            for engine, seconds in rates.items()
        ]
    reranked = [query, *passages]
    rates = _rates("rerank", lambda: cross.rank(query, passages), ("openvino", "onnx-int8"),
                   cross_folder, reranked, work, peers)  # fmt: skip
    names = {"openvino": "rerank.vs_openvino_cross_encoder",
             "onnx-int8": "rerank.vs_onnx_int8_cross_encoder"}  # fmt: skip
    return rows + [
        _row(names[engine], "pairs/s", len(passages), seconds) for engine, seconds in rates.items()
    ]


def _row(
    name: str, unit: str, count: int, seconds: tuple[Sequence[float], Sequence[float]]
) -> BenchmarkRow:
    ours, peer = seconds
    ratio = median(b / a for a, b in zip(ours, peer, strict=True))
    detail = {"note": f"{count:,} texts a pass, {len(ours)} passes of each in turn."}
    return BenchmarkRow(name, count / median(ours), unit, count / median(peer), ratio, detail=detail)


def _rates(
    task: str, ours: Callable[[], object], engines: Sequence[str], model: Path,
    texts: Sequence[str], work: Path, peers: str,
) -> dict[str, tuple[list[float], list[float]]]:  # fmt: skip
    """For each engine our seconds and its own, round by round."""
    file = work / f"{task}-texts.json"
    file.write_text(json.dumps(list(texts)))
    with ExitStack() as stack:
        passes = {
            engine: stack.enter_context(
                _peer([peers, engine_peer.__file__, task, engine, str(model), str(file)])
            )
            for engine in engines
        }
        own_seconds: dict[str, list[float]] = {}
        seconds = in_turn({"ours": ours, **passes}, _ROUNDS)
        own_seconds = {engine: seconds[engine] for engine in engines}
    return {engine: (seconds["ours"], own) for engine, own in own_seconds.items()}


@contextmanager
def _peer(command: Sequence[str]) -> Iterator[Callable[[], None]]:
    """One pass of a peer that runs beside this process, and sleeps between its passes."""
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        stdin, stdout = process.stdin, process.stdout
        try:
            while (line := stdout.readline()).strip() != "ready":
                if not line:
                    raise RuntimeError(f"{' '.join(command)} has ended")

            def one_pass() -> None:
                print(file=stdin, flush=True)
                float(stdout.readline())

            yield one_pass
        finally:
            stdin.close()


def _cross_encoder(folder: Path) -> Path:
    """A cross-encoder in all-MiniLM's shape, with a random head: its time is that of a trained one."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    model: Any = AutoModelForSequenceClassification
    torch.manual_seed(0)
    model.from_pretrained(minilm_folder(), num_labels=1, trust_remote_code=False).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm_folder(), trust_remote_code=False).save_pretrained(folder)
    return folder
