"""Exact and near duplicates, against all pairs compared in plain Python."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import re
from pathlib import Path

import pytest

from pipeline.corpora import dedup
from pipeline.corpora.dedup.options import Options

RANKS = {"test": 0, "valid": 1, "train": 2}
EXACT = Options(near=False)
# Finds all but 1 in 10^11 of the pairs with a similarity of 0.6.
THOROUGH = Options(exact=False, shingle=2, bands=60, rows_per_band=2, threshold=0.6)


def row(example_id, *turns, **more):
    return {"example_id": example_id, "context": list(turns[:-1]), "response": turns[-1], **more}


def words(text):
    return re.findall(r"\w+", text.lower())


def sides(example, text="example"):
    context = {"example": example["context"], "pair": example["context"][-1:], "response": []}[text]
    return words(" ".join(context)), words(example["response"])


def order(example):
    return RANKS[example.get("split", "train")], example["example_id"]


def first_of_each(clusters):
    return {min(cluster, key=order)["example_id"] for cluster in clusters}


def some_examples(seed, count=150):
    """Examples of which many are changed copies of others, in all three splits."""
    rng = random.Random(seed)
    vocabulary = [f"w{number}" for number in range(40)]
    made = []
    for _ in range(count):
        if made and rng.random() < 0.6:
            turns = [turn.split() for turn in rng.choice(made)]
            for turn in rng.sample(turns, rng.randint(0, len(turns))):
                for _change in range(rng.choice([0, 0, 1, 2])):
                    turn[rng.randrange(len(turn))] = rng.choice(vocabulary)
        else:
            turns = [
                rng.choices(vocabulary, k=rng.randint(1, 14)) for _ in range(rng.randint(2, 4))
            ]
        made.append([" ".join(turn) for turn in turns])
    ids = [f"e{number:03d}" for number in range(count)]
    rng.shuffle(ids)
    splits = rng.choices(["train", "valid", "test"], [6, 1, 1], k=count)
    return [
        row(name, *turns, split=split) for name, turns, split in zip(ids, made, splits, strict=True)
    ]


# Exact


def test_what_is_the_same_and_what_is_not(corpus_of, clean):
    same = [
        ["how are you?", "Fine."],  # case
        ["HOW   are\nyou", "- fine -"],  # separators
        ["how", "are you", "fine"],  # turns
        ["\uff28ow are you", "\ufb01ne"],  # forms of letters
    ]
    others = [
        ["How are you?", "Fine 😀"],
        ["How are", "you fine"],
        ["Who are you?", "Fine."],
        ["are How you?", "Fine."],
    ]
    rows = [row(f"s{number}", *turns) for number, turns in enumerate(same)]
    rows += [row(f"o{number}", *turns) for number, turns in enumerate(others)]
    done = clean(corpus_of([row("a", "How are you?", "Fine."), *rows]), EXACT)
    assert set(done.rows) == {"a", "o0", "o1", "o2", "o3"}
    assert done.dropped == {"duplicate": 4}


@pytest.mark.parametrize(("seed", "text"), [(0, "example"), (1, "pair"), (2, "response")])
def test_exact_duplicates_are_those_of_plain_python(corpus_of, clean, seed, text):
    rows = some_examples(seed)
    groups = {}
    for example in rows:
        groups.setdefault(json.dumps(sides(example, text)), []).append(example)
    done = clean(corpus_of(rows, shards=2), dataclasses.replace(EXACT, text=text))
    assert set(done.rows) == first_of_each(groups.values())
    assert done.dropped["duplicate"] == len(rows) - len(groups) > 5


def test_what_is_left_is_as_it_was(corpus_of, clean):
    rows = [
        row("a", "Turn ONE", "Two.", "Three!", candidates=["Three!", "Four"], label=0),
        row("b", "turn one", "two", "three"),
        row("c", "x", "y", split="test", group_id="g"),
    ]
    done = clean(corpus_of(rows), EXACT)
    assert set(done.rows) == {"a", "c"}
    common = {"source": "test", "candidates": None, "label": None}
    assert done.rows["a"] == {**common, "group_id": "a", "split": "train", **rows[0]}
    assert done.rows["c"] == {**common, **rows[2]}


# Near


def alike(a, b, threshold, text="example", shingle=2):
    for left, right in zip(sides(a, text), sides(b, text), strict=True):
        found = [
            {tuple(side[i : i + shingle]) for i in range(max(1, len(side) - shingle + 1))} - {()}
            for side in (left, right)
        ]
        union = found[0] | found[1]
        if union and len(found[0] & found[1]) / len(union) < threshold:
            return False
    return True


def clusters_of(rows, threshold, text="example"):
    cluster = {example["example_id"]: [example] for example in rows}
    for a, b in itertools.combinations(rows, 2):
        left, right = cluster[a["example_id"]], cluster[b["example_id"]]
        if left is not right and alike(a, b, threshold, text):
            left += right
            for example in right:
                cluster[example["example_id"]] = left
    return {id(found): found for found in cluster.values()}.values()


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "text"), [(0, "example"), (2, "response")])
def test_near_duplicates_are_those_of_all_pairs_compared(corpus_of, clean, seed, text):
    rows = some_examples(seed, count=110)
    clusters = clusters_of(rows, THOROUGH.threshold, text)
    done = clean(corpus_of(rows, shards=2), dataclasses.replace(THOROUGH, text=text))
    assert set(done.rows) == first_of_each(clusters)
    assert done.dropped["near duplicate"] == len(rows) - len(clusters) > 20


@pytest.mark.slow
def test_what_stays_does_not_depend_on_shards_buckets_or_order(corpus_of, clean, monkeypatch):
    rows = some_examples(seed=9)
    options = dataclasses.replace(THOROUGH, exact=True, bands=6)
    expected = clean(corpus_of(rows), options)
    assert min(expected.dropped["duplicate"], expected.dropped["near duplicate"]) > 5
    monkeypatch.setattr(dedup, "_BUCKET_BYTES", 7_000)  # 2 buckets of exact keys, 4 of near ones
    random.Random(0).shuffle(rows)
    found = clean(corpus_of(rows, shards=3), options)
    assert (found.rows, found.dropped) == (expected.rows, expected.dropped)
    pairs = ("near_pairs.found", "near_pairs.alike")
    assert [found.counts[name] for name in pairs] == [expected.counts[name] for name in pairs]


def test_different_answers_to_one_long_context_are_no_duplicates(corpus_of, clean):
    long = " ".join(f"word{number}" for number in range(100))
    rows = [row("a", long, "yes"), row("b", long, "no"), row("c", long + " more", "Yes!")]
    assert set(clean(corpus_of(rows)).rows) == {"a", "b"}
    unchecked = clean(corpus_of(rows), Options(check=False))
    assert set(unchecked.rows) == {"a"}
    assert unchecked.dropped == {"near duplicate": 2}


def test_turns_that_a_dialogue_adds_are_no_duplicates(corpus_of, clean):
    turns = [" ".join(f"t{turn}w{word}" for word in range(10)) for turn in range(30)]
    rows = [row(f"e{end:02d}", *turns[: end + 1]) for end in range(1, 30)]
    assert clean(corpus_of(rows)).dropped == {}


def test_a_context_is_not_held_against_a_response(corpus_of, clean):
    rows = [row("a", "one two three", "four five six"), row("b", "four five six", "one two three")]
    done = clean(corpus_of(rows), THOROUGH)
    assert (set(done.rows), done.counts["near_pairs.found"]) == ({"a", "b"}, 0)


def test_characters_find_what_words_do_not(corpus_of, clean):
    rows = [
        row("a", "东京今天天气非常好我们去公园散步吧", "好"),
        row("b", "东京今天天气非常好我们去公园散步呢", "好"),
    ]
    options = Options(unit="character", shingle=2)
    assert clean(corpus_of(rows), options).dropped == {"near duplicate": 1}


def test_a_hundred_copies_with_small_changes_leave_one(corpus_of, clean):
    text = [f"word{number}" for number in range(60)]
    rows = []
    for number in range(300):
        changed = [*text]
        changed[number % 60] = f"other{number}"
        rows.append(row(f"e{number:03d}", "i am a bot", " ".join(changed)))
    done = clean(corpus_of(rows, shards=3))
    assert set(done.rows) == {"e000"}
    assert done.counts["near_pairs.found"] < 300 * 32 * 14


def test_examples_without_words_are_near_to_nothing(corpus_of, clean):
    rows = [row("a", "...", "?!"), row("b", "!", "..."), row("c", "a", "?"), row("d", "b", "!")]
    assert clean(corpus_of(rows), dataclasses.replace(THOROUGH)).dropped == {}


@pytest.mark.parametrize("text", ["response", "pair", "example"])
def test_texts_without_a_word_are_the_same_only_to_the_character(corpus_of, clean, text):
    texts = ["...", "?!", "¿?", "!", "a", "A!", "..."]
    pairs = list(itertools.product(texts, texts))
    rows = [row(f"{number:02d}", "b", *pair) for number, pair in enumerate(pairs)]

    def key(example):
        turns = {"response": [], "pair": example["context"][-1:]}.get(text, example["context"])
        return [words(side) or side for side in (" ".join(turns), example["response"])]

    clusters = {}
    for example in rows:
        clusters.setdefault(str(key(example)), []).append(example)
    options = dataclasses.replace(EXACT, text=text)
    assert set(clean(corpus_of(rows), options).rows) == first_of_each(clusters.values())


# Splits


def test_of_duplicates_test_stays_before_valid_before_train(corpus_of, clean):
    turns = [("x y z", "p q r"), ("k l m", "n o p"), ("f g h", "i j k")]
    rows = [
        row("a", *turns[0]), row("b", *turns[0], split="valid"), row("c", *turns[0], split="test"),
        row("d", *turns[1]), row("f", *turns[1], split="valid"), row("e", *turns[1], split="valid"),
        row("h", *turns[2]), row("g", *turns[2]),
    ]  # fmt: skip
    assert set(clean(corpus_of(rows), EXACT).rows) == {"c", "e", "g"}
    only_train = dataclasses.replace(EXACT, drop_from=("train",))
    assert set(clean(corpus_of(rows), only_train).rows) == {"b", "c", "e", "f", "g"}


# What is said


def test_samples_show_what_each_dropped_example_is_the_same_as(corpus_of, clean):
    words = " ".join(f"word{number}" for number in range(30))
    rows = [
        row("a", "One", words), row("b", "ONE", words), row("c", "one", words + " and one"),
        *(row(f"d{number:02d}", "same", "thing") for number in range(40)),
    ]  # fmt: skip
    done = clean(corpus_of(rows))
    lines = Path(done.uri, "rejected", "write-00000.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    assert len(found) == 21  # 20 of each reason
    samples = {sample["example_id"]: sample for sample in found}
    assert samples["b"] == {
        "reason": "duplicate", "file": "train/part-00000.parquet", "example_id": "b", "same_as": "a",
        "text": "ONE\n" + words,
    }  # fmt: skip
    assert samples["c"]["reason"] == "near duplicate" and samples["c"]["same_as"] == "a"
    assert samples["d01"]["same_as"] == "d00"
    assert done.dropped == {"duplicate": 40, "near duplicate": 1}
