"""The frame of every job: its configuration in, one line of JSON out, exit codes with a meaning.

0: done, or nothing left to do. 2: bad usage, configuration or input, said in one line. Anything
else: failed; the same command again resumes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from huggingface_hub import snapshot_download

from pipeline import storage
from pipeline.artifact import MANIFEST, Artifact, folder_entries, open_artifact
from pipeline.config import BadInput, Stopped, digest, parse

ConfigT = TypeVar("ConfigT")
Summary = dict[str, Any]


def main(config_class: type[ConfigT], run: Callable[[ConfigT], Summary], name: str) -> None:
    """Runs a job from the command line and exits."""
    program = f"python -m jobs.{name}"
    try:
        summary = run(parse(config_class, sys.argv[1:], program))
    except BadInput as error:
        _refuse(program, error)
    except Stopped as error:
        _refuse(program, error, 1)
    except Exception as error:
        if inner := bad_input_in(error):
            _refuse(program, inner)
        raise
    print(json.dumps({"job": name, **summary}, ensure_ascii=False), flush=True)


def published(artifact: Artifact, already_there: bool, **more: Any) -> Summary:
    """The summary of a job that makes an artifact."""
    return {
        "output": artifact.uri,
        "fingerprint": artifact.fingerprint,
        "already_done": already_there,
        "counts": artifact.counts,
        "dropped": artifact.manifest["dropped"],
        "seconds": artifact.manifest["seconds"],
        **more,
    }


def open_encoder(uri: str) -> tuple[Path, dict[str, Any]]:
    """(local folder, reference) of an encoder.

    It may be ours, a ranker's (its context encoder; the other tower lies beside it), any
    `transformers` directory, or a hub id.
    """
    if storage.exists(storage.join(uri, MANIFEST)):
        artifact = open_artifact(uri, "encoder", "ranker")
        folder = artifact.local()
        if artifact.kind == "ranker":
            names = ("context_encoder", "encoder")
            folder = next(folder / name for name in names if (folder / name).exists())
        return folder, artifact.reference()
    if not storage.exists(uri) and storage.is_local(uri) and uri.count("/") == 1:
        try:
            patterns = ["*.json", "*.safetensors", "*.txt"]
            uri = snapshot_download(uri, allow_patterns=patterns)
        except Exception as error:  # the hub's client raises a dozen kinds
            reason = str(error).splitlines()[0]
            raise BadInput(
                f"--encoder {uri}: no such folder, nor to be had from the hub ({reason})"
            ) from None
    if not storage.exists(storage.join(uri, "config.json")):
        raise BadInput(f"--encoder {uri}: not a model directory (config.json is missing)")
    return open_external(uri)


def open_external(uri: str) -> tuple[Path, dict[str, Any]]:
    """(local folder, reference) of a folder that no job made."""
    folder = storage.local_folder(uri, "external")
    fingerprint = digest([(entry["path"], entry["sha256"]) for entry in folder_entries(folder)])
    return folder, {"uri": uri, "kind": "external", "fingerprint": fingerprint}


def _refuse(program: str, error: BadInput | Stopped, code: int = 2) -> None:
    print(f"{program}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
    sys.exit(code)


def bad_input_in(error: BaseException) -> BadInput | None:
    """The BadInput that a task on another machine raised, out of Ray's wrappers."""
    waiting, seen = [error], set[int]()
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        cause = getattr(at, "cause", None)
        if isinstance(at, BadInput) and not isinstance(cause, BadInput):
            return at
        causes = [cause, at.__cause__, at.__context__]
        failures = getattr(at, "worker_failures", None)
        causes += list(failures.values()) if isinstance(failures, dict) else []
        waiting += [found for found in causes if isinstance(found, BaseException)]
    return None
