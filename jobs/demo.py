"""The whole path on this machine: raw dumps → corpora → encoder → rankers → pools → HTTP.

Every stage is a job that can be run alone; the command that does it is printed before it. Stages that
are done already are recognised, so a demo that was killed goes on.
"""

from __future__ import annotations

import importlib
import json
import os
import shlex
import signal
import socket
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from jobs import cluster, program
from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import BadInput, parse
from pipeline.corpora.made_up import sample

_CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Runs all stages on a Ray of its own, and asks the service that comes out of them.

    Without --data on generated sample corpora; without --encoder one is pre-trained.
    """

    work: str = ".demo"
    """Folder for everything that is made."""
    data: str = ""
    """Folder with real dumps: RC_* files, ConvAI2's *_self_original*.txt, WikiExtractor output."""
    encoder: str = ""
    """A pre-trained sentence encoder to start from: a `transformers` directory."""
    keep: bool = False
    """Leave the service and the dashboard up until Ctrl-C."""
    port: int = 8000
    """Of the service, on 127.0.0.1."""


@dataclass(frozen=True)
class Data:
    """Raw files of each format."""

    reddit: list[str]
    convai2: list[str]
    wikipedia: list[str]


def run(config: Config) -> program.Summary:
    began = time.monotonic()
    work = Path(config.work)
    _require_free(config.port)
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{(work / 'mlflow.db').absolute()}")
    work.mkdir(parents=True, exist_ok=True)
    data = find(Path(config.data)) if config.data else _sample(work / "sample")

    from ray import serve

    with cluster.session(dashboard=True) as dashboard:
        _corpora(work, data)
        encoder = config.encoder or _pretrain(work)
        recipes = "finetune" if config.encoder else "demo"
        _rankers(work, encoder, recipes)
        table = _evaluate(work, full=bool(config.encoder))
        _pools(work)
        _serve(work, config.port)
        answers = _ask(work, config.port)
        minutes = (time.monotonic() - began) / 60
        _say_further(config, minutes, dashboard)
        if config.keep:
            with suppress(KeyboardInterrupt):
                signal.pause()
        serve.shutdown()
    return {"output": str(work), "minutes": round(minutes, 2), "table": table, "answers": answers}


# -------------------------------------------------------------------------------------------------
# Stages


def find(folder: Path) -> Data:
    """The files of the three formats below a folder.

    Raises BadInput for a format that is not there.
    """
    if not folder.is_dir():
        raise BadInput(f"--data {folder}: no such folder")
    reddit = sorted(folder.rglob("RC_*"))
    train = _first(folder, "train_self_original.txt", "train_self_original*.txt")
    valid = _first(folder, "valid_self_original.txt", "valid_self_original.*.txt")
    # One folder of them: beside it may lie others, of stubs for instance.
    beneath = ("wikipedia/extracted/**", "wikipedia/extracted_good/**", "**")
    globs = (sorted(folder.glob(f"{name}/wiki_*")) for name in beneath)
    wikipedia = next((found for found in globs if found), [])
    for what, found in (
        ("Reddit dumps RC_*", reddit),
        ("ConvAI2's train_self_original*.txt", train),
        ("ConvAI2's valid_self_original*.txt with candidates", valid),
        ("WikiExtractor's wiki_*", wikipedia),
    ):
        if not found:
            raise BadInput(f"--data {folder}: no {what} there")
    names = [[str(path) for path in paths] for paths in (reddit, train + valid, wikipedia)]
    return Data(*names)


def _first(folder: Path, *patterns: str) -> list[Path]:
    """The first file that the first fitting pattern finds."""
    return next((found[:1] for name in patterns if (found := sorted(folder.rglob(name)))), [])


def _sample(folder: Path) -> Data:
    print("\n== Sample corpora: people who talk about what they do, and articles about towns")
    if (folder / "DONE").exists():
        print("   already done")
    else:
        began = time.monotonic()
        sample.generate(folder)
        (folder / "DONE").touch()
        print(f"   {time.monotonic() - began:.1f} s")
    for file in sorted(folder.rglob("*.*")):
        print(f"   {file}  {file.stat().st_size / 1e6:.1f} MB")
    return find(folder)


def _corpora(work: Path, data: Data) -> None:
    corpora = work / "corpora"
    _stage("Reddit dumps to examples", "prepare_corpus", "--corpus", "reddit",
           "--input", *data.reddit, "--output", f"{corpora}/reddit")  # fmt: skip
    _stage("ConvAI2 dialogues to examples", "prepare_corpus", "--corpus", "convai2",
           "--input", *data.convai2, "--output", f"{corpora}/convai2")  # fmt: skip
    _stage("Articles to search examples", "prepare_corpus", "--corpus", "wikipedia",
           "--wikipedia.task", "search", "--wikipedia.queries", "5", "--wikipedia.others", "0",
           "--input", *data.wikipedia, "--output", f"{corpora}/articles")  # fmt: skip


