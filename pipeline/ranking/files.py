"""Where the files of a ranker are, and what names their contents."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline import registry, storage
from pipeline.artifact import MANIFEST, Artifact, open_artifact
from pipeline.config import BadInput, digest
from pipeline.drafts import folder_entries
from pipeline.models.settings import SETTINGS
from pipeline.models.sources import SENTENCE_TRANSFORMERS, fetch_from_hub, open_external


class Opened(NamedTuple):
    """A ranker on this machine."""

    uri: str
    folder: Path
    artifact: Artifact | None
    """None: a plain folder, which no job published."""


def open_ranker(uri: str) -> Opened:
    """Brings a ranker's files here: a published one, a plain folder with a `ranker.json`, or the one that
    `models:/name@alias` means now.

    Raises BadInput where there is none.
    """
    uri = storage.absolute(registry.model_uri(uri).rstrip("/"))
    has_manifest = storage.exists(storage.join(uri, MANIFEST))
    if not has_manifest and storage.exists(storage.join(uri, SETTINGS)):
        return Opened(uri, external_folder(uri), None)
    if not has_manifest and storage.exists(storage.join(uri, SENTENCE_TRANSFORMERS)):
        raise BadInput(f"{uri}: a model of sentence-transformers, not a ranker; load it with "
                       "Ranker.from_sentence_transformers")  # fmt: skip
    artifact = open_artifact(uri, "ranker")
    return Opened(artifact.uri, artifact.local(), artifact)


def external_folder(uri: str) -> Path:
    """A local folder with a model that another project saved, or its snapshot from the hub.

    Raises BadInput where there is neither.
    """
    if storage.exists(uri):
        if storage.is_local(uri):
            return Path(storage.locate(uri)[1])
        return open_external(uri)[0].local()
    if not storage.is_local(uri) or uri.count("/") > 1:
        raise BadInput(f"{uri}: no such folder")
    return fetch_from_hub(uri)


def fingerprint(uri: str, artifact: Artifact | None) -> str:
    """As in a manifest: the same files have the same fingerprint, published or not."""
    if artifact is not None:
        return artifact.fingerprint
    entries = folder_entries(external_folder(uri))
    digests = [(entry["path"], entry["sha256"]) for entry in entries if entry["path"] != MANIFEST]
    return digest(sorted(digests))
