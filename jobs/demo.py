"""The whole path on this machine: raw dumps → corpora → encoder → rankers → pools → HTTP.

Every stage is a job that can run alone; its command and its output are in `demo.log`. Finished stages are
recognised, so the same command resumes a demo that was killed.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from jobs import cluster, demo_data, demo_questions, program
from jobs.demo_stages import (
    SECONDS,
    Stage,
    log_to,
    logged,
    row,
    run_side_by_side,
    run_stage,
    seconds,
    timed,
)
from jobs.workflow import Step, read_steps

_STEPS = Path(__file__).parent / "workflows" / "demo.yaml"
_CONFIGS = Path(__file__).parent / "configs"
_RECIPES = {
    "bi": ("bi", "convai2"),
    "articles": ("poly", "wikipedia"),
    "poly": ("poly", "convai2"),
    "cross": ("cross", "convai2"),
}
"""The architecture and the task of each ranker."""
_ALL_EXAMPLES = "The same on all examples"
"""The step that is left out without a given encoder."""
_OF_A_NEW_ENCODER = ("train_tokenizer", "tokenize_corpus", "pretrain", "score_candidates")
"""Jobs that are left out with one."""


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
        data = user_data or demo_data.sample(work / "sample")
        tables = _run(_steps(config, data), at_once=1 if config.encoder or _has_gpu() else 2)
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


def _steps(config: Config, data: demo_data.Data) -> list[Step]:
    """The steps of the demo's workflow, with options for this machine: with or without a GPU."""
    is_new, has_gpu = not config.encoder, _has_gpu()
    values = {name: shlex.join(files) for name, files in vars(data).items()}
    values |= {"work": shlex.quote(config.work), "pretrain": _recipes("pretrain/tiny-cpu")}
    for name, (architecture, task) in _RECIPES.items():
        tuned = (f"finetune/{architecture}-small", f"finetune/tasks/{task}-small")
        values[name] = _recipes(f"demo-{name}") if is_new else _recipes(*tuned)
    if not is_new:
        starts = ("encoder", "start_of_poly", "start_of_cross")
        values |= dict.fromkeys(starts, shlex.quote(config.encoder))
        values["corpus_of_cross"] = shlex.quote(f"{config.work}/corpora/convai2")
    if has_gpu:
        values |= dict.fromkeys(("resources", "resources_of_cross"), "--resources.gpu true")
    elif is_new:
        # Of so small a model two threads do only 14 % more steps than one, and start no sooner. A step of
        # cross is long enough for two processes.
        values["resources"] = "--resources.cpus-per-worker 1"
        values["resources_of_cross"] = "--resources.workers 2"
    else:
        # No dropout, which costs CPUs a third of the time, no validation on the way, and 100 steps where an
        # epoch of pairs or of whole articles would take most of an hour.
        values["options"] = "--finetune.dropout 0 --loop.validate-every-epochs 0"
        values["short_options"] = f"{values['options']} --finetune.max-steps 100"
    if not has_gpu:  # a second process would take longer to import torch than it saves
        values["actors"] = "--resources.actors 1"
    settings = (f"{name}={words}" for name, words in values.items())
    steps = read_steps(str(_STEPS), tuple(setting.replace("$", "$$") for setting in settings))
    if is_new:
        return [step for step in steps if step.name != _ALL_EXAMPLES]
    return [step for step in steps if step.verb not in _OF_A_NEW_ENCODER]


def _run(steps: Iterable[Step], at_once: int) -> dict[str, Any]:
    """Runs the steps, trainings that follow each other side by side; returns the tables of evaluations."""
    tables: dict[str, Any] = {}
    for are_trainings, group in itertools.groupby(steps, lambda step: step.verb == "finetune"):
        if are_trainings:
            run_side_by_side([Stage.begin(step) for step in group], at_once)
            continue
        for step in group:
            summary = run_stage(step)
            if step.verb == "evaluate":
                tables[Path(step.config().json).stem] = _table_numbers(summary)
    return tables


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


def _recipes(*names: str) -> str:
    return shlex.join(os.path.relpath(_CONFIGS / f"{name}.yaml") for name in names)


def _has_gpu() -> bool:
    import ray

    return bool(ray.cluster_resources().get("GPU"))


if __name__ == "__main__":
    program.main(Config, run, "demo")
