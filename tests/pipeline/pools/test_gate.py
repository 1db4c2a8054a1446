"""What a version has to pass: hand-made records of shards, good ones and bad ones."""

from __future__ import annotations

import re
import tracemalloc

import pytest

from pipeline.config import BadInput, Stopped
from pipeline.pools import gate
from pipeline.pools.changes import Changes
from pipeline.pools.gate import GateConfig, ShardAnswers, ShardCheck

KIND = "poly, 8 dimensions"
CONTEXTS = [["how are you ?"], ["hi", "hello"]]


def record(**changes):
    """(facts, answers) of a shard, as `embedder` makes them."""
    answers = changes.pop("answers", [[(0.9, "a")], [(0.8, "b")]])
    known = changes.pop("known_answers", answers)
    good = {"dimensions": 8, "norms": (0.5, 1.0, 2.0), "cosine": 0.9999}
    return ShardCheck(**{**good, **changes}), ShardAnswers(answers, known)


def before(*answers, kind=KIND, contexts=CONTEXTS):
    """The canaries in the manifest of the version before."""
    return {"kind": kind, "contexts": contexts, "answers": [list(keys) for keys in answers]}


def check(records, old=None, present=(), **config):
    checks, answers = zip(*records, strict=True)
    return gate.check(GateConfig(**config), checks, iter(answers), KIND, CONTEXTS, old, present)


def test_a_good_pool_passes_and_says_what_was_found():
    first = record(answers=[[(3.0, "a"), (1.0, "c")], [(2.0, "b")]])
    second = record(answers=[[(2.0, "d")], [(5.0, "e"), (2.0, "aa")]], norms=[0.4, 2.0, 3.0])
    passed, canaries = check([first, second], top_k=2)
    assert passed == {
        "removed_share": 0.0, "changed_share": 0.0,
        "norms": [0.4, 1.5, 3.0], "min_cosine": 0.9999,
        "recall": "skipped: there is no version before",
    }  # fmt: skip
    # The best of both shards; of b and aa, which score alike, aa comes first.
    assert canaries == {"kind": KIND, "contexts": CONTEXTS, "answers": [["a", "d"], ["e", "aa"]]}


def test_what_is_passed_is_said_in_words():
    passed = {"removed_share": 0.0, "changed_share": 0.0125, "norms": [1, 1, 1], "min_cosine": 0.99998,
              "recall": "skipped: no version before"}  # fmt: skip
    line = "the gate is passed: removed 0.0%, changed 1.2%, "
    vectors = "texts embedded twice have equal vectors (cosine 1.0000 at least), "
    answers = "answers to the test queries skipped: no version before"
    assert gate.passed_line(passed) == line + vectors + answers
    bare = gate.passed_line({**passed, "min_cosine": None, "recall": 0.5})
    assert bare == line + "answers to the test queries 50.0% of the earlier ones"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dimensions": 4}, r"shards of different dimensions: \[4, 8\]"),
        ({"norms": [0.0, 1.0, 2.0]}, "norms from 0 to 2; allowed: 1/100 to 100 times their mean"),
        ({"norms": [0.5, 1.0, 1e4]}, "norms from 0.5 to 10000"),
        ({"norms": [0.0, 0.0, 0.0]}, "norms from 0"),
        ({"norms": [float("nan")] * 3}, "norms from"),
        ({"cosine": 0.97}, "a text that was embedded twice has two vectors, of cosine 0.9700; allowed"),
        ({"cosine": float("nan")}, "two vectors, of cosine nan"),
    ],
)  # fmt: skip
def test_a_bad_shard_among_good_ones_stops_the_pool(changes, message):
    with pytest.raises(Stopped, match=f"^the gate: .*{message}.*Nothing is published"):
        check([record(), record(**changes), record()])


def test_all_that_is_wrong_is_said_at_once():
    with pytest.raises(Stopped, match=r"dimensions: .*; norms .*; a text that was embedded twice"):
        check([record(), record(dimensions=4, norms=[0, 1, 2], cosine=0.5)])


def test_bounds_may_be_chosen_and_samples_left_out():
    check([record(cosine=0.97)], min_cosine=0.97)
    passed, _ = check([record(cosine=None), record(cosine=None)])
    assert passed["min_cosine"] is None


def recall(now, old, present, **config):
    return check([record(known_answers=now)], before(*old), present, **config)[0]["recall"]


def test_recall_is_of_the_answers_before_that_are_still_there():
    now = [[(3.0, "a"), (2.0, "b"), (1.0, "x")], [(1.0, "y"), (0.5, "c")]]
    # Of a, b, gone, c: a and b are found, c is not. Of c, d: c.
    found = recall(now, [["a", "b", "gone", "c"], ["c", "d"]], "abcdxy")
    assert found == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert recall(now, [["a", "b"], ["c"]], "abc") == 1


def test_only_the_best_answers_count():
    now = [[(3.0, "a"), (2.0, "b")], [(1.0, "c")]]
    assert recall(now, [["a", "b"], ["c"]], "abc", top_k=1) == 1
    assert recall(now, [["b", "a"], ["c"]], "abc", top_k=1, min_recall=0.5) == 0.5


