"""The frame of every job: its configuration in, one line of JSON out, exit codes with a meaning.

0: done, or nothing left to do. 2: bad usage, configuration or input, said in one line. 130: ended by
Ctrl-C. Anything else: failed. After 130 and a failure the same command again resumes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from pipeline.artifact import Artifact
from pipeline.config import BadInput, Stopped, parse
from pipeline.tasks.failures import cause_of, storage_failure, store_out_of_reach, store_refusal

ConfigT = TypeVar("ConfigT")
Summary = dict[str, Any]

command_of_verb = "python -m jobs.{}"
"""The command before a verb's options; `jobs.__main__` changes it."""


def main(config_class: type[ConfigT], run: Callable[[ConfigT], Summary], name: str) -> None:
    """Runs a job from the command line and exits."""
    program = command_of_verb.format(name)
    try:
        summary = run(parse(config_class, sys.argv[1:], program))
    except BadInput as error:
        _refuse(program, error)
    except Stopped as error:
        _refuse(program, error, 1)
    except KeyboardInterrupt:
        _refuse(program, Stopped("interrupted; the same command resumes"), 130)
    except Exception as error:
        if refusal := cause_of(error, BadInput):
            _refuse(program, refusal)
        if stopped := cause_of(error, Stopped):
            _refuse(program, stopped, 1)
        if store_reason := store_refusal(error):
            _refuse(program, BadInput(store_reason))
        if unreachable := store_out_of_reach(error):
            message = f"the object store cannot be reached: {unreachable}"
            _refuse(program, Stopped(f"{message}; the same command resumes when it can"), 1)
        if failure := storage_failure(error):
            _refuse(program, Stopped(f"{failure}; the same command resumes when it can write"), 1)
        raise
    if store := getattr(sys.modules.get("pipeline.tracking"), "local_store", ""):
        message = f"runs and curves: mlflow ui --backend-store-uri {store}"
        print(message, file=sys.stderr, flush=True)
    print(json.dumps({"job": name, **summary}, ensure_ascii=False), flush=True)


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


def _refuse(program: str, error: BadInput | Stopped, code: int = 2) -> None:
    print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(code)
