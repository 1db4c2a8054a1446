"""The whole path on this machine: raw dumps → corpora → encoder → rankers → pools → HTTP.

Every stage is a job that can run alone; its command and its output are in `demo.log`. Finished stages are
recognised, so the same command resumes a demo that was killed.
"""

from __future__ import annotations

import json
import os
import signal
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jobs import cluster, demo_data, demo_questions, program
from jobs.demo_stages import (
    SECONDS,
    Stage,
    begin_stage,
    log_to,
    logged,
    row,
    run_side_by_side,
    run_stage,
    seconds,
    timed,
)

_CONFIGS = Path(__file__).parent / "configs"


@dataclass(frozen=True, kw_only=True)
class Config:
    """Runs the whole path on sample data, from raw dumps to a service, and sends it requests.

    It starts a Ray of its own. Without --data it generates sample corpora. Without --encoder it pre-trains
    one.
    """

    ALIASES = MappingProxyType({"keep": "keep_running"})
    work: str = field(default=".demo", metadata=program.OUTPUT)
    """Folder for all outputs."""
    data: str = ""
    """Folder with real dumps: RC_* files, ConvAI2's *_self_original*.txt, WikiExtractor output."""
    encoder: str = ""
    """A pre-trained sentence encoder to start from: a `transformers` directory."""
    keep_running: bool = False
    """Leave the service and the dashboard up until Ctrl-C."""
    port: int = 8000
    """Port of the service, on 127.0.0.1."""


def run(config: Config) -> program.Summary:
    began = time.monotonic()
    work = Path(config.work)
    user_data = demo_data.find_files(Path(config.data)) if config.data else None
    cluster.require_free("127.0.0.1", config.port)
    database = str((work / "mlflow.db").absolute()).replace("%", "%25")  # SQLAlchemy decodes it
    os.environ.setdefault("MLFLOW_TRACKING_URI", f"sqlite:///{database}")
    work.mkdir(parents=True, exist_ok=True)
    print(f"Each line is a job. Its command and its output: {work}/demo.log\n", flush=True)

    from ray import serve

    # Two trainings side by side have eight processes, of which Ray warns on 2 cores, four times as many as it
    # starts at once.
    os.environ.setdefault("RAY_worker_maximum_startup_concurrency", "4")
    # Ray's dashboard is a dozen processes, which take seconds of the cores: for somebody who will look.
    with log_to(work / "demo.log"), cluster.session(dashboard=config.keep_running) as dashboard:
        _make_corpora(work, user_data or demo_data.sample(work / "sample"))
        encoder = config.encoder or _pretrain(work)
        recipes = "finetune" if config.encoder else "demo"
        _train_rankers(work, encoder, recipes)
        tables = _evaluate(work, all_examples=bool(config.encoder))
        _embed_pools(work)
        _serve(work, config.port)
        answers = demo_questions.ask(config.work, config.port)
        minutes = round((time.monotonic() - began) / 60, 2)
        details = {"minutes": minutes, "seconds": SECONDS, "tables": tables, "answers": answers}
        (work / "demo.json").write_text(json.dumps(details, indent=1, ensure_ascii=False))
        _print_next_steps(config, minutes, dashboard)
        if config.keep_running:
            with suppress(KeyboardInterrupt):
                signal.pause()
        for name in ("replies", "articles"):
            serve.delete(name)
    r_at_1 = {name: next(iter(row.values())) for name, row in tables["replies"]["table"].items()}
    numbers = {"minutes": minutes, "r_at_1": r_at_1}
    return {"output": str(work), **numbers, "details": f"{work}/demo.json"}


# -------------------------------------------------------------------------------------------------
# Stages


def _make_corpora(work: Path, data: demo_data.Data) -> None:
    corpora = work / "corpora"
    run_stage("Reddit dumps to examples", "prepare_corpus", "--format", "reddit",
          "--input", *data.reddit, "--output", f"{corpora}/reddit")  # fmt: skip
    run_stage("ConvAI2 dialogues to examples", "prepare_corpus", "--format", "convai2",
          "--input", *data.convai2, "--output", f"{corpora}/convai2")  # fmt: skip
    run_stage("Articles to search examples", "prepare_corpus", "--format", "wikipedia",
          "--wikipedia.task", "search", "--wikipedia.queries", "5", "--wikipedia.others", "0",
          "--input", *data.wikipedia, "--output", f"{corpora}/articles")  # fmt: skip


