"""The sources of encoders and other models.

What travels to workers is a `Source`, not a folder: each node of a cluster makes a copy of its own.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Protocol

from huggingface_hub import constants, get_session, snapshot_download

from pipeline import storage
from pipeline.artifact import (
    MANIFEST,
    Artifact,
    fingerprint_of_entries,
    folder_entries,
    open_artifact,
)
from pipeline.config import BadInput, require
from pipeline.models.settings import SETTINGS, Reduction, read_settings
from pipeline.storage import fingerprints, node_cache

SENTENCE_TRANSFORMERS = "modules.json"
"""A file in every directory that sentence-transformers saved."""
REDUCTIONS: dict[str, Reduction] = {
    "cls": "first", "mean": "mean",
    "pooling_mode_cls_token": "first", "pooling_mode_mean_tokens": "mean",
}  # fmt: skip
"""Of the names that its Pooling has: in newer versions a mode, in older ones a flag for each."""
_FROM_HUB = ["*.json", "*.safetensors", "*.txt"]
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"


class Source(Protocol):
    """A folder of files, wherever they lie: an `Artifact`, or one of those below."""

    def local(self) -> Path:
        """The folder, or a copy of it, on the disk of this process' node."""


@dataclass(frozen=True)
class Tower:
    """A ranker's context encoder, or a cross-encoder's only one; another tower lies beside it. The ranker
    itself where its encoder has no folder of its own."""

    ranker: Artifact

    def local(self) -> Path:
        folder = self.ranker.local()
        names = ("context_encoder", "encoder")
        return next((folder / name for name in names if (folder / name).exists()), folder)


@dataclass(frozen=True)
class External:
    """A folder that no job made."""

    uri: str
    version: str
    """Names the contents."""

    def local(self) -> Path:
        return node_cache.local_folder(self.uri, self.version)


@dataclass(frozen=True)
class HubModel:
    """A model of the Hugging Face hub."""

    name: str
    revision: str

    def local(self) -> Path:
        return fetch_from_hub(self.name, self.revision)  # a node may have no way to the hub


def open_encoder(uri: str, option: str = "--encoder") -> tuple[Source, dict[str, Any]]:
    """The model that a ranker starts from, and the manifest's reference to it.

    An encoder: ours, a ranker's, any `transformers` directory, or a hub id. Or a tokenizer of ours, for a
    ranker that starts from nothing else. `option` names the URI in messages.
    """
    if storage.is_local(uri) and uri.count("/") > 1 and not storage.exists(uri):
        raise BadInput(f"{option} {uri}: there is no such folder")
    source, reference = _open_model(uri, option, "config.json", "encoder", "ranker", "tokenizer")
    if isinstance(source, Artifact) and source.kind == "ranker":
        source = Tower(source)
    return source, reference


def open_text_encoder(uri: str, option: str = "--encoder") -> tuple[Source, dict[str, Any]]:
    """Any model that gives texts vectors, and the manifest's reference to it: a ranker or an encoder of ours,
    what sentence-transformers saved, a `transformers` directory, or a hub id. `option` names the URI in
    messages.

    Raises BadInput where there is none, and for a ranker without vectors.
    """
    if storage.exists(storage.join(uri, MANIFEST)):
        artifact = open_artifact(uri, "ranker", "encoder", "sentence-transformers")
        if artifact.kind == "ranker":
            read_settings(artifact.uri).require_vectors()
        return artifact, artifact.reference()
    if storage.exists(uri):
        uri = storage.absolute(uri)  # a manifest names it, and is read elsewhere
    if storage.exists(storage.join(uri, SENTENCE_TRANSFORMERS)):
        return open_external(uri)
    return open_encoder(uri, option)


@dataclass(frozen=True)
class Prompts:
    """What is put before contexts and candidates."""

    context: str = ""
    candidate: str = ""


def read_prompts(folder: Path) -> Prompts:
    """The prompts of a model that sentence-transformers saved, by the rules of its `encode_query` and
    `encode_document`: those named query, and document, passage or corpus, else the one that
    `default_prompt_name` names. Version 6.2 applies no passage, corpus or default prompt, against its pages.
    Says which other prompts are left out.

    Raises BadInput for a configuration that is not to be read.
    """
    path = folder / "config_sentence_transformers.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    except (OSError, ValueError) as error:
        raise BadInput(f"{path}: not to be read ({error})") from None
    prompts = {name: prompt or "" for name, prompt in (config.get("prompts") or {}).items()}
    for name, prompt in prompts.items():
        require(isinstance(prompt, str), f"{path}: prompts: {name}", prompt, "a text")
    default_name = config.get("default_prompt_name")
    require(default_name is None or default_name in prompts, f"{path}: default_prompt_name",
            default_name, ", ".join(prompts) or "none")  # fmt: skip
    default = prompts.get(default_name, "")
    documents = [prompts[name] for name in ("document", "passage", "corpus") if name in prompts]
    found = Prompts(prompts.get("query", default), documents[0] if documents else default)
    used = ("", found.context, found.candidate)
    if left_out := [name for name, prompt in prompts.items() if prompt not in used]:
        print(f"{path}: prompts left out: {', '.join(left_out)}", file=sys.stderr, flush=True)
    return found


