"""The frame of every job: its configuration in, one line of JSON out, exit codes with a meaning.

0: done, or nothing left to do. 2: bad usage, configuration or input, said in one line. 130: ended by
Ctrl-C. 143: by SIGTERM. Anything else: failed. After 130, 143 and a failure the same command again resumes.

The last line of standard output sums up the job as JSON. If the job fails, the line has its `exit_code` and
its `error`. A process that ends without this line has died: its exit code, which may be 2, says nothing
about the input (`said_by_job`). A terminal gets this line in words; of a failure it gets only the line on
standard error.
"""

from __future__ import annotations

import atexit
import io
import json
import os
import re
import select
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from types import MappingProxyType
from typing import Any, TextIO, TypeVar

from pipeline import storage
from pipeline.artifact import Artifact
from pipeline.config import NOT_IDENTITY, BadInput, Stopped, parse
from pipeline.processor import bound_kind
from pipeline.storage.failures import cause_of, storage_failure, store_failure, store_refusal

ConfigT = TypeVar("ConfigT")
Summary = dict[str, Any]
_MOST_COUNTS = 3  # of reasons that a line names

OUTPUT: Mapping[str, Any] = MappingProxyType({**NOT_IDENTITY, "output": True})
"""The `metadata` of an option that names what a job writes. It is no part of the job's identity, and
jobs.submit refuses a folder of this machine."""

OUTPUT_FILE: Mapping[str, Any] = MappingProxyType({**OUTPUT, "file": True})
"""The `metadata` of an option that names a file, which a job writes at its end."""

SIGPIPE = 128 + 13
"""The exit code of a program whose output nobody reads any more."""

SIGTERM = 128 + 15
"""The exit code of a program that SIGTERM has ended."""

command_of_verb = "python -m jobs.{}"
"""The command before a verb's options; `jobs.__main__` changes it."""


def main(config_class: type[ConfigT], run: Callable[[ConfigT], Summary], name: str) -> None:
    """Runs a job from the command line and exits."""
    _exit_at_sigterm()
    _mend_streams()
    _leave_folder_of_ray()
    program = command_of_verb.format(name)
    try:
        config = parse(config_class, sys.argv[1:], program)
        bound_kind()  # a wrong one is refused before anything starts
        _require_current_folder()
        for option in fields(config):  # type: ignore[arg-type]
            if option.metadata.get("file") and (uri := getattr(config, option.name)):
                storage.require_file(option.name, uri)
        summary = run(config)
    except BaseException as error:
        if isinstance(error, BrokenPipeError) and _reader_has_left():
            sys.exit(SIGPIPE)
        explained = _explain(error)
        if isinstance(error, SystemExit) and not explained:  # of argparse; 0: --help
            if error.code:
                _print_summary({"job": name, "exit_code": error.code, "error": ""})
            raise
        code, text = explained or (1, f"{type(error).__name__}: {error}")
        text = " ".join(text.split())
        if explained:
            say(f"{program}: {text}", sys.stderr)
        if not (explained and sys.stdout.isatty() and sys.stderr.isatty()):
            _print_summary({"job": name, "exit_code": code, "error": text})
        if explained:
            sys.exit(code)
        raise
    say_runs()
    if not _print_summary({"job": name, **summary}):
        sys.exit(SIGPIPE)


def say_runs() -> None:
    """Says how to see the runs that this process has recorded on this machine."""
    if store := getattr(sys.modules.get("pipeline.tracking"), "local_store", ""):
        say(f"runs and curves: mlflow ui --backend-store-uri {store}", sys.stderr)


def _explain(error: BaseException) -> tuple[int, str] | None:
    """(exit code, what the user should know) of a failure; None: nobody has foreseen it."""
    if isinstance(error, KeyboardInterrupt):
        return 130, "interrupted; the same command resumes"
    if isinstance(error, SystemExit):
        # The handler of Ray, which has its own while it starts, exits with the signal's number.
        is_sigterm = error.code in (SIGTERM, signal.SIGTERM)
        return (SIGTERM, "terminated; the same command resumes") if is_sigterm else None
    if not isinstance(error, BadInput | Stopped):  # of a task, or a worker
        error = cause_of(error, BadInput) or cause_of(error, Stopped) or error
    if isinstance(error, BadInput):
        return 2, str(error)
    if isinstance(error, Stopped):
        return error.exit_code, str(error)
    if refusal := store_refusal(error):
        return 2, refusal
    if problem := store_failure(error):
        return 1, f"{problem}; the same command resumes when it can"
    if failure := storage_failure(error):
        return 1, f"{failure}; the same command resumes when it can write"
    return None