def _pretrain(work: Path) -> str:
    corpora = work / "corpora"
    run_stage("A tokenizer", "train_tokenizer", "--corpus", f"{corpora}/reddit", f"{corpora}/convai2",
          f"{corpora}/articles", "--tokenizer.vocabulary", "2000",
          "--output", f"{work}/tokenizer")  # fmt: skip
    run_stage("Reddit's examples to tokens", "tokenize_corpus", "--corpus", f"{corpora}/reddit",
          "--tokenizer", f"{work}/tokenizer", "--output", f"{work}/tokens")  # fmt: skip
    run_stage("An encoder, from Reddit", "pretrain",
          "--config", _recipe("pretrain/tiny-cpu"), "--corpus", f"{work}/tokens",
          "--output", f"{work}/encoder")  # fmt: skip
    return f"{work}/encoder"


def _train_rankers(work: Path, encoder: str, recipes: str) -> None:
    """All rankers start from a pre-trained encoder; with a new encoder, poly starts from bi, and cross from
    poly, which finds hard candidates for it and teaches it."""
    rankers, is_new = work / "rankers", recipes == "demo"
    # Without a GPU: no dropout, which costs CPUs a third of the time, no validation on the way, and 100
    # steps where an epoch of pairs or of whole articles would take most of an hour.
    real_on_cpu = recipes == "finetune" and not _has_gpu()
    cpu_options = ("--finetune.dropout", "0", "--loop.validate-every-epochs", "0")
    options = cpu_options if real_on_cpu else ()
    short_options = (*options, "--finetune.max-steps", "100") if real_on_cpu else ()
    corpus, start_of_poly, start_of_cross = "convai2", encoder, encoder
    if is_new:
        corpus, start_of_poly, start_of_cross = "convai2-scored", f"{rankers}/bi", f"{rankers}/poly"
    models = {
        "bi": ("bi", "convai2", "convai2", encoder, options),
        "cross": ("cross", "convai2", corpus, start_of_cross, short_options),
        "poly": ("poly", "convai2", "convai2", start_of_poly, options),
        "articles": ("poly", "wikipedia", "articles", encoder, short_options),
    }

    def begin(name: str, *resources: str) -> Stage:
        architecture, task, corpus, origin, task_options = models[name]
        files = [f"demo-{name}"]
        if not is_new:
            files = [f"finetune/{architecture}-small", f"finetune/tasks/{task}-small"]
        return begin_stage(
            f"Ranker: {name}", "finetune", "--config", *map(_recipe, files),
            "--corpus", f"{work}/corpora/{corpus}", "--encoder", origin, *task_options, *resources,
            "--register-as", f"polyrank-{name}", "--output", f"{rankers}/{name}",
        )  # fmt: skip

    # Side by side: of so small a model two threads do only 14 % more steps than one, and start no sooner.
    at_once = 1 if recipes == "finetune" or _has_gpu() else 2
    resources = ("--resources.cpus-per-worker", "1") if at_once == 2 else ()
    if _has_gpu():
        resources = ("--resources.gpu", "true")
    trainings = {name: begin(name, *resources) for name in ("bi", "articles", "poly")}
    run_side_by_side(trainings, at_once, predecessors={"poly": "bi"})
    if is_new:
        # The hardest 7 of 32 that are drawn. One with over 0.8 of the right one's score is often right, too.
        run_stage("Hard replies for cross, scored by poly", "score_candidates",
              "--corpus", f"{work}/corpora/convai2", "--teacher", f"{rankers}/poly",
              "--teaching.random-candidates", "7", "--teaching.hardest-of", "32",
              "--teaching.max-share", "0.8", "--output", f"{work}/corpora/{corpus}")  # fmt: skip
    # A step of cross is long enough for two processes.
    resources = ("--resources.workers", "2") if at_once == 2 else resources
    run_side_by_side({"cross": begin("cross", *resources)}, at_once=1)


def _evaluate(work: Path, all_examples: bool) -> dict[str, Any]:
    rankers, corpus = work / "rankers", f"{work}/corpora/convai2"
    rankers_compared = [f"{rankers}/{name}" for name in ("bi", "poly", "cross")]
    # A cross-encoder takes 40 ms for each question.
    limits = ("--max-examples", "500", "--latency-queries", "20")
    table = run_stage("The right reply among 20, held-out people", "evaluate", "--model", *rankers_compared,
                  "--corpus", corpus, *limits, "--json", f"{work}/replies.json")  # fmt: skip
    tables = {"replies": _table_numbers(table)}
    if all_examples:
        table = run_stage("The same on all examples", "evaluate", "--model", *rankers_compared[:2],
                      "--corpus", corpus, "--json", f"{work}/replies-all.json")  # fmt: skip
        tables["replies, all"] = _table_numbers(table)
    table = run_stage("The right article among 20, held-out articles", "evaluate",
                  "--model", f"{rankers}/articles", "--corpus", f"{work}/corpora/articles",
                  "--source", "sampled", "--json", f"{work}/articles.json")  # fmt: skip
    return {**tables, "articles": _table_numbers(table)}