def read_modules(folder: Path) -> tuple[str, list[str]]:
    """(the reduction of a model that sentence-transformers saved: first, mean or another one's name; the
    kinds of the modules behind it, such as Dense). For another folder ("", [])."""
    path = folder / SENTENCE_TRANSFORMERS
    if not path.exists():
        return "", []
    try:
        modules = json.loads(path.read_text(encoding="utf-8"))
        kinds = [module["type"].split(".")[-1] for module in modules]
        pooling = folder / modules[kinds.index("Pooling")]["path"] / "config.json"
        config = json.loads(pooling.read_text(encoding="utf-8"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return "", []  # only its encoder is used
    flags = [name for name, on in config.items() if name.startswith("pooling_mode_") and on is True]
    mode = config.get("pooling_mode") or (flags[0] if len(flags) == 1 else "several")
    return REDUCTIONS.get(str(mode)) or str(mode), kinds[kinds.index("Pooling") + 1 :]


def open_tokenizer(uri: str, option: str = "--tokenizer") -> tuple[Source, dict[str, Any]]:
    """A tokenizer, and the manifest's reference to it: ours, an encoder's, any `transformers` directory, or a
    hub id. `option` names the URI in messages.

    Raises BadInput where there is none.
    """
    return _open_model(uri, option, "tokenizer.json", "tokenizer", "encoder")


def open_external(uri: str) -> tuple[External, dict[str, Any]]:
    """A folder that no job made, and the manifest's reference to it."""
    source = External(
        storage.absolute(uri), fingerprints.raw_fingerprint(storage.list_files(uri), whole=True)
    )
    return source, _reference(uri, source)


def fetch_from_hub(name: str, revision: str | None = None) -> Path:
    """The snapshot of a model of the Hugging Face hub, on this node's disk.

    Raises BadInput where there is none, or where the hub is out of reach.
    """
    try:
        hooks = get_session().event_hooks["request"]
        if _limit_wait not in hooks:
            hooks.append(_limit_wait)
        return Path(snapshot_download(name, revision=revision, allow_patterns=_FROM_HUB))
    except Exception as error:  # the hub's client raises a dozen kinds
        reason = str(error).splitlines()[0]
        raise BadInput(f"{name}: no such folder, nor to be had from the hub ({reason})") from None


def require_fetched(path: Path) -> None:
    """Raises BadInput for a pointer that `git clone` without Git LFS has fetched in place of a file."""
    with path.open("rb") as file:
        if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
            raise BadInput(f"{path}: a pointer of Git LFS; `git lfs pull` fetches the file itself")


def _limit_wait(request: Any) -> None:
    """`snapshot_download` asks for the model's commit and its files without a timeout, so it would wait for
    ever for a hub that takes the connection and says nothing."""
    timeouts = request.extensions["timeout"]
    request.extensions["timeout"] = {
        kind: constants.HF_HUB_ETAG_TIMEOUT if seconds is None else seconds
        for kind, seconds in timeouts.items()
    }


def _open_model(
    uri: str, option: str, needed_file: str, *kinds: str
) -> tuple[Source, dict[str, Any]]:
    """An artifact of one of these kinds, a folder that no job made, or a model of the hub."""
    if storage.exists(storage.join(uri, MANIFEST)):
        artifact = open_artifact(uri, *kinds)
        return artifact, artifact.reference()
    if storage.is_local(uri) and uri.count("/") <= 1 and not storage.exists(uri):  # may be a hub id
        return _open_hub_model(uri, option, needed_file)
    if not storage.exists(storage.join(uri, needed_file)):
        is_ranker = storage.exists(storage.join(uri, SETTINGS))
        hint = f"; it is a ranker without {MANIFEST}: name a tower in it" if is_ranker else ""
        kind = "tokenizer" if needed_file == "tokenizer.json" else "model directory"
        raise BadInput(f"{option} {uri}: not a {kind} ({needed_file} is missing){hint}")
    return open_external(uri)


def _open_hub_model(name: str, option: str, needed_file: str) -> tuple[HubModel, dict[str, Any]]:
    try:
        revision = fetch_from_hub(name).name  # the folder of a snapshot is named after its commit
    except BadInput as error:
        raise BadInput(f"{option} {error}") from None
    source = HubModel(name, revision)
    if not (source.local() / needed_file).exists():
        raise BadInput(f"{option} {name}: not a model directory ({needed_file} is missing)")
    # The snapshot may hold more that somebody else has fetched.
    return source, _reference(name, source, _FROM_HUB)


def _reference(uri: str, source: Source, patterns: Sequence[str] = ("*",)) -> dict[str, Any]:
    entries = [
        entry
        for entry in folder_entries(source.local())
        if any(fnmatch(entry["path"], pattern) for pattern in patterns)
    ]
    fingerprint = fingerprint_of_entries(entries)
    return {"uri": uri, "kind": "external", "fingerprint": fingerprint}
