"""Runs the jobs of a file one after the other: `python -m jobs.workflow jobs/workflows/dialogue.yaml`.

A workflow is a list of commands. Each job recognises its finished output, so the same workflow again
continues where it stopped. A job whose process dies without a word (`program.said_by_job`) is started again.
"""

from __future__ import annotations

import importlib
import io
import json
import os
import re
import shlex
import shutil
import signal
import string
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from contextlib import redirect_stderr
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

import yaml

from jobs import program
from jobs.__main__ import VERBS
from pipeline.config import BadInput, Stopped, parse, require
from pipeline.engine import executors
from pipeline.options.arguments import installed_file

_ROOT = Path(__file__).parents[1]
_JOBS = ("python", "-m")
_MAX_STARTS = 3
_ENDED_BY_SOMEBODY = (-signal.SIGTERM, -signal.SIGINT)


@dataclass(frozen=True, kw_only=True)
class Config:
    """Runs the steps of a workflow in order and stops at the first that fails.

    The same command again continues: finished jobs recognise their output within seconds. On a cluster:
    `python -m jobs.submit --wait -- workflow FILE`.
    """

    POSITIONAL = "file"

    file: str
    """The workflow: YAML with `variables` and `steps`, a command for each step's name."""
    set: tuple[str, ...] = ()
    """Values of the workflow's variables: NAME=VALUE."""
    start_at: str = ""
    """Skip the steps before this one."""
    skip: tuple[str, ...] = ()
    """Skip these steps, too."""
    dry_run: bool = False
    """Check all commands and print them; run the `--dry-run` of each job whose input exists already."""


@dataclass(frozen=True)
class Step:
    """A command of a workflow."""

    name: str
    command: tuple[str, ...]

    @property
    def verb(self) -> str:
        """The job that the command runs; "": another program."""
        if self.command[0] == "polyrank":
            return self.command[1].replace("-", "_") if len(self.command) > 1 else "--help"
        is_job = self.command[:2] == _JOBS and len(self.command) > 2
        return self.command[2].removeprefix("jobs.") if is_job else ""

    @property
    def options(self) -> tuple[str, ...]:
        """The job's options."""
        return self.command[2 if self.command[0] == "polyrank" else 3 :]

    @property
    def job(self) -> Any:
        """The job's module."""
        return importlib.import_module(f"jobs.{self.verb}")

    def config(self) -> Any:
        """The job's settings. Raises BadInput for options that it does not take."""
        with redirect_stderr(io.StringIO()):  # the job itself names a file's options without effect
            return parse(self.job.Config, self.options, f"python -m jobs.{self.verb}")


def run(config: Config) -> program.Summary:
    steps = read_steps(config.file, config.set)
    names = [step.name for step in steps]
    require(config.start_at in ("", *names), "start_at", config.start_at, ", ".join(names))
    for name in config.skip:
        require(name in names, "skip", name, ", ".join(names))
    start = names.index(config.start_at) if config.start_at else 0
    skipped = [name for at, name in enumerate(names) if at < start or name in config.skip]
    for step in steps:
        check(step)
    for step in steps:
        if step.name not in skipped:
            _check_environment(step)
    summaries: list[dict[str, Any]] = []
    for number, step in enumerate(steps, 1):
        if step.name in skipped:
            continue
        _announce(step, number, len(steps))
        is_first = not summaries
        summaries.append(_estimate(step, is_first) if config.dry_run else _run_step(step))
    about = {"workflow": config.file, "dry_run": config.dry_run}
    return {**about, "skipped": skipped, "steps": summaries}


def become(config: Config, name: str) -> NoReturn:
    """Runs a job of the workflow in place of this process, whose memory is free then."""
    steps = read_steps(config.file, config.set)
    number, step = next(at for at in enumerate(steps, 1) if at[1].name == name)
    _announce(step, number, len(steps))
    command = _program(("polyrank", step.verb, *step.options))
    os.execve(sys.executable, command, _environment())


