"""The versions of a pool: which one is CURRENT, and which old ones may go."""

from __future__ import annotations

import time
from datetime import datetime
from typing import Any

from pipeline import storage
from pipeline.artifact import MANIFEST, Artifact, read_artifact
from pipeline.config import BadInput, flatten, to_dict
from pipeline.models.precision import Resolved
from pipeline.retrieval.pools.lock import is_leased
from pipeline.retrieval.pools.pool import KIND, Pool, current_uri

_DAY_S = 86_400
_PREFIX = "v-"
PREVIOUS = "PREVIOUS"
# Settings that say which rows there are, or how they are filed; all others decide a vector.
_NOT_OF_VECTORS = {
    f"embed.{name}"
    for name in (
        "text_column",
        "encoding",
        "delimiter",
        "quotes",
        "id_column",
        "rows_per_shard",
        "batch_tokens",
        "max_text_bytes",
        "filter_columns",
        "precision",  # what it was on the hardware of then is in the manifest
        "neighbours",
    )
}


def current_name(pools: str, name: str) -> str:
    """What CURRENT says, "" where there is none."""
    uri = current_uri(pools, name)
    return storage.read_bytes(uri).decode().strip() if storage.exists(uri) else ""


def previous_name(pools: str, name: str) -> str:
    """The version that was CURRENT before; "" where there was none."""
    uri = storage.join(pools, name, PREVIOUS)
    return storage.read_bytes(uri).decode().strip() if storage.exists(uri) else ""


def open_current(pools: str, name: str) -> Pool | None:
    """The version before the one to be made; None where there is none, or, which is said, none to open."""
    if not current_name(pools, name):
        return None
    try:
        return Pool.open(storage.join(pools, name))
    except BadInput as error:
        print(f"pool {name}: nothing is copied, as its CURRENT version cannot be opened: {error}")
        return None


def has_vectors_of(pool: Pool, model: Artifact, config: Any, precision: Resolved) -> bool:
    """Whether a job's model and settings would make the same vectors of the same texts.

    Pools of earlier versions do not say their precision; they are taken to have another.
    """
    if pool.model_fingerprint != model.fingerprint or pool.precision != precision:
        return False
    settings = (flatten(pool.artifact.manifest["config"]), flatten(to_dict(config)))
    mine, other = (
        {k: v for k, v in s.items() if k.startswith("embed.") and k not in _NOT_OF_VECTORS}
        for s in settings
    )
    return mine == other


def is_version(uri: str) -> bool:
    """Whether a folder of a pool is a published version."""
    name = storage.name_of(uri)
    whole = name.startswith(_PREFIX) and not name.endswith(".partial")
    return whole and storage.exists(storage.join(uri, MANIFEST))


def remove_old(pools: str, name: str, keep: int, keep_days: float) -> list[str]:
    """Removes versions, and what abandoned jobs have left; returns their names.

    What stays: the `keep` newest versions, those younger than `keep_days`, CURRENT, the one before it
    (PREVIOUS; not with `keep` 1), and each that somebody has open (`lock.lease`). `keep` 0: all versions.
    Only who holds the pool's lock may call it.
    """
    versions: dict[str, float] = {}
    removed = []
    for uri in storage.list_folders(storage.join(pools, name)):
        folder = storage.name_of(uri)
        if not folder.startswith(_PREFIX):
            continue
        if is_version(uri):
            created = read_artifact(uri, KIND).manifest["created_at"]
            versions[folder] = datetime.fromisoformat(created).timestamp()
        else:
            removed.append(folder)
    newest = sorted(versions, key=lambda version: versions[version], reverse=True)
    for version in newest[keep:] if keep else ():
        young = time.time() - versions[version] < keep_days * _DAY_S
        named = (current_name(pools, name), previous_name(pools, name) if keep > 1 else "")
        if not (young or version in named or is_leased(pools, name, version)):
            removed.append(version)
    for folder in removed:
        uri = storage.join(pools, name, folder)
        storage.delete(storage.join(uri, MANIFEST))  # first: no manifest, no version
        storage.delete(uri)
    return removed
