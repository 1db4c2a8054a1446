"""The demo's requests to its service over HTTP, and the printed answers."""

from __future__ import annotations

import textwrap
from typing import Any

import requests

from pipeline.artifact import open_artifact
from pipeline.corpora.drawn_rows import read_rows

_DIALOGUES, _ARTICLES = 20, 50
_TOP_K = 10


def ask(work: str, port: int) -> dict[str, Any]:
    """Real requests about examples that no training has seen."""
    corpora = f"{work}/corpora"
    # A greeting has a hundred right replies, so the longest of some last turns is asked.
    dialogues = held_out(f"{corpora}/convai2", _DIALOGUES)
    dialogue = max(dialogues, key=lambda row: len(row["context"][-1]))
    print("\nA held-out dialogue; its best three of 20 candidates, then of the pool. * is the true "
          "reply")  # fmt: skip
    for turn in dialogue["context"]:
        print(f"   | {turn}")
    request = {"context": dialogue["context"], "candidates": dialogue["candidates"], "top_k": 3}
    ranked = post(port, "/rank", request)
    show(ranked["results"], text=dialogue["response"])
    from_pool = post(port, "/rank", {"context": dialogue["context"], "pool": "replies", "top_k": 3})
    print("   of the pool:")
    show(from_pool["results"], text=dialogue["response"])
    articles = _ask_for_articles(held_out(f"{corpora}/articles", _ARTICLES), port)
    return {"replies": ranked["results"], "pool": from_pool["results"], "articles": articles}


def _ask_for_articles(questions: list[dict[str, Any]], port: int) -> list[dict[str, Any]]:
    """Asks which article each sentence is from; returns the answer that is shown.

    The pool keeps an article without one of its sentences, and not always without the one that is asked.
    """
    found = list[tuple[int, dict[str, Any], list[dict[str, Any]]]]()
    for question in questions:
        request = {"context": question["context"], "pool": "articles", "top_k": _TOP_K}
        results = post(port, "/articles/rank", request)["results"]
        places = [n for n, result in enumerate(results) if result["id"] == question["group_id"]]
        found.append((places[0] if places else _TOP_K, question, results))
    firsts = sum(place == 0 for place, *_ in found)
    among = sum(place < _TOP_K for place, *_ in found)
    print(f"\n{len(found)} held-out sentences: which article is each from? The right one is the first for "
          f"{firsts}, among the first {_TOP_K} for {among}. One of them:")  # fmt: skip
    _, question, results = min(found, key=lambda one: one[0])
    print(f"   | {question['context'][0]}")
    show(results, id=question["group_id"])
    return results


def held_out(uri: str, count: int) -> list[dict[str, Any]]:
    corpus = open_artifact(uri, "corpus")
    return read_rows(corpus, "valid", range(min(count, corpus.rows("valid/"))))


def post(port: int, route: str, body: dict[str, Any]) -> dict[str, Any]:
    response = requests.post(f"http://127.0.0.1:{port}{route}", json=body, timeout=60)
    response.raise_for_status()
    answer: dict[str, Any] = response.json()
    return answer


def show(results: list[dict[str, Any]], **true_fields: str) -> None:
    """The first three, and the right one (by its text or its id) with a star, wherever it is."""
    for place, result in enumerate(results, 1):
        is_right = true_fields.items() <= result.items()
        if place <= 3 or is_right:
            mark, place_note = "*" if is_right else " ", f"({place}.) " if place > 3 else ""
            text = textwrap.shorten(result["text"], 100)
            print(f"  {mark}{result['score']:8.2f}  {place_note}{text}")
