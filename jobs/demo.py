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
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pyarrow.parquet as pq
from tqdm import tqdm

from jobs import cluster, program
from pipeline import storage
from pipeline.artifact import open_artifact
from pipeline.config import BadInput, parse
from pipeline.corpora.made_up import sample

_CONFIGS = Path(__file__).parent / "configs"
_RANKERS = ("bi", "cross", "poly", "articles")
_seconds: dict[str, float] = {}
"""Of each stage of this run, by its title."""


@dataclass(frozen=True, kw_only=True)
class Config:
    """Runs the whole path on sample data, from raw dumps to a service, and asks the service.

    It has a Ray of its own. Without --data on generated sample corpora; without --encoder one is pre-trained.
    """

    ALIASES = MappingProxyType({"keep": "keep_running"})
    work: str = ".demo"
    """Folder for everything that is made."""
    data: str = ""
    """Folder with real dumps: RC_* files, ConvAI2's *_self_original*.txt, WikiExtractor output."""
    encoder: str = ""
    """A pre-trained sentence encoder to start from: a `transformers` directory."""
    keep_running: bool = False
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

    # Ray's dashboard is a dozen processes, which take seconds of the cores: for somebody who will look.
    with cluster.session(dashboard=config.keep_running) as dashboard:
        _corpora(work, data)
        encoder = config.encoder or _pretrain(work)
        recipes = "finetune" if config.encoder else "demo"
        _rankers(work, encoder, recipes)
        tables = _evaluate(work, full=bool(config.encoder))
        _pools(work)
        _serve(work, config.port)
        answers = _ask(work, config.port)
        picture = _draw(work, tables)
        minutes = round((time.monotonic() - began) / 60, 2)
        details = {"minutes": minutes, "seconds": _seconds, "tables": tables, "answers": answers}
        (work / "demo.json").write_text(json.dumps(details, indent=1, ensure_ascii=False))
        _say_further(config, minutes, dashboard, picture)
        if config.keep_running:
            with suppress(KeyboardInterrupt):
                signal.pause()
        serve.shutdown()
    right = {name: next(iter(row.values())) for name, row in tables["replies"]["table"].items()}
    return {
        "output": str(work),
        "minutes": minutes,
        "r_at_1": right,
        "details": f"{work}/demo.json",
    }


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
        with _timed("Sample corpora"):
            sample.generate(folder)
        (folder / "DONE").touch()
        print(f"   {_seconds['Sample corpora']:.1f} s")
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

    def begin(name: str, *resources: str) -> _Begun:
        architecture, task, corpus, origin, more = models[name]
        files = [f"demo-{name}"]
        if recipes == "finetune":
            files = [f"finetune/{architecture}-small", f"finetune/tasks/{task}-small"]
        return _begin(
            f"A ranker, {name}", "finetune", "--config", *map(_recipe, files),
            "--corpus", f"{work}/corpora/{corpus}", "--encoder", origin, *more, *resources,
            "--register-as", f"polyrank-{name}", "--output", f"{rankers}/{name}",
        )  # fmt: skip

    if recipes == "finetune" or _gpus():
        for name in models:
            begin(name, *(("--resources.gpu", "true") if _gpus() else ())).run()
        return
    begin("bi").run()
    # Side by side: of so small a model two threads do only 14 % more steps than one.
    others = {
        name: begin(name, "--resources.cpus-per-worker", "1")
        for name in ("cross", "poly", "articles")
    }
    _side_by_side(others, at_once=2)


def _side_by_side(trainings: Mapping[str, _Begun], at_once: int) -> None:
    """One bar for all of them: bars of several threads would overwrite each other."""
    lock = threading.Lock()
    shown: dict[str, str] = {}
    done = Counter[str]()
    with tqdm(desc="trainings", unit="step", total=0) as bar:

        def run(name: str) -> None:
            def watch(step: int, steps: int) -> None:
                with lock:
                    if name not in shown:
                        bar.total = (bar.total or 0) + steps
                    shown[name] = f"{step}/{steps}"
                    bar.set_postfix(shown, refresh=False)
                    bar.update(step - done[name])
                    done[name] = step

            text = trainings[name].work(watch)
            with lock:
                bar.write(text)

        with ThreadPoolExecutor(at_once) as threads:
            for running in [threads.submit(run, name) for name in trainings]:
                running.result()


