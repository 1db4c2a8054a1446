"""Finds the files of a ranker at a URI, and the fingerprint of their contents."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from pipeline import registry, storage
from pipeline.artifact import (
    MANIFEST,
    Artifact,
    fingerprint_of_entries,
    folder_entries,
    open_artifact,
)
from pipeline.config import BadInput
from pipeline.models.settings import SETTINGS
from pipeline.models.sources import SENTENCE_TRANSFORMERS, fetch_from_hub, open_external


class RankerFiles(NamedTuple):
    """The files of a ranker, on this machine."""

    uri: str
    folder: Path
    artifact: Artifact | None
    """The artifact that a job has published; None: a plain folder."""


def open_ranker(uri: str) -> RankerFiles:
    """Fetches the files of a ranker to this machine.

    `uri`: a published ranker, a plain folder with a `ranker.json`, or `models:/name@alias`. Raises BadInput
    if there is no ranker at the URI.
    """
    name, uri = uri, storage.absolute(registry.model_uri(uri).rstrip("/"))
    has_manifest = storage.exists(storage.join(uri, MANIFEST))
    if not has_manifest and storage.exists(storage.join(uri, SETTINGS)):
        return RankerFiles(uri, external_folder(uri), None)
    if not has_manifest and storage.exists(storage.join(uri, SENTENCE_TRANSFORMERS)):
        raise BadInput(f"{uri}: a model of sentence-transformers, not a ranker; load it with "
                       "Ranker.from_sentence_transformers")  # fmt: skip
    try:
        artifact = open_artifact(uri, "ranker")
    except BadInput as error:
        if has_manifest or name.count("/") != 1:
            raise
        raise BadInput(
            f"{error}; a model of the Hugging Face hub: Ranker.from_sentence_transformers({name!r})"
        ) from None
    return RankerFiles(artifact.uri, artifact.local(), artifact)


def external_folder(uri: str) -> Path:
    """The local folder of a model that another project saved. A folder elsewhere, or on the hub, is copied.

    Raises BadInput if there is no such folder.
    """
    if storage.exists(uri):
        if storage.is_local(uri):
            return Path(storage.locate(uri)[1])
        return open_external(uri)[0].local()
    if not storage.is_local(uri) or uri.count("/") > 1:
        raise BadInput(f"{uri}: no such folder")
    return fetch_from_hub(uri)


def fingerprint(uri: str, artifact: Artifact | None) -> str:
    """The fingerprint of a ranker's files. It is the same for the same files, published or not."""
    if artifact is not None:
        return artifact.fingerprint
    entries = folder_entries(external_folder(uri))
    own_entries = [entry for entry in entries if entry["path"] != MANIFEST]
    return fingerprint_of_entries(sorted(own_entries, key=lambda entry: entry["path"]))