def summary_of(output: str, name: str) -> Summary:
    """The summary in a job's output; empty where there is none, as the job's process died."""
    # A bar without a line end may stand before the summary where both streams go into one file.
    summaries = re.findall(rf'\{{"job": "{name}".*\}}$', output, re.MULTILINE)
    return summary_in(summaries[-1]) if summaries else {}


def said_by_job(output: str, name: str, code: int) -> bool:
    """Whether a job says in its output that it ends with this exit code; else its process died."""
    summary = summary_of(output, name)
    return bool(summary) and summary.get("exit_code", 0) == code


def summary_in(line: str) -> Summary:
    """The summary that is the last line of a job's output; empty for another line."""
    try:
        summary = json.loads(line)
    except ValueError:
        return {}
    return summary if isinstance(summary, dict) and "job" in summary else {}


def artifact_summary(artifact: Artifact, already_there: bool, **details: Any) -> Summary:
    """The summary of a job that makes an artifact."""
    return {
        "output": artifact.uri,
        "fingerprint": artifact.fingerprint,
        "already_done": already_there,
        "counts": artifact.counts,
        "dropped": artifact.manifest["dropped"],
        "seconds": artifact.manifest["seconds"],
        **details,
    }


def in_words(summary: Summary) -> str:
    """A summary for people: "embed_pool: done in 12.3 s: my/pools/answers/v-1 (87 candidates, 16 shards);
    left out: 2 empty text"."""
    if "exit_code" in summary:
        return f"{summary['job']}: failed (exit code {summary['exit_code']}): {summary['error']}"
    done = "already done" if summary.get("already_done") else "done"
    seconds = f" in {summary['seconds']:,} s" if "seconds" in summary and done == "done" else ""
    output = f": {summary['output']}" if summary.get("output") else ""
    numbers = (summary.get("counts") or {}).items()
    counted = ", ".join(f"{number:,} {name}" for name, number in numbers if "." not in name)
    counts = f" ({counted})" if counted else ""
    dropped = {reason: n for reason, n in (summary.get("dropped") or {}).items() if n}
    left_out = f"; left out: {counts_in_words(dropped)}" if dropped else ""
    return f"{summary['job']}: {done}{seconds}{output}{counts}{left_out}"


def counts_in_words(counts: Mapping[str, int]) -> str:
    """The largest counts, and how many records the other reasons have: "12 no answer, 3 not JSON"."""
    largest = sorted(counts.items(), key=lambda item: -item[1])
    others = sum(number for _, number in largest[_MOST_COUNTS:])
    shown = [f"{number:,} {reason}" for reason, number in largest[:_MOST_COUNTS]]
    return ", ".join(shown + ([f"{others:,} for other reasons"] if others else []))


def _print_summary(summary: Summary) -> bool:
    is_ascii = "utf" not in (sys.stdout.encoding or "utf-8").lower()
    summary_json = json.dumps(summary, ensure_ascii=is_ascii)
    return say(in_words(summary) if sys.stdout.isatty() else summary_json, sys.stdout)


def say(line: str, stream: TextIO) -> bool:
    """Prints a line. False: its reader has left, as `head` does, or was killed."""
    try:
        print(line, file=stream, flush=True)
    except BrokenPipeError:
        _discard(stream)
        return False
    return True


def _reader_has_left() -> bool:
    """Whether who reads this job's output has closed it; what is left to print is lost."""
    poll = select.poll()
    poll.register(sys.stdout.fileno())
    if not any(event & select.POLLERR for _, event in poll.poll(0)):
        return False
    _discard(sys.stdout)
    return True


def _discard(stream: TextIO) -> None:
    # Python flushes once more at its end.
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _exit_at_sigterm() -> None:
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(SIGTERM))


def _mend_streams() -> None:
    """A stream that the parent has closed (`>&-`) leads nowhere, and what the locale's encoding lacks is
    printed as its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _require_current_folder() -> None:
    try:
        Path.cwd()
    except FileNotFoundError:
        raise BadInput("the current folder has been removed; type the command in another") from None


def _leave_folder_of_ray() -> None:
    """Moves a submitted job to a copy of the folder into which Ray has unpacked it.

    Ray 2.60 removes that folder and unpacks it again while the job runs: when another node on the same
    machine starts the job's first task, or when two jobs with the same files start at once. A process
    without a folder finds no file by a relative path, and Intel's MKL ends it when it imports torch, with
    exit code 2 and "Cannot load …/libtorch_cpu.so".
    """
    root = Path(__file__).parents[1]
    if "working_dir_files" not in root.parts:
        return
    try:
        if Path.cwd() != root:
            return
    except FileNotFoundError:  # it is gone already
        pass
    folder = tempfile.mkdtemp(prefix="polyrank-job-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    shutil.copytree(root, folder, dirs_exist_ok=True)
    os.chdir(folder)