def _announce(step: Step, number: int, steps: int) -> None:
    print(f"\n== {number}/{steps} {step.name}: {shlex.join(step.command)}", flush=True)


def read_steps(file: str, settings: tuple[str, ...] = ()) -> list[Step]:
    """The steps of a workflow, with its variables replaced.

    Raises BadInput for a file that is no workflow and for a variable without a value.
    """
    try:
        document = yaml.safe_load(Path(installed_file(file)).read_text(encoding="utf-8"))
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise BadInput(f"{file}: not a workflow ({error})") from None
    has_known_keys = isinstance(document, dict) and set(document) <= {"variables", "steps"}
    require(has_known_keys and isinstance(document.get("steps"), dict), file, _shortened(document),
            "a mapping with `steps` and, if needed, `variables`")  # fmt: skip
    values = _variables(file, document.get("variables") or {}, settings)
    steps = []
    for name, command in document["steps"].items():
        require(isinstance(command, str) and bool(command.strip()), f"{file}: steps.{name}",
                _shortened(command), "a command")  # fmt: skip
        place = f"{file}: steps.{name}"
        try:
            # YAML joins the lines of a command, so what stands behind a # may be the rest of its options.
            comment = re.search(r"(?<!\S)#.*", command)
            require(not comment, place, comment and _shortened(comment[0]), "a command without a comment in "
                    "its text; a comment stands above it")  # fmt: skip
            words = shlex.split(_replace(command, values, place))
        except ValueError as error:
            raise BadInput(f"{place}: {error} in {_shortened(command)!r}") from None
        require(bool(words), place, _shortened(command), "a command")
        steps.append(Step(str(name), tuple(words)))
    require(bool(steps), f"{file}: steps", "none", "one step or more")
    return steps


def _variables(file: str, declared: Any, settings: tuple[str, ...]) -> dict[str, str]:
    is_mapping = isinstance(declared, dict)
    require(is_mapping, f"{file}: variables", _shortened(declared), "names with values")
    values: dict[str, Any] = dict(declared)
    for setting in settings:
        name, equals, value = setting.partition("=")
        is_declared = bool(equals) and name in declared
        require(is_declared, "set", setting, f"NAME=VALUE with one of: {', '.join(declared)}")
        values[name] = value
    if missing := [name for name, value in values.items() if value is None]:
        raise BadInput(f"--set {missing[0]}=…: missing; {file} has no value for it")
    resolved: dict[str, str] = {}
    for name, value in values.items():  # a variable may use those above it
        resolved[name] = _replace(str(value), resolved, f"{file}: variables.{name}")
    return resolved


def _replace(text: str, values: Mapping[str, str], place: str) -> str:
    try:
        return string.Template(text).substitute(values)
    except KeyError as error:
        raise BadInput(f"{place}: ${{{error.args[0]}}} is no variable; known: {', '.join(values)}"
                       ) from None  # fmt: skip
    except ValueError as error:
        raise BadInput(f"{place}: {error}; a dollar sign is written $$") from None


def check(step: Step) -> None:
    """Raises BadInput for a command that cannot start. Called before any step runs."""
    if not step.verb:
        is_installed = shutil.which(step.command[0], path=_environment()["PATH"]) is not None
        require(is_installed, f"steps.{step.name}", step.command[0], "an installed program")
        return
    require(step.verb in VERBS, f"steps.{step.name}", step.verb, "a job, such as finetune")
    try:
        step.config()
    except BadInput as error:
        raise BadInput(f"steps.{step.name}: {error}") from None


def _check_environment(step: Step) -> None:
    """Raises BadInput where a job needs a variable that the environment lacks. `check` does not look: the
    cluster that a workflow is sent to may have the variable."""
    if step.verb and (check_environment := getattr(step.config(), "check_environment", None)):
        try:
            check_environment()
        except BadInput as error:
            raise BadInput(f"steps.{step.name}: {error}") from None