def test_answers_of_several_shards_are_one_list():
    shards = [record(known_answers=[[(1.0, "a")], []]), record(known_answers=[[(2.0, "b")], []])]
    passed, _ = check(shards, before(["b"], ["z"]), "b", top_k=1)
    assert passed["recall"] == 1


def test_the_answers_of_many_shards_take_no_more_memory_than_those_of_few():
    contexts = [[f"canary {n}"] for n in range(20)]
    facts, _ = record()

    def answers(shards):
        """240 kB each."""
        for shard in range(shards):
            best = [[(float(rank), f"{shard} {rank}") for rank in range(50)] for _ in contexts]
            yield ShardAnswers(best, best)

    def peak_bytes(shards):
        tracemalloc.start()
        gate.check(GateConfig(), [facts] * shards, answers(shards), KIND, contexts, None, ())
        try:
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    # Held at once they were 3.8 MB, beside 0.2 MB; other threads take some of it, too.
    assert peak_bytes(16) < 2 * peak_bytes(4)


def test_too_little_recall_stops_the_pool():
    now = [[(3.0, "x")], [(1.0, "c")]]
    with pytest.raises(Stopped, match=r"find 0\.500 of the answers .* gate\.min_recall 0\.6"):
        recall(now, [["a"], ["c"]], "ac", min_recall=0.6)
    assert recall(now, [["a"], ["c"]], "ac", min_recall=0.5) == 0.5


@pytest.mark.parametrize(
    ("old", "present", "why"),
    [
        (before(["a"], ["b"], kind="bi, 8 dimensions"), "ab",
         r"of another kind of model \(bi, 8 dimensions, not poly"),
        (before(["a"], ["b"]), "", "no test query has an answer .* that is still there"),
        (before(["a"], ["b"], contexts=[["other"], ["queries"]]), "ab", "no test query has an answer"),
        (before([], []), "ab", "no test query has an answer"),
    ],
)  # fmt: skip
def test_where_recall_says_nothing_it_is_skipped_and_that_is_said(old, present, why):
    said = check([record()], old, present, min_recall=1)[0]["recall"]
    assert re.search(f"^skipped: .*{why}", said)


def test_canaries_are_matched_by_their_words_not_their_order():
    old = before(["b"], ["a"], contexts=CONTEXTS[::-1])
    assert check([record()], old, "ab", min_recall=1)[0]["recall"] == 1


def test_without_canaries_there_is_no_recall():
    facts, bare = record(answers=[])
    old = before(["a"], ["b"])
    passed, canaries = gate.check(GateConfig(), [facts], [bare], KIND, [], old, "ab")
    assert "skipped" in passed["recall"]
    assert canaries["answers"] == []


def test_a_file_of_canaries_holds_a_query_in_each_line(tmp_path):
    file = tmp_path / "canaries.txt"
    file.write_text("how are you ?\n\nhi\thello\n")
    assert gate.read_canaries(str(file)) == CONTEXTS
    file.write_text("\n \n")
    with pytest.raises(BadInput, match=r"gate\.canaries: .*a file with a query in each line"):
        gate.read_canaries(str(file))


def refusal(changes, rows, rows_before, **config):
    shares = gate.shares_of(Changes(*changes), rows, rows_before)
    return gate.refusal(GateConfig(**config), shares, "v-1", rows_before)


@pytest.mark.parametrize(
    ("changes", "rows", "rows_before"),
    [((10, 0, 0, 0), 10, 0), ((0, 0, 80, 20), 80, 100), ((99, 50, 50, 0), 199, 100)],
)
def test_an_ordinary_night_may_take_the_place_of_the_version_before(changes, rows, rows_before):
    assert refusal(changes, rows, rows_before) == ""


def test_a_version_that_has_lost_too_much_is_refused_with_the_way_to_allow_it():
    assert refusal((0, 0, 10, 1485), 10, 1495) == (
        "the gate: 1,485 of the 1,495 ids of v-1 are gone (99.3%; allowed: gate.max_removed_share 0.2). "
        "Nothing is published. If this is meant, allow it once: the same command with "
        "--gate.max-removed-share 1"
    )
    assert refusal((0, 0, 10, 1485), 10, 1495, max_removed_share=1.0) == ""


def test_a_version_that_is_too_different_is_refused():
    found = refusal((0, 51, 9, 40), 60, 100)
    assert "40 of the 100 ids of v-1 are gone (40.0%" in found
    assert "51 of the 100 ids of v-1 have another text or filter column (51.0%" in found
    assert found.endswith("--gate.max-removed-share 1 --gate.max-changed-share 1")


def test_a_version_before_that_cannot_be_opened_counts_by_its_size():
    assert "70 of the 100 ids of v-1 are gone" in refusal((30, 0, 0, 0), 30, 100)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_removed_share", 1.1),
        ("max_changed_share", -0.1),
        ("sample", -1),
        ("canary_texts", -1),
        ("top_k", 0),
        ("min_cosine", 1.1),
        ("min_recall", -0.1),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(BadInput, match=rf"^gate\.{field}: {value} is not allowed"):
        GateConfig(**{field: value})
