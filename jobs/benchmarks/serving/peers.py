"""Others' services: sentence-transformers behind FastAPI, a thread for each request, and infinity.

python -m jobs.benchmarks.serving.peers rerank|embed MODEL PORT        the first one
"""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

from jobs.benchmarks.inputs import cross_encoder
from jobs.benchmarks.measure import run_job
from pipeline.artifact import open_artifact
from pipeline.models.sources import open_encoder


@dataclass(frozen=True)
class Peer:
    """A service that does one task, rerank or embed."""

    name: str
    task: str
    model: str
    """A directory of sentence-transformers."""

    def command_at(self, port: int) -> list[str]:
        if self.name == "infinity":
            options = ("--engine", "torch", "--device", "cpu", "--no-bettertransformer")
            return ["infinity_emb", "v2", "--model-id", self.model, "--served-model-name", "peer",
                    *options, "--host", "127.0.0.1", "--port", str(port)]  # fmt: skip
        return [sys.executable, "-m", __name__, self.task, self.model, str(port)]

    @property
    def path(self) -> str:
        return "embeddings" if (self.name, self.task) == ("infinity", "embed") else self.task

    def body(self, texts: Sequence[str]) -> bytes:
        """The request for these texts; the first one is the query of a rerank."""
        query, *documents = texts
        if self.name == "infinity":
            rerank: dict[str, Any] = {"model": "peer", "query": query, "documents": documents}
            embed: dict[str, Any] = {"model": "peer", "input": list(texts)}
        else:
            rerank, embed = {"query": query, "texts": documents}, {"inputs": list(texts)}
        return json.dumps(rerank if self.task == "rerank" else embed).encode()


def peers(task: str, model: str) -> list[Peer]:
    """infinity has libraries of its own, older ones: install it elsewhere, and put it at the end of PATH."""
    names = ["plain_fastapi", *(["infinity"] if shutil.which("infinity_emb") else [])]
    return [Peer(name, task, model) for name in names]


def converted(task: str, encoder: str, work: Path) -> tuple[str, str]:
    """(a model of sentence-transformers, the same as a ranker of ours): equal vectors, equal scores."""
    peer_model = open_encoder(encoder)[0].local()
    if task == "rerank":
        peer_model = cross_encoder(peer_model, work / "cross-encoder")
    ranker = work / f"ranker-{task}"
    run_job("convert_model", "--model", peer_model, "--output", ranker)
    return str(peer_model), open_artifact(str(ranker), "ranker").uri


class Rerank(BaseModel):
    query: str
    texts: list[str]


class Embed(BaseModel):
    inputs: list[str]


def create_app(task: str, model: str) -> FastAPI:
    """TEI's routes and shapes, so that both services have the same clients."""
    from sentence_transformers import CrossEncoder, SentenceTransformer

    app = FastAPI()

    @app.get("/health")
    def health() -> dict[str, str]:
        return {"status": "ok"}

    if task == "rerank":
        cross = CrossEncoder(model)

        @app.post("/rerank")
        def rerank(request: Rerank) -> list[dict[str, Any]]:
            scores = cross.predict([(request.query, text) for text in request.texts]).tolist()
            order = sorted(range(len(scores)), key=lambda place: -scores[place])
            return [{"index": place, "score": scores[place]} for place in order]

    else:
        encoder = SentenceTransformer(model)

        @app.post("/embed")
        def embed(request: Embed) -> list[list[float]]:
            vectors: list[list[float]] = encoder.encode(request.inputs).tolist()
            return vectors

    return app


if __name__ == "__main__":
    task, model, port = sys.argv[1:]
    uvicorn.run(create_app(task, model), host="127.0.0.1", port=int(port), log_level="warning")
