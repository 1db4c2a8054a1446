"""Artifacts, which jobs pass to each other: immutable directories with a `manifest.json`.

A directory without a manifest is no artifact. `pipeline.engine.draft` makes artifacts.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import pyarrow as pa

from pipeline import checksums, storage
from pipeline.config import BadInput, digest
from pipeline.storage import node_cache

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
REQUEST = "_request.json"
"""The file that describes the artifact to be made. A directory with it and without a manifest is a draft."""
# Pictures, pages and reports show times and speeds; a training state is only for a longer training.
_BESIDE = ("*.png", "*.md", "report.json", "training_state/*")
_MADE_BY = {
    "corpus": "jobs.prepare_corpus",
    "tokenizer": "jobs.train_tokenizer",
    "encoder": "jobs.pretrain",
    "ranker": "jobs.finetune, or jobs.convert_model of a published model,",
    "pool": "jobs.embed_pool",
    "classifier": "jobs.classify_intents",
}


class NewerFormat(BadInput):
    """A later version of polyrank has made the artifact, which nothing of this version may replace."""


class FileEntry(TypedDict):
    """A file of an artifact, as the manifest lists it."""

    path: str
    """Below the artifact's folder."""
    rows: int
    """0: the file has no rows."""
    bytes: int
    sha256: str
    crc32: NotRequired[int]
    """Pools of earlier versions have none."""


@dataclass(frozen=True)
class Artifact:
    """A published directory."""

    uri: str
    manifest: dict[str, Any]

    @property
    def kind(self) -> str:
        return str(self.manifest["kind"])

    @property
    def fingerprint(self) -> str:
        """A hash of the contents: the same files have the same fingerprint, wherever they are. Pictures and
        reports do not count (`fingerprint_of_entries`)."""
        return str(self.manifest["fingerprint"])

    @property
    def counts(self) -> dict[str, int]:
        return dict(self.manifest["counts"])

    def paths(self, prefix: str = "", suffix: str = "") -> list[str]:
        """The artifact's files, in order, as its manifest names them."""
        names = (str(entry["path"]) for entry in self.manifest["files"])
        return [name for name in names if name.startswith(prefix) and name.endswith(suffix)]

    def files(self, prefix: str = "", suffix: str = "") -> list[str]:
        """The URIs of these files."""
        return [storage.join(self.uri, name) for name in self.paths(prefix, suffix)]

    def rows(self, prefix: str = "") -> int:
        entries = self.manifest["files"]
        return sum(entry["rows"] for entry in entries if entry["path"].startswith(prefix))

    def local(self, only: Collection[str] | None = None) -> Path:
        """A local folder with the files: its own, or a cached copy with the manifest's checksums, made
        again if some were tidied away.

        `only`: the paths of the files that are needed; None: all. The others may be missing.

        Raises BadInput, naming the first file that is missing, has another size, or comes damaged twice.
        """

        def check(folder: Path) -> None:
            _check_sizes(str(folder), self.manifest, only)
            if not storage.is_local(self.uri):
                with checksums.checking(self.uri, self.manifest, folder, "once", only):
                    pass

        def is_whole(copy: Path) -> bool:
            try:
                check(copy)
            except BadInput:
                return False
            return copy.exists()

        folder = node_cache.local_folder(self.uri, self.fingerprint, only, is_whole)
        try:
            check(folder)
        except BaseException:
            node_cache.release(folder)
            raise
        return folder

    def reference(self) -> dict[str, Any]:
        """The entry for this artifact in the manifest of a job that reads it: its whole ancestry."""
        names = ("kind", "fingerprint", "run_id", "inputs")
        return {"uri": self.uri, **{name: self.manifest.get(name) for name in names}}


def corpora_of(artifact: Artifact) -> set[str]:
    """Fingerprints of the corpora among the artifact's ancestors, and its own if it is a corpus."""
    fingerprints = set[str]()
    reference: dict[str, Any] | None = artifact.reference()
    while reference:
        if reference["kind"] == "corpus":
            fingerprints.add(str(reference["fingerprint"]))
        reference = (reference.get("inputs") or {}).get("corpus")
    return fingerprints


def corpora_read_for(model: Artifact) -> set[str]:
    """Fingerprints of all corpora that a model may have learnt answers from: its own, its encoder's and its
    teachers'. A tokenizer has learnt words alone."""
    fingerprints = set[str]()
    references: list[dict[str, Any]] = [model.reference()]
    while references:
        reference = references.pop()
        if reference["kind"] == "corpus":
            fingerprints.add(str(reference["fingerprint"]))
        if reference["kind"] != "tokenizer":
            references += (reference.get("inputs") or {}).values()
    return fingerprints