def _evaluate(work: Path, full: bool) -> dict[str, Any]:
    rankers, corpus = work / "rankers", f"{work}/corpora/convai2"
    three = [f"{rankers}/{name}" for name in ("bi", "poly", "cross")]
    few = ("--max-examples", "500", "--latency-queries", "20")  # a cross-encoder takes 40 ms each
    table = _stage("The right reply among 20, held-out people", "evaluate", "--model", *three,
                   "--corpus", corpus, *few, "--json", f"{work}/replies.json")  # fmt: skip
    found = {"replies": _numbers(table)}
    if full:
        table = _stage("The same on all examples", "evaluate", "--model", *three[:2],
                       "--corpus", corpus, "--json", f"{work}/replies-all.json")  # fmt: skip
        found["replies, all"] = _numbers(table)
    table = _stage("The right article among 20, held-out articles", "evaluate",
                   "--model", f"{rankers}/articles", "--corpus", f"{work}/corpora/articles",
                   "--source", "sampled", "--json", f"{work}/articles.json")  # fmt: skip
    return {**found, "articles": _numbers(table)}


def _numbers(evaluated: program.Summary) -> dict[str, Any]:
    return {name: evaluated[name] for name in ("table", "intervals", "latency_ms")}


def _pools(work: Path) -> None:
    # One process each: a second would take longer to import torch than it saves.
    one = () if _gpus() else ("--resources.actors", "1")
    _stage("A pool of replies", "embed_pool", "--model", f"{work}/rankers/poly",
           "--candidates", f"{work}/corpora/convai2/train", "--embed.text-column", "response",
           "--embed.id-column", "example_id", "--pools", f"{work}/pools",
           "--name", "replies", *one)  # fmt: skip
    # Five examples of an article are one candidate: the other four have the same id.
    _stage("A pool of articles", "embed_pool", "--model", f"{work}/rankers/articles",
           "--candidates", f"{work}/corpora/articles", "--embed.text-column", "response",
           "--embed.id-column", "group_id", "--embed.repeated-ids", "first", "--pools", f"{work}/pools",
           "--name", "articles", *one)  # fmt: skip


def _serve(work: Path, port: int) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from serve.app import Args, build

    print("\n== The service: dialogues at /rank, articles at /articles/rank", flush=True)
    quiet = LoggingConfig(log_level="ERROR", enable_access_log=False)
    with _timed("The service"):
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=quiet)
        for model, pool, route in (("poly", "replies", "/"), ("articles", "articles", "/articles")):
            served = Args(model=f"{work}/rankers/{model}", pools=[f"{work}/pools/{pool}"])
            serve.run(build(served), name=pool, route_prefix=route, logging_config=quiet)
    print(f"   {_seconds['The service']:.1f} s")


def _ask(work: Path, port: int) -> dict[str, Any]:
    """Real requests about examples that no training has seen."""
    corpora = f"{work}/corpora"
    dialogue = _example(f"{corpora}/convai2")
    print("\n== A dialogue, and its 20 candidates ranked\n")
    for turn in dialogue["context"]:
        print(f"   | {turn}")
    request = {"context": dialogue["context"], "candidates": dialogue["candidates"], "top_k": 3}
    given = _post(port, "/rank", request)
    _show(given["results"], text=dialogue["response"])
    print("\n   the same against the pool of replies of other people\n")
    pooled = _post(port, "/rank", {"context": dialogue["context"], "pool": "replies", "top_k": 3})
    _show(pooled["results"], text=dialogue["response"])
    article = _example(f"{corpora}/articles")
    print(f"\n== A sentence, and the articles it may come from\n\n   | {article['context'][0]}")
    request = {"context": article["context"], "pool": "articles", "top_k": 3}
    articles = _post(port, "/articles/rank", request)
    # The pool keeps an article without one of its sentences: not always without this one.
    _show(articles["results"], id=article["group_id"])
    if article["group_id"] not in [result["id"] for result in articles["results"]]:
        print("            (the true article is none of these)")
    return {"replies": given["results"], "pool": pooled["results"], "articles": articles["results"]}


