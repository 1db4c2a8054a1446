"""Our encoders on a CPU beside the engines that sentence-transformers can switch on there.

Their packages need another transformers than polyrank's, so each peer is a process of an environment of its
own: `pip install 'sentence-transformers[openvino,onnx]'`.
"""

from __future__ import annotations

import functools
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
_ENGINES = ("openvino", "onnx-int8")


def measure(
    size: str, articles: Sequence[str], replies: Sequence[str], work: Path, peers: str
) -> list[BenchmarkRow]:
    """`peers`: the Python of the peers."""
    encoder = Ranker.from_sentence_transformers(str(minilm_folder()))
    texts_by_length = {"long": articles[: _LONG[size]], "short": replies[: _SHORT[size]]}
    rows = list[BenchmarkRow]()
    for length, texts in texts_by_length.items():
        passes = functools.partial(encoder.encode_candidates, texts)
        seconds = _in_turn("embed", passes, minilm_folder(), texts, work, peers)
        for engine in _ENGINES:
            name = f"embed.vs_{engine.replace('-', '_')}_{length}"
            rows.append(_row(name, "texts/s", len(texts), seconds["ours"], seconds[engine]))
    folder = _cross_encoder(work / "cross-encoder")
    cross = Ranker.from_sentence_transformers(str(folder))
    query, passages = articles[0][:100], [text[:1_000] for text in articles[1 : _RERANKED + 1]]
    reranked = functools.partial(cross.rank, query, passages)
    seconds = _in_turn("rerank", reranked, folder, [query, *passages], work, peers)
    for engine in _ENGINES:
        name = f"rerank.vs_{engine.replace('-', '_')}_cross_encoder"
        rows.append(_row(name, "pairs/s", len(passages), seconds["ours"], seconds[engine]))
    return rows


def _row(
    name: str, unit: str, count: int, ours: Sequence[float], peer: Sequence[float]
) -> BenchmarkRow:
    ratio = median(theirs / own for own, theirs in zip(ours, peer, strict=True))
    detail = {"note": f"{count:,} texts a pass, the median of {len(ours)} passes in turn."}
    return BenchmarkRow(
        name, count / median(ours), unit, count / median(peer), ratio, detail=detail
    )


def _in_turn(
    task: str, ours: Callable[[], object], model: Path, texts: Sequence[str], work: Path, peers: str
) -> dict[str, list[float]]:
    """Seconds of each pass over the texts: of ours, and of each engine."""
    file = work / f"{task}-texts.json"
    file.write_text(json.dumps(list(texts)))
    with ExitStack() as stack:
        passes: dict[str, Callable[[], object]] = {"ours": ours}
        for engine in _ENGINES:
            command = [peers, engine_peer.__file__, task, engine, str(model), str(file)]
            passes[engine] = stack.enter_context(_peer(command))
        return in_turn(passes, _ROUNDS)


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
    model.from_pretrained(minilm_folder(), num_labels=1, trust_remote_code=False).save_pretrained(
        folder
    )
    AutoTokenizer.from_pretrained(minilm_folder(), trust_remote_code=False).save_pretrained(folder)
    return folder
