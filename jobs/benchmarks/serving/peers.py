"""A common service: sentence-transformers behind FastAPI, a thread of the pool for each request.

python -m jobs.benchmarks.serving.peers rerank|embed MODEL PORT
"""

from __future__ import annotations

import sys
from typing import Any

import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel


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
