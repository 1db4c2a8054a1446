"""Converts rankers from and to other projects' formats."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jobs import program
from pipeline import storage
from pipeline.artifact import MANIFEST, Artifact, folder_entries, open_artifact
from pipeline.config import require
from pipeline.engine.draft import draft
from pipeline.models.sources import open_encoder, open_external


@dataclass(frozen=True, kw_only=True)
class Config:
    """Makes a ranker of another project's model, or the other way round.

    The job reads a ranker (of jobs.finetune), a directory of sentence-transformers (a bi-encoder or a
    CrossEncoder), or a directory of ParlAI with a poly-encoder (model, model.opt, model.dict,
    model.dict.codecs). It tells them apart by their files. In float32 the new model has the same vectors and
    scores. The README.md in its folder says how to use it.
    """

    model: str
    """The model to read; of sentence-transformers also a hub id."""
    output: str = field(metadata=program.OUTPUT)
    """Folder of the new model."""
    to: Literal["polyrank", "sentence-transformers", "onnx"] = "polyrank"
    """polyrank: a ranker. sentence-transformers: a bi-encoder becomes the folders context/ and
    candidate/, and a cross-encoder becomes a CrossEncoder. onnx: only for a single-context ConveRT
    model."""
    dimensions: int = 0
    """Truncate vectors to this width, which must be one of `ranker.matryoshka`; 0: keep them as they
    are."""
    int8: bool = False
    """ConveRT: the blocks' linear layers get 8-bit weights, which CPUs multiply with 8-bit inputs. The
    files are smaller. It is faster than float32 but not than bf16, and scores change a little."""
    max_context_tokens: int = 0
    """From sentence-transformers: contexts keep this many tokens; 0: as many as the model takes, or half
    of that for a CrossEncoder."""
    max_candidate_tokens: int = 0
    """From sentence-transformers: the same for candidates."""

    def __post_init__(self) -> None:
        for name in ("dimensions", "max_context_tokens", "max_candidate_tokens"):
            require(getattr(self, name) >= 0, name, getattr(self, name), ">= 0")


def run(config: Config) -> program.Summary:
    folder, source = _open(config.model)

    from pipeline import tracking
    from pipeline.models import interop
    from pipeline.models.interop import card, sentence_transformers, to_onnx

    kind = "ranker" if config.to == "polyrank" else config.to
    with tempfile.TemporaryDirectory() as scratch:
        ranker = interop.load(folder, config.max_context_tokens, config.max_candidate_tokens)
        if config.dimensions:
            ranker.cut(config.dimensions)
        if config.int8:
            ranker.quantise()
        if kind == "ranker":
            ranker.save(Path(scratch))
        elif kind == "onnx":
            to_onnx.export(ranker, Path(scratch))
        else:
            sentence_transformers.export(ranker, Path(scratch))
        text = card.card(ranker, kind, config.model)
        (Path(scratch) / card.CARD).write_text(text, encoding="utf-8")
        # By now a model that cannot be converted has been refused, without a draft.
        out = draft(config.output, kind, config, {"model": source})
        if isinstance(out, Artifact):
            return program.artifact_summary(out, already_there=True)
        with tracking.start("convert_model", out) as tracked:
            storage.upload(Path(scratch), out.staging)
            counts = {"parameters": ranker.parameter_count}
            converted = out.publish(folder_entries(Path(scratch)), counts, run_id=tracked.run_id)
            tracking.finish(tracked, converted)
    architecture = ranker.config.architecture
    return program.artifact_summary(converted, already_there=False, architecture=architecture)


def _open(uri: str) -> tuple[Path, Artifact | dict[str, Any]]:
    """(local folder, the manifest's reference to the model)"""
    if storage.exists(storage.join(uri, MANIFEST)):
        artifact = open_artifact(uri, "ranker", "sentence-transformers")
        return artifact.local(), artifact
    is_folder = storage.is_folder(uri)
    source, reference = open_external(uri) if is_folder else open_encoder(uri, "--model")
    return source.local(), reference


if __name__ == "__main__":
    program.main(Config, run, "convert_model")
