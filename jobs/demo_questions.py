"""The demo's requests to its service over HTTP, and the printed answers."""

from __future__ import annotations

import json
import urllib.request
from typing import Any

import pyarrow.parquet as pq

from pipeline import storage
from pipeline.artifact import open_artifact


def ask(work: str, port: int) -> dict[str, Any]:
    """Real requests about examples that no training has seen."""
    corpora = f"{work}/corpora"
    dialogue = example(f"{corpora}/convai2")
    print("\n== A dialogue, and its 20 candidates ranked: score and text; * is the true one\n")
    for turn in dialogue["context"]:
        print(f"   | {turn}")
    request = {"context": dialogue["context"], "candidates": dialogue["candidates"], "top_k": 3}
    ranked = post(port, "/rank", request)
    show(ranked["results"], text=dialogue["response"])
    print("\n   the same against the pool of replies of other people\n")
    from_pool = post(port, "/rank", {"context": dialogue["context"], "pool": "replies", "top_k": 3})
    show(from_pool["results"], text=dialogue["response"])
    article = example(f"{corpora}/articles")
    print("\n== A sentence, and the articles it may come from; the true one with its place\n")
    print(f"   | {article['context'][0]}")
    request = {"context": article["context"], "pool": "articles", "top_k": 100}
    articles = post(port, "/articles/rank", request)
    # The pool keeps an article without one of its sentences: not always without this one.
    show(articles["results"], id=article["group_id"])
    return {
        "replies": ranked["results"],
        "pool": from_pool["results"],
        "articles": articles["results"],
    }


def example(corpus: str) -> dict[str, Any]:
    """A held-out example with a long last turn: a greeting has a hundred right replies."""
    uri = open_artifact(corpus, "corpus").files("valid/", ".parquet")[0]
    with storage.open_input(uri) as stream:
        rows: list[dict[str, Any]] = pq.read_table(stream).to_pylist()
    return max(rows[:20], key=lambda row: len(row["context"][-1]))


def post(port: int, route: str, body: dict[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}{route}",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=60) as response:
        answer: dict[str, Any] = json.load(response)
    return answer


def show(results: list[dict[str, Any]], **true_fields: str) -> None:
    """The first three, and the right one (by its text or its id) with a star, wherever it is."""
    for place, result in enumerate(results, 1):
        is_right = true_fields.items() <= result.items()
        if place <= 3 or is_right:
            mark, place_note = "*" if is_right else " ", f"({place}.) " if place > 3 else ""
            print(f"  {mark}{result['score']:8.2f}  {place_note}{result['text'][:110]}")