def _pretrain(work: Path) -> str:
    corpora = work / "corpora"
    _stage("A tokenizer", "train_tokenizer", "--corpus", f"{corpora}/reddit", f"{corpora}/convai2",
           f"{corpora}/articles", "--tokenizer.vocabulary", "2000",
           "--output", f"{work}/tokenizer")  # fmt: skip
    _stage("Reddit's examples to tokens", "tokenize_corpus", "--corpus", f"{corpora}/reddit",
           "--tokenizer", f"{work}/tokenizer", "--output", f"{work}/tokens")  # fmt: skip
    _stage("An encoder: masked tokens and next utterance, on Reddit", "pretrain",
           "--config", _recipe("pretrain/tiny-cpu"), "--corpus", f"{work}/tokens",
           "--output", f"{work}/encoder")  # fmt: skip
    return f"{work}/encoder"


def _rankers(work: Path, encoder: str, recipes: str) -> None:
    """From a pre-trained encoder all start from it; from a new one poly and cross start from bi."""
    rankers = work / "rankers"
    start = encoder if recipes == "finetune" else f"{rankers}/bi"
    # Without a GPU: no dropout, which costs CPUs a third of the time, no validation on the way, and 100
    # steps where an epoch of pairs or of whole articles would take most of an hour.
    real_on_cpu = recipes == "finetune" and not _gpus()
    lean = ("--finetune.dropout", "0", "--loop.validate-every-epochs", "0")
    quick = lean if real_on_cpu else ()
    brief = (*quick, "--finetune.max-steps", "100") if real_on_cpu else ()
    models = {
        "bi": ("bi", "convai2", "convai2", encoder, quick),
        "cross": ("cross", "convai2", "convai2", start, brief),
        "poly": ("poly", "convai2", "convai2", start, quick),
        "articles": ("poly", "wikipedia", "articles", start, brief),
    }

    def begun(name: str, *resources: str) -> Callable[[], program.Summary]:
        architecture, task, corpus, origin, more = models[name]
        files = [f"demo-{name}"]
        if recipes == "finetune":
            files = [f"finetune/{architecture}-small", f"finetune/tasks/{task}-small"]
        return _begun(
            f"A ranker, {name}", "finetune", "--config", *map(_recipe, files),
            "--corpus", f"{work}/corpora/{corpus}", "--encoder", origin, *more, *resources,
            "--register-as", f"polyrank-{name}", "--output", f"{rankers}/{name}",
        )  # fmt: skip

    if recipes == "finetune" or _gpus():
        for name in models:
            begun(name, *(("--resources.gpu", "true") if _gpus() else ()))()
        return
    begun("bi")()
    # Side by side: of so small a model two threads do only 14 % more steps than one.
    others = [
        begun(name, "--resources.cpus-per-worker", "1") for name in ("cross", "poly", "articles")
    ]
    with ThreadPoolExecutor(2) as two:
        for running in [two.submit(run) for run in others]:
            running.result()


def _evaluate(work: Path, full: bool) -> dict[str, Any]:
    rankers, corpus = work / "rankers", f"{work}/corpora/convai2"
    three = [f"{rankers}/{name}" for name in ("bi", "poly", "cross")]
    few = (
        "--max-examples",
        "500",
        "--latency-queries",
        "20",
    )  # a cross-encoder takes 40 ms for each
    table = _stage("The right reply among 20, held-out people", "evaluate", "--model", *three,
                   "--corpus", corpus, *few, "--json", f"{work}/replies.json")  # fmt: skip
    found = {"replies": table["table"]}
    if full:
        table = _stage("The same on all examples", "evaluate", "--model", *three[:2],
                       "--corpus", corpus, "--json", f"{work}/replies-all.json")  # fmt: skip
        found["replies, all"] = table["table"]
    table = _stage("The right article among 20, held-out articles", "evaluate",
                   "--model", f"{rankers}/articles", "--corpus", f"{work}/corpora/articles",
                   "--source", "sampled", "--json", f"{work}/articles.json")  # fmt: skip
    return {**found, "articles": table["table"]}


def _pools(work: Path) -> None:
    _stage("A pool of replies", "embed_pool", "--model", f"{work}/rankers/poly",
           "--candidates", f"{work}/corpora/convai2/train", "--embed.text-column", "response",
           "--embed.id-column", "example_id", "--pools", f"{work}/pools",
           "--name", "replies")  # fmt: skip
    # Five examples of an article are one candidate: the other four have the same id.
    _stage("A pool of articles", "embed_pool", "--model", f"{work}/rankers/articles",
           "--candidates", f"{work}/corpora/articles", "--embed.text-column", "response",
           "--embed.id-column", "group_id", "--embed.repeated-ids", "first", "--pools", f"{work}/pools",
           "--name", "articles")  # fmt: skip