def _run_step(step: Step) -> dict[str, Any]:
    """The step's name, seconds, and a job's own summary. Raises BadInput or Stopped if it fails.

    A job whose tasks run in this process (`executors.in_this_process`) runs there itself.
    """
    began = time.monotonic()
    if step.verb and executors.current():
        summary = {"job": step.verb, **step.job.run(step.config())}
        _pass_on(json.dumps(summary, ensure_ascii=False) + "\n")
        return {"step": step.name, "seconds": round(time.monotonic() - began, 1), **summary}
    for start in range(1, _MAX_STARTS + 1):
        code, last_line = _run_command(step.command)
        said = not step.verb or program.said_by_job(last_line, step.verb, code)
        if not code or said or code in _ENDED_BY_SOMEBODY:
            break
        died = f"its process died (exit code {code}, start {start} of {_MAX_STARTS})"
        print(f"step {step.name}: {died}", file=sys.stderr, flush=True)
    if code:
        cause = program.summary_in(last_line).get("error", "")
        failed = f"step {step.name} failed (exit code {code}){': ' if cause else ''}{cause}"
        message = f"{failed}; the same command continues there"
        raise BadInput(message) if code == 2 and said and step.verb else Stopped(message)
    seconds = round(time.monotonic() - began, 1)
    return {"step": step.name, "seconds": seconds, **program.summary_in(last_line)}


def _estimate(step: Step, first: bool) -> dict[str, Any]:
    """The summary of the step's own --dry-run, if it has one and its input exists. Raises BadInput if the
    first step fails, since no earlier step makes its input."""
    if not step.verb or "dry_run" not in {field.name for field in fields(step.job.Config)}:
        return {"step": step.name}
    prefix = step.command[: len(step.command) - len(step.options)]
    # Before the options: what follows "--" is another job's.
    # The errors of a later step may be those of an input that is not there yet.
    command = (*prefix, "--dry-run", "true", *step.options)
    code, last_line = _run_command(command, hides_failure=not first)
    if code and first:
        raise BadInput(f"step {step.name} would fail (exit code {code})")
    if code:
        print(f"{step.name}: not known until the steps before it have run", flush=True)
        return {"step": step.name}
    return {"step": step.name, **program.summary_in(last_line)}


def _program(command: tuple[str, ...]) -> list[str]:
    """A step's command as it is started: a job by this Python."""
    if command[0] == "polyrank":
        command = (*_JOBS, "jobs", *command[1:])
    # -P: without it a file serve.py in the user's folder would be found before this tree's serve/.
    return [sys.executable, "-P", *command[1:]] if command[:2] == _JOBS else [*command]


def _run_command(command: tuple[str, ...], hides_failure: bool = False) -> tuple[int, str]:
    """Runs a command, passes its output on, and returns its exit code and the last line of output.

    `hides_failure`: passes the output on when the command has succeeded.
    """
    lines = deque[str](maxlen=None if hides_failure else 1)
    with subprocess.Popen(
        _program(command),
        env=_environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if hides_failure else None,
        encoding="utf-8",
        errors="replace",  # other programs may print what is not UTF-8
    ) as process:
        assert process.stdout
        try:
            for line in process.stdout:
                lines.append(line)
                if not hides_failure:
                    _pass_on(line)
        except (KeyboardInterrupt, SystemExit) as error:
            if isinstance(error, SystemExit):  # of SIGTERM; a step has Ctrl-C by itself
                process.terminate()
            for line in process.stdout:  # it may have a service to end
                _pass_on(line)
            process.wait()
            raise
    if hides_failure and not process.returncode:
        for line in lines:
            _pass_on(line)
    return process.returncode, lines[-1] if lines else ""


def _pass_on(line: str) -> None:
    summary = program.summary_in(line)
    if summary and sys.stdout.isatty():
        line = f"{program.in_words(summary)}\n"
    print(line, end="", flush=True)


def _environment() -> dict[str, str]:
    """Programs of this environment come first, and jobs are those of this tree."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    modules = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PATH": path, "PYTHONPATH": modules}


def _shortened(value: object) -> str:
    return str(value)[:80]


if __name__ == "__main__":
    program.main(Config, run, "workflow")