def _table_numbers(summary: program.Summary) -> dict[str, Any]:
    """Prints the table's main columns; returns all of its numbers."""
    numbers = {name: summary[name] for name in ("table", "intervals", "latency_ms")}
    for name, metrics in numbers["table"].items():
        r_at_1, *_ = metrics
        low, high = numbers["intervals"][name][r_at_1]
        latency = numbers["latency_ms"].get(name)
        milliseconds = f"  {latency['median']:4.1f} ms a question" if latency else ""
        quality = f"{r_at_1} {metrics[r_at_1]:.3f} ({low:.3f} to {high:.3f})"
        print(f"   {name:<13} {quality}{milliseconds}")
    return numbers


def _embed_pools(work: Path) -> None:
    # One process each: a second would take longer to import torch than it saves.
    one_actor = () if _has_gpu() else ("--resources.actors", "1")
    run_stage("A pool of replies", "embed_pool", "--model", f"{work}/rankers/poly",
          "--candidates", f"{work}/corpora/convai2/train", "--embed.text-column", "response",
          "--embed.id-column", "example_id", "--pools", f"{work}/pools",
          "--name", "replies", *one_actor)  # fmt: skip
    # Five examples of an article are one candidate: the other four have the same id.
    run_stage("A pool of articles", "embed_pool", "--model", f"{work}/rankers/articles",
          "--candidates", f"{work}/corpora/articles", "--embed.text-column", "response",
          "--embed.id-column", "group_id", "--embed.repeated-ids", "first", "--pools", f"{work}/pools",
          "--name", "articles", *one_actor)  # fmt: skip


def _serve(work: Path, port: int) -> None:
    from ray import serve
    from ray.serve.schema import LoggingConfig

    from serve.app import Args, build

    print(row("serve", "A service for both pools"), end="", flush=True)
    logging = LoggingConfig(log_level="ERROR", enable_access_log=False)
    targets = []
    for model, pool, route in (("poly", "replies", "/"), ("articles", "articles", "/articles")):
        app = build(Args(model=f"{work}/rankers/{model}", pools=[f"{work}/pools/{pool}"]))
        options = {"name": pool, "route_prefix": route, "logging_config": logging}
        targets.append(serve.RunTarget(app, **options))
    with timed("The service"), logged():
        serve.start(http_options={"host": "127.0.0.1", "port": port}, logging_config=logging)
        serve.run_many(targets)
    print(seconds("The service"))


def _print_next_steps(config: Config, minutes: float, dashboard: str) -> None:
    """Only what works at that moment: without `keep_running` the service has ended."""
    tracking = os.environ["MLFLOW_TRACKING_URI"]
    print(f"""
Done in {minutes:.1f} minutes.
   R@1 by milliseconds   {config.work}/replies.png; all numbers: {config.work}/demo.json
   curves and lineage    .venv/bin/mlflow ui --backend-store-uri {tracking}
   search a pool         .venv/bin/python -m jobs.search --pool {config.work}/pools/replies \\
                             --model {config.work}/rankers/poly --context "how is work going ?"
""", end="", flush=True)  # fmt: skip
    if not config.keep_running:
        print("   the service again     make demo KEEP=1, which finds all stages done", flush=True)
        return
    body = json.dumps({"context": ["how is work going ?"], "pool": "replies", "top_k": 3})
    url = f"http://127.0.0.1:{config.port}"
    print(f"""   Ray's dashboard       {dashboard}
   the playground        {url}/  (interface: {url}/openapi.json)
   ask it                curl -s {url}/rank -H 'content-type: application/json' -d '{body}'
Ctrl-C ends the service.""", flush=True)  # fmt: skip


# -------------------------------------------------------------------------------------------------
# Helpers


def _recipe(name: str) -> str:
    return os.path.relpath(_CONFIGS / f"{name}.yaml")


def _has_gpu() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU"))


if __name__ == "__main__":
    program.main(Config, run, "demo")
