"""The inputs of a pool's version: the ranker, the candidates' files, and what else its contents depend on."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pipeline import registry, storage
from pipeline.artifact import MANIFEST, Artifact, open_artifact, read_artifact
from pipeline.config import BadInput, Stopped, digest
from pipeline.corpora.file_tasks import is_document
from pipeline.corpora.privacy import REDACTION_RULES
from pipeline.corpora.schema import example_files
from pipeline.models.precision import numerics_of
from pipeline.models.settings import read_settings
from pipeline.pools import build
from pipeline.pools.settings import EmbedConfig
from pipeline.storage import fingerprints


@dataclass(frozen=True)
class PoolInputs:
    """What a version is made from."""

    model: Artifact
    architecture: str
    candidates: tuple[str, ...]
    """URIs of files and folders."""
    files: list[str]
    """The candidates' files."""
    stamps: fingerprints.Stamps
    """Of these files."""
    references: dict[str, Any]
    """By name; their fingerprints are a part of the version's name."""

    def check_candidates(self, staging: str) -> None:
        """Raises Stopped where a file of the candidates has changed, or one has come, as of an export that is
        still being written, and removes what was made of them."""
        self.stamps.check("candidates", staging)
        if later := set(_candidate_files(self.candidates)[0]) - set(self.files):
            storage.delete(staging)
            came = f"--candidates {min(later)}: has come while the others were read"
            raise Stopped(f"{came}; the same command begins anew")

    def check_model(self, staging: str) -> None:
        """Raises Stopped where the model has been replaced, and removes what was made: a node reads the
        model when its first actor starts, which may be hours after this process has named it."""
        with suppress(BadInput):
            if read_artifact(self.model.uri, "ranker").fingerprint == self.model.fingerprint:
                return
        storage.delete(staging)
        raise Stopped(
            f"--model {self.model.uri}: has changed while it was read; the same command begins anew"
        )


def resolve_inputs(
    model_uri: str, candidates: Sequence[str], embed: EmbedConfig, redact: bool
) -> PoolInputs:
    """Raises BadInput for a model without vectors, and for missing input or a missing package."""
    if embed.neighbours:
        build.require_faiss()
    model = open_artifact(registry.model_uri(model_uri), "ranker")
    # The ranker's own module needs torch: where nothing is left to do, that takes seconds.
    settings = read_settings(model.uri)
    settings.require_vectors()
    if embed.context_column:
        settings.require_one_vector("embed.context_column")
    files, corpora = _candidate_files(candidates)
    order_counts = embed.repeated_ids == "first"  # it says whose text stays
    if not order_counts:
        # As the fingerprint takes them: a resumed build finds the same files behind the numbers of its tasks.
        files = sorted(files, key=storage.name_of)
    stamps = fingerprints.Stamps.of(files)
    source = {
        "uri": " ".join(candidates),
        "kind": "raw",
        "fingerprint": fingerprints.raw_fingerprint(files, whole=True),
        "inputs": {f"corpus.{n}": corpus.reference() for n, corpus in enumerate(corpora)},
    }
    references: dict[str, Any] = {"model": model, "candidates": source}
    if redact:  # without, the pool is that of polyrank before it redacted pools
        references["redaction"] = {"uri": "", "kind": "rules", "fingerprint": REDACTION_RULES}
    numerics = str(numerics_of(embed.precision))
    references["numerics"] = {"uri": "", "kind": "code", "fingerprint": numerics}
    if order_counts and len(files) > 1:
        order = digest([storage.name_of(file) for file in files])
        references["order"] = {"uri": "", "kind": "order of files", "fingerprint": order}
    return PoolInputs(model, settings.architecture, tuple(candidates), files, stamps, references)


def _candidate_files(uris: Sequence[str]) -> tuple[list[str], list[Artifact]]:
    """(the shards of corpora and the files that URIs name, the corpora); of a folder without its README and
    other documents"""
    files, corpora = list[str](), list[Artifact]()
    for uri in uris:
        if storage.exists(storage.join(uri, MANIFEST)):
            corpora.append(open_artifact(uri, "corpus"))
            files += [storage.join(corpora[-1].uri, e["path"]) for e in example_files(corpora[-1])]
        else:
            expanded = storage.expand((uri,), "candidates")
            files += [file for file in expanded if len(expanded) == 1 or not is_document(file)]
    return files, corpora
