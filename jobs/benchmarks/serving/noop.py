"""The peer of a service: FastAPI on Ray Serve that does no work."""

# No `from __future__ import annotations`: FastAPI would look for the question in the query string, and
# answer 422.
from fastapi import FastAPI
from pydantic import BaseModel
from ray import serve

_app = FastAPI()


class Question(BaseModel):
    """The service's own question."""

    context: list[str]
    pool: str
    top_k: int


@serve.deployment(ray_actor_options={"num_cpus": 1}, max_ongoing_requests=512)
@serve.ingress(_app)
class Noop:
    """Reads a question, and answers with one number of it."""

    @_app.post("/")
    async def answer(self, question: Question) -> dict[str, int]:
        return {"top_k": question.top_k}