def _draw(work: Path, tables: dict[str, Any]) -> str:
    """Draws the trainings' losses and R@1 against milliseconds; returns the picture's path."""
    from jobs.demo_picture import draw

    models = {name: (work / "rankers" / name, "ranker") for name in _RANKERS}
    if (work / "encoder").is_dir():
        models = {"pre-training": (work / "encoder", "encoder"), **models}
    runs = {
        name: str(open_artifact(str(folder), kind).manifest["run_id"])
        for name, (folder, kind) in models.items()
    }
    path = work / "demo.png"
    path.write_bytes(draw(runs, tables["replies"]))
    return str(path)


def _say_further(config: Config, minutes: float, dashboard: str, picture: str) -> None:
    tracking = os.environ["MLFLOW_TRACKING_URI"]
    body = json.dumps({"context": ["how is work going ?"], "pool": "replies", "top_k": 3})
    url = f"http://127.0.0.1:{config.port}"
    again = "" if config.keep_running else " (python -m jobs.demo --keep leaves it up)"
    print(f"""
== Done in {minutes:.1f} minutes. To look further{again}:

   the curves              {picture}: losses, and R@1 against milliseconds
   all numbers             {config.work}/demo.json
   runs, lineage           .venv/bin/mlflow ui --backend-store-uri {tracking}
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
    return _begin(title, verb, *argv).run()


class _Begun:
    """A job whose settings are read: only the rest may run in another thread, as reading a config changes
    the working directory for a moment."""

    def __init__(self, title: str, job: ModuleType, config: Any) -> None:
        self._title, self._job, self._config = title, job, config
        self._summary: program.Summary = {}

    def run(self) -> program.Summary:
        print(self.work(), flush=True)
        return self._summary

    def work(self, *watch: Callable[[int, int], None]) -> str:
        """Runs the job; returns what to say about it."""
        with _timed(self._title):
            summary = self._summary = self._job.run(self._config, *watch)
        took = "already done" if summary.get("already_done") else f"{_seconds[self._title]:.1f} s"
        lines = [f"{self._title}: {took}"]
        for name in ("counts", "dropped"):
            if numbers := summary.get(name):
                lines += [f"{name}: " + ", ".join(f"{n:,} {what}" for what, n in numbers.items())]
        metrics = summary.get("metrics", {})
        if losses := {k: n for k, n in metrics.items() if "loss" in k or k == "accuracy"}:
            lines += [", ".join(f"{name} {value:.3f}" for name, value in losses.items())]
        return "   " + "\n   ".join(lines)


def _begin(title: str, verb: str, *argv: str) -> _Begun:
    print(f"\n== {title}\n   $ python -m jobs.{verb} {shlex.join(argv)}", flush=True)
    module = importlib.import_module(f"jobs.{verb}")
    return _Begun(title, module, parse(module.Config, argv, f"python -m jobs.{verb}"))


@contextmanager
def _timed(title: str) -> Iterator[None]:
    began = time.monotonic()
    yield
    _seconds[title] = round(time.monotonic() - began, 1)


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


def _show(results: list[dict[str, Any]], **right: str) -> None:
    """The right result, by its text or its id, gets a star."""
    for result in results:
        mark = "*" if right.items() <= result.items() else " "
        print(f"  {mark}{result['score']:8.2f}  {result['text'][:110]}")


def _require_free(port: int) -> None:
    with socket.socket() as probe:
        if probe.connect_ex(("127.0.0.1", port)) == 0:
            raise BadInput(f"--port {port}: in use; choose another")


if __name__ == "__main__":
    program.main(Config, run, "demo")