def _serve(work: Path, port: int) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from serve.app import Args, build

    print("\n== The service: dialogues at /rank, articles at /articles/rank", flush=True)
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
    for model, pool, route in (("poly", "replies", "/"), ("articles", "articles", "/articles")):
        served = Args(model=f"{work}/rankers/{model}", pools=[f"{work}/pools/{pool}"])
        serve.run(build(served), name=pool, route_prefix=route, logging_config=quiet)


def _ask(work: Path, port: int) -> dict[str, Any]:
    """Real requests about examples that no training has seen."""
    corpora = f"{work}/corpora"
    dialogue = _example(f"{corpora}/convai2")
    print("\n== A dialogue, and its 20 candidates ranked\n")
    for turn in dialogue["context"]:
        print(f"   | {turn}")
    request = {"context": dialogue["context"], "candidates": dialogue["candidates"], "top_k": 3}
    given = _post(port, "/rank", request)
    _show(given["results"], dialogue["response"])
    print("\n   the same against the pool of replies of other people\n")
    pooled = _post(port, "/rank", {"context": dialogue["context"], "pool": "replies", "top_k": 3})
    _show(pooled["results"], dialogue["response"])
    article = _example(f"{corpora}/articles")
    print(f"\n== A sentence, and the articles it may come from\n\n   | {article['context'][0]}")
    request = {"context": article["context"], "pool": "articles", "top_k": 3}
    articles = _post(port, "/articles/rank", request)
    _show(articles["results"], article["response"])
    return {"replies": given["results"], "pool": pooled["results"], "articles": articles["results"]}


def _say_further(config: Config, minutes: float, dashboard: str) -> None:
    tracking = os.environ["MLFLOW_TRACKING_URI"]
    body = json.dumps({"context": ["how is work going ?"], "pool": "replies", "top_k": 3})
    url = f"http://127.0.0.1:{config.port}"
    again = "" if config.keep else " (python -m jobs.demo --keep leaves it up)"
    print(f"""
== Done in {minutes:.1f} minutes. To look further{again}:

   runs, curves, lineage   .venv/bin/mlflow ui --backend-store-uri {tracking}
   Ray's dashboard         {dashboard or "not started"}
   the playground          {url}/
   the interface           {url}/openapi.json
   ask it                  curl -s {url}/rank -H 'content-type: application/json' -d '{body}'
   look into a pool        .venv/bin/python -m jobs.search --pool {config.work}/pools/replies \\
                               --model {config.work}/rankers/poly --context "how is work going ?"
""", flush=True)  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Helpers


def _stage(title: str, verb: str, *argv: str) -> program.Summary:
    """Runs a job in this process, as its command would, and says what came out."""
    return _begun(title, verb, *argv)()


def _begun(title: str, verb: str, *argv: str) -> Callable[[], program.Summary]:
    """`_stage` in two parts: only the second may run in another thread, as reading a config changes
    the working directory for a moment."""
    print(f"\n== {title}\n   $ python -m jobs.{verb} {shlex.join(argv)}", flush=True)
    module = importlib.import_module(f"jobs.{verb}")
    config = parse(module.Config, argv, f"python -m jobs.{verb}")

    def run() -> program.Summary:
        began = time.monotonic()
        summary: program.Summary = module.run(config)
        there = summary.get("already_done")
        lines = [f"{title}: {'already done' if there else f'{time.monotonic() - began:.1f} s'}"]
        for name in ("counts", "dropped"):
            if numbers := summary.get(name):
                lines += [f"{name}: " + ", ".join(f"{n:,} {what}" for what, n in numbers.items())]
        metrics = summary.get("metrics", {})
        if losses := {k: n for k, n in metrics.items() if "loss" in k or k == "accuracy"}:
            lines += [", ".join(f"{name} {value:.3f}" for name, value in losses.items())]
        print("   " + "\n   ".join(lines), flush=True)
        return summary

    return run


def _recipe(name: str) -> str:
    return os.path.relpath(_CONFIGS / f"{name}.yaml")


def _gpus() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU"))


def _example(corpus: str) -> dict[str, Any]:
    """A held-out example with something to go by: a greeting has a hundred right replies."""
    uri = open_artifact(corpus, "corpus").files("valid/", ".parquet")[0]
    with storage.open_input(uri) as stream:
        rows: list[dict[str, Any]] = pq.read_table(stream).to_pylist()
    return max(rows[:20], key=lambda row: len(row["context"][-1]))


def _post(port: int, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def _show(results: list[dict[str, Any]], right: str) -> None:
    for result in results:
        mark = "*" if result["text"] == right else " "
        print(f"  {mark}{result['score']:8.2f}  {result['text'][:110]}")


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BadInput(f"--port {port}: in use; choose another")


if __name__ == "__main__":
    program.main(Config, run, "demo")