def open_artifact(uri: str, *kinds: str) -> Artifact:
    """Returns the artifact at `uri`, which is of one of the `kinds`, with complete files.

    Raises BadInput as `read_artifact`, and for a file that is missing or has another size than the
    manifest says, as after an interrupted copy.
    """
    artifact = read_artifact(uri, *kinds)
    _check_sizes(artifact.uri, artifact.manifest)
    return artifact


def read_artifact(uri: str, *kinds: str) -> Artifact:
    """Returns the artifact at `uri`, of one of the `kinds`, by its manifest alone.

    Raises BadInput if there is none, if it is unfinished, of another kind, or of a later format.
    """
    allowed_kinds = " or ".join(kinds)
    uri = storage.absolute(uri.rstrip("/"))
    manifest_uri = storage.join(uri, MANIFEST)
    if not storage.exists(manifest_uri):
        for partial in {uri + ".partial", uri} if storage.is_local(uri) else {uri}:
            if storage.exists(storage.join(partial, REQUEST)):
                raise BadInput(f"{uri}: unfinished; run the job that makes it again, it resumes")
        hint = f"; {_MADE_BY[kinds[0]]} makes one" if kinds[0] in _MADE_BY else ""
        is_away = storage.is_local(uri) and not Path(uri).exists()
        reason = "there is no such folder" if is_away else f"{MANIFEST} is missing"
        raise BadInput(f"{uri}: not a {allowed_kinds} ({reason}){hint}")
    try:
        manifest = json.loads(storage.read_bytes(manifest_uri))
        kind, version = manifest["kind"], manifest["format_version"]
    except FileNotFoundError:
        raise BadInput(f"{uri}: another job has removed it meanwhile") from None
    except (ValueError, KeyError, TypeError) as error:
        raise BadInput(f"{manifest_uri}: not a polyrank manifest ({error!r})") from None
    if kind not in kinds:
        raise BadInput(f"{uri}: kind is {kind!r}; needed here: {allowed_kinds}")
    if version != FORMAT_VERSION:
        fault = f"{uri}: format_version is {version!r}; this polyrank reads {FORMAT_VERSION}"
        is_newer = isinstance(version, int) and version > FORMAT_VERSION
        raise NewerFormat(fault) if is_newer else BadInput(fault)
    return Artifact(uri, manifest)


def _check_sizes(
    uri: str, manifest: Mapping[str, Any], only: Collection[str] | None = None
) -> None:
    """Raises BadInput, naming the first file that is missing or has another size."""
    if fault := _size_fault(uri, manifest, only):
        raise BadInput(f"{fault}; copy it again, or remove {uri} and make it anew")


def _size_fault(uri: str, manifest: Mapping[str, Any], only: Collection[str] | None = None) -> str:
    """Describes the first file that is missing or has another size; "": all are complete."""
    sizes = storage.sizes_below(uri)  # one listing: of 1,000 files a request from an object store
    for entry in manifest["files"]:
        if only is not None and entry["path"] not in only:
            continue
        if (size := sizes.get(entry["path"])) != entry["bytes"]:
            state = "is missing" if size is None else f"has {size:,} bytes"
            expected = f"{MANIFEST} says {entry['bytes']:,}"
            return f"{storage.join(uri, entry['path'])}: {state}; {expected}"
    return ""


def file_entry(name: str, data: bytes | pa.Buffer, rows: int = 0) -> FileEntry:
    size = data.size if isinstance(data, pa.Buffer) else len(data)
    sha256, crc32 = hashlib.sha256(data).hexdigest(), zlib.crc32(data)
    return {"path": name, "rows": rows, "bytes": size, "sha256": sha256, "crc32": crc32}


def folder_entries(folder: Path) -> list[FileEntry]:
    """Manifest entries of all files in a local folder."""
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return [file_entry(file.relative_to(folder).as_posix(), file.read_bytes()) for file in files]


def fingerprint_of_entries(entries: Iterable[FileEntry]) -> str:
    """Names what computes: weights, tokenizers, settings, data. Files that lie beside them do not count, so a
    repeated training with the same weights is the same model."""
    contents = [(entry["path"], entry["sha256"]) for entry in entries]
    return digest([c for c in contents if not any(fnmatch(c[0], pattern) for pattern in _BESIDE)])
