"""Questions whose right answers' places give nothing away."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.artifact import Artifact
from pipeline.config import BadInput
from pipeline.corpora.drawn_rows import read_rows
from pipeline.evaluation.questions import Question, Questions, questions, validation_questions
from tests import helpers

COUNT = 600
C = 5


@pytest.fixture(scope="module")
def given(tiny):
    """A corpus with candidates of its own; the right one is always last, as in ConvAI2's files."""
    rows = [
        {"context": [f"c{n}"], "response": f"r{n}", "label": C - 1,
         "candidates": [*(f"wrong{n}-{k}" for k in range(C - 1)), f"r{n}"]}
        for n in range(COUNT)
    ]  # fmt: skip
    return tiny.corpus(rows, split="valid", rows_per_file=250)


@pytest.fixture(scope="module")
def sampled(tiny):
    """A corpus without candidates; every second response is the same text."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}" if n % 2 else "yes"} for n in range(COUNT)]
    return tiny.corpus(rows, split="valid", rows_per_file=250)


@pytest.fixture(scope="module")
def blocks(tiny):
    """A corpus whose responses are all different, in files of uneven size."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(COUNT)]
    return tiny.corpus(rows, split="valid", rows_per_file=107)


@pytest.fixture(scope="module")
def search(tiny):
    """A corpus for article search with 12 other articles in two files."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(30)]
    return with_others(tiny.corpus(rows, split="valid"), [(f"o{n}", f"t{n}") for n in range(12)])


def with_others(corpus, others) -> Artifact:
    entries = list(corpus.manifest["files"])
    for number, part in enumerate(np.array_split(np.arange(len(others)), 2)):
        name = f"others/part-{number}.parquet"
        ids, texts = ([others[n][column] for n in part] for column in (0, 1))
        file = corpus.local() / name
        file.parent.mkdir(exist_ok=True)
        pq.write_table(pa.table({"id": ids, "text": texts}), file)
        entries.append({"path": name, "rows": len(part), "bytes": file.stat().st_size})
    return Artifact(corpus.uri, {**corpus.manifest, "files": entries})


def ask(corpus, source, candidates=C, max_examples=10_000, seed=0):
    return questions(corpus, "valid", source, candidates, max_examples, seed)


def one_by_one(asked) -> list[Question]:
    return [
        Question(asked.ids[n], asked.contexts[n],
                 [asked.texts[place] for place in asked.places(n)], int(asked.label_N[n]))
        for n in range(len(asked))
    ]  # fmt: skip


SOURCES = ["given", "sampled", "blocks"]


@pytest.fixture(params=SOURCES)
def asked(request):
    """`ask` for the sources in turn."""
    corpus = request.getfixturevalue(request.param)
    return lambda **more: ask(corpus, request.param, **more)


def test_every_question_has_its_own_right_answer_once(asked):
    found = one_by_one(asked())
    assert len(found) == len({question.example_id for question in found}) == COUNT
    for question in found:
        number = int(question.context[0][1:])
        assert question.example_id == f"e{number}"
        assert question.candidates[question.label] in (f"r{number}", "yes")
        assert len(question.candidates) == len(set(question.candidates)) == C


def test_given_candidates_are_the_corpus_own(given):
    asked = ask(given, "given")
    assert asked.ids == [f"e{number}" for number in range(COUNT)]  # in the corpus' order
    for number, question in enumerate(one_by_one(asked)):
        own = {f"r{number}", *(f"wrong{number}-{k}" for k in range(C - 1))}
        assert set(question.candidates) == own


def test_sampled_candidates_are_other_responses_of_the_split(sampled):
    pool = {"yes", *(f"r{n}" for n in range(1, COUNT, 2))}
    drawn = Counter()
    for question in one_by_one(ask(sampled, "sampled")):
        assert set(question.candidates) <= pool
        drawn.update(question.candidates)
    # A frequent response is drawn as often as a rare one: the right answer 300 times, and by chance
    # in 4 of 300 of the other questions.
    assert 300 <= drawn["yes"] < 320
    assert max(count for text, count in drawn.items() if text != "yes") < 30


def test_all_responses_can_be_the_candidates(tiny):
    corpus = tiny.corpus([{"response": f"r{n % 6}"} for n in range(30)], split="valid")
    for question in one_by_one(ask(corpus, "sampled", candidates=6)):
        assert sorted(question.candidates) == [f"r{n}" for n in range(6)]


def test_all_responses_are_held_once_for_all_questions(tiny):
    """A table of 100,000 answers and 15,000 questions took 12 GB, and hours to shuffle."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(30)]
    corpus = tiny.corpus(rows, split="valid")
    for source in ("sampled", "corpus"):
        found = questions(corpus, "valid", source, 10**9, 100, 0, fewer=True)
        assert (found.places_NK.size, found.shared, found.candidates) == (0, 30, 30)
        assert [found.texts[place] for place in found.right_places()] == [
            f"r{n}" for n in range(30)
        ]
        assert (found.unanswerable_count(), found.shorter_count()) == (0, 0)
        part = found.part(np.array([11, 3]))
        assert [one.candidates[one.label] for one in one_by_one(part)] == ["r11", "r3"]


def test_blocks_are_whole_disjoint_and_random(blocks):
    """PolyAI's 1-of-C: 600 examples are 120 blocks of 5."""
    found = one_by_one(ask(blocks, "blocks"))
    assert len(found) == 600
    seen = set()
    for start in range(0, 600, C):
        block = found[start : start + C]
        assert len({tuple(question.candidates) for question in block}) == 1
        asked_for = [question.candidates[question.label] for question in block]
        assert sorted(asked_for) == sorted(block[0].candidates)
        seen.update(asked_for)
    assert len(seen) == 600
    together = [{int(text[1:]) for text in question.candidates} for question in found[::C]]
    # Neighbours in the corpus, of one thread for instance, are not neighbours in a block.
    assert np.median([max(block) - min(block) for block in together]) > 200
    assert sum(found[n].label == n % C for n in range(600)) < 180  # 120 expected


@pytest.mark.parametrize(("count", "examples"), [(603, 1000), (610, 603)])
def test_a_last_smaller_block_stands_among_drawn_responses_of_the_others(tiny, count, examples):
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(count)]
    asked = ask(tiny.corpus(rows, split="valid"), "blocks", max_examples=examples)
    found = one_by_one(asked)
    assert len({question.example_id for question in found}) == len(found) == 603
    assert asked.places_NK.shape == (603, C)
    full, last = found[:600], found[600:]
    own = {question.candidates[question.label] for question in last}
    assert own == {f"r{question.context[0][1:]}" for question in last}
    assert len(own) == 3
    assert {tuple(question.candidates) for question in last} == {tuple(last[0].candidates)}
    others = set(last[0].candidates) - own
    assert len(others) == C - 3
    assert others <= {text for question in full for text in question.candidates}
    assert dict(asked.left_out) == ({"beyond max_examples": 7} if count == 610 else {})


def test_full_blocks_are_the_same_with_and_without_a_last_one(tiny):
    """So PolyAI's numbers are what they were: the same questions in the same order."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(60)]
    asked = ask(tiny.corpus(rows, split="valid"), "blocks", candidates=20)
    assert [asked.ids[at] for at in (0, 1, 20, 59)] == ["e30", "e23", "e41", "e28"]
    assert asked.label_N[:6].tolist() == [5, 7, 2, 10, 8, 1]


def test_a_split_smaller_than_a_block_is_one_block_where_that_is_allowed(tiny):
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(88)]
    corpus = tiny.corpus(rows, split="valid")
    asked = questions(corpus, "valid", "blocks", 100, 10_000, 0, fewer=True)
    assert (len(asked), asked.candidates, asked.left_out) == (88, 88, {})
    sampled = questions(corpus, "valid", "sampled", 100, 10_000, 0, fewer=True)
    assert (len(sampled), sampled.candidates) == (88, 88)
    few = questions(
        corpus, "valid", "blocks", 50, 20, 0
    )  # candidates need no question of their own
    assert (len(few), few.candidates, few.left_out) == (20, 50, {"beyond max_examples": 68})


def test_blocks_allow_the_same_response_twice(tiny):
    corpus = tiny.corpus([{"response": "yes"}] * 4 + [{"response": "no"}], split="valid")
    found = ask(corpus, "blocks")
    assert sorted(found.texts) == ["no", "yes"]
    assert found.places_NK.shape == (5, 5)
    assert found.unanswerable_count() == 4


def test_answers_that_differ_in_white_space_alone_are_counted(tiny):
    """As cells of Excel do: models give them one score, and ties count against the model."""
    rows = [
        {"context": [f"c{n}"], "response": text} for n, text in enumerate(["a b", "a  b\n", "c"])
    ]
    corpus = tiny.corpus(rows, split="valid")
    assert questions(corpus, "valid", "corpus", 10**9, 9, 0, fewer=True).unanswerable_count() == 2
    assert ask(corpus, "sampled", candidates=2, max_examples=1).unanswerable_count() in (0, 1)


def test_the_own_article_stands_among_the_fixed_others(search):
    found = ask(search, "others", candidates=13)
    assert found.candidates == 13
    for number, question in enumerate(one_by_one(found)):
        assert question.candidates == [f"r{number}", *(f"t{n}" for n in range(12))]
        assert question.label == 0
    assert len(found.texts) == 12 + 30
    fewer = one_by_one(ask(search, "others", candidates=4))
    assert fewer[7].candidates == ["r7", "t0", "t1", "t2"]


def test_the_right_answers_place_is_spread_evenly(asked):
    """So who always answers the same place is right once in C."""
    places = Counter(asked().label_N.tolist())
    assert set(places) == set(range(C))
    # 120 expected; five standard deviations are 49.
    assert all(71 < count < 169 for count in places.values())


def test_questions_follow_from_the_seed(asked):
    assert one_by_one(asked(seed=1)) == one_by_one(asked(seed=1))
    first, second = (
        {question.example_id: question.candidates for question in one_by_one(asked(seed=seed))}
        for seed in (1, 2)
    )
    assert sum(first[name] == second.get(name) for name in first) < COUNT / 20


@pytest.mark.parametrize("source", ["given", "sampled"])
def test_a_part_of_the_examples_is_drawn_from_everywhere_and_asks_the_same(request, source):
    corpus = request.getfixturevalue(source)
    whole = {question.example_id: question for question in one_by_one(ask(corpus, source))}
    part = one_by_one(ask(corpus, source, max_examples=60))
    numbers = [int(question.example_id[1:]) for question in part]
    assert len(set(numbers)) == 60
    assert numbers == sorted(numbers)
    assert min(numbers) < 100
    assert max(numbers) > 500
    assert all(question == whole[question.example_id] for question in part)
    assert set(ask(corpus, source, max_examples=60, seed=9).ids) != {q.example_id for q in part}


@pytest.fixture
def groups_read(monkeypatch):
    """The row groups that are read, in lists."""
    found = []
    read = pq.ParquetFile.read_row_groups

    def record(file, groups, **more):
        found.extend(groups)
        return read(file, groups, **more)

    monkeypatch.setattr(pq.ParquetFile, "read_row_groups", record)
    return found


def test_only_the_row_groups_with_drawn_examples_are_read(tiny, groups_read):
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(400)]
    corpus = tiny.corpus(rows, split="valid", rows_per_file=130, rows_per_group=20)
    asked = ask(corpus, "blocks", candidates=2, max_examples=2)
    drawn = {int(name[1:]) for name in asked.ids}
    assert sorted(groups_read) == sorted(n % 130 // 20 for n in drawn)


def test_rows_come_from_their_places_whatever_the_order_and_the_files(tiny):
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(101)]
    corpus = tiny.corpus(rows, split="valid", rows_per_file=23, rows_per_group=5)
    places = np.random.default_rng(0).permutation(101)[:60].tolist()
    found = read_rows(corpus, "valid", places)
    assert [row["example_id"] for row in found] == [f"e{place}" for place in places]
    assert [row["response"] for row in found] == [f"r{place}" for place in places]


def test_a_damaged_file_is_refused_in_one_line(tiny):
    corpus = tiny.corpus([{"context": ["c"], "response": "r"}] * 4, split="valid")
    file = corpus.files("valid/")[0]
    Path(file).write_bytes(b"x" * 100)
    with pytest.raises(BadInput, match=f"^{re.escape(file)}: no readable Parquet file"):
        read_rows(corpus, "valid", [1])


# -------------------------------------------------------------------------------------------------
# Training's questions


def validation(corpus, candidates=5, examples=1000, seed=0):
    return validation_questions(corpus, "valid", candidates, examples, seed)


def test_validation_draws_from_all_over_the_split(tiny, groups_read):
    """Not adjacent rows of one row group, which hold a few dialogues."""
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(1000)]
    corpus = tiny.corpus(rows, split="valid", rows_per_group=10)
    asked = validation(corpus, examples=50)
    numbers = np.array([int(name[1:]) for name in asked.ids])
    assert len(set(numbers.tolist())) == 50
    assert len({number // 100 for number in numbers.tolist()}) >= 9
    assert len(groups_read) <= 50
    assert asked.left_out == {"beyond valid_examples": 950}
    assert asked.ids == validation(corpus, examples=50).ids
    assert asked.ids != validation(corpus, examples=50, seed=1).ids


def test_validation_asks_examples_with_and_without_candidates(tiny):
    rows = [{"context": [f"c{n}"], "response": f"r{n}"} for n in range(40)]
    rows[7] |= {"candidates": ["a", "b", "r7", "a"]}
    asked = validation(tiny.corpus(rows, split="valid"))
    found = one_by_one(asked)
    assert len(found) == 40
    for n, question in enumerate(found):
        assert question.candidates[question.label] == f"r{n}"
        assert len(question.candidates) == len(set(question.candidates)) == (3 if n == 7 else 5)
        others = set(question.candidates) - {f"r{n}"}
        assert others <= ({"a", "b"} if n == 7 else {f"r{k}" for k in range(40)})
    assert asked.left_out == {}


def test_validation_of_a_small_split_asks_all_of_it_among_what_there_is(tiny):
    rows = [{"context": [f"c{n}"], "response": f"r{n % 3}"} for n in range(8)]
    asked = validation(tiny.corpus(rows, split="valid"), candidates=20)
    assert [len(question.candidates) for question in one_by_one(asked)] == [3] * 8


def test_validation_counts_examples_without_a_wrong_candidate(tiny):
    rows = [
        {"context": ["c"], "response": "r", "candidates": given} for given in (None, ["r"], ["x"])
    ]
    asked = validation(tiny.corpus(rows, split="valid"))
    assert [question.candidates for question in one_by_one(asked)] in ([["r", "x"]], [["x", "r"]])
    assert asked.left_out == {"no wrong candidate": 2}


# -------------------------------------------------------------------------------------------------
# Parts of them


def test_rows_keep_all_texts_and_parts_only_what_they_need(request):
    for source in ("given", "others"):
        corpus = request.getfixturevalue({"given": "given", "others": "search"}[source])
        found = ask(corpus, source, candidates=5)
        whole = one_by_one(found)
        rows = found.rows(np.array([9, 7]))
        assert one_by_one(rows) == [whole[9], whole[7]]
        assert rows.texts is found.texts
        part = found.part(np.array([11, 3, 7]))
        assert one_by_one(part) == [whole[11], whole[3], whole[7]]
        shared = 4 if source == "others" else 0
        assert part.shared == shared
        assert len(part.texts) == shared + 3 * (5 - shared)


def test_an_own_candidate_may_be_a_shared_one():
    asked = [Question("a", [], ["x"], 0), Question("b", [], ["z"], 0), Question("c", [], ["w"], 0)]
    found = Questions.of(asked, shared=["y", "z"])
    assert found.texts == ["y", "z", "x", "w"]
    assert one_by_one(found.part(np.array([1, 2])))[0].candidates == ["z", "y", "z"]
    assert found.part(np.array([1, 2])).texts == ["y", "z", "w"]
    assert found.unanswerable_count() == 1


# -------------------------------------------------------------------------------------------------
# What cannot be asked


def refusal(corpus, source, **more):
    return helpers.refusal(ask, corpus, source, **more)


def test_corpus_without_candidates_of_its_own_is_refused(sampled):
    assert "allowed: a corpus that gives them, or --protocol polyai" in refusal(sampled, "given")


@pytest.mark.parametrize("candidates", [4, 6])
def test_another_number_of_candidates_than_asked_for_is_refused(given, candidates):
    message = refusal(given, "given", candidates=candidates)
    assert f"example e0: 5 candidates, not {candidates}; allowed" in message


@pytest.mark.parametrize(
    ("label", "message"),
    [
        (-1, "label -1 is not allowed; allowed: 0 to 4"),
        (C, f"label {C} is not allowed; allowed: 0 to 4"),
        (1, "example e0: the response is not the candidate at label 1"),
    ],
)
def test_a_label_that_is_not_the_responses_is_refused(tiny, label, message):
    rows = [{"response": "r", "candidates": ["r", "a", "b", "c", "d"], "label": label}]
    assert message in refusal(tiny.corpus(rows, split="valid"), "given")


def test_more_candidates_than_different_responses_are_refused(sampled):
    ask(sampled, "sampled", candidates=301, max_examples=2)
    assert "301 different responses" in refusal(sampled, "sampled", candidates=302)


def test_fewer_examples_than_a_block_are_refused(tiny):
    corpus = tiny.corpus([{}] * 4, split="valid")
    assert "--candidates 5: 4 examples; allowed" in refusal(corpus, "blocks")


def test_fewer_others_than_candidates_are_refused(search):
    message = refusal(search, "others", candidates=14)
    assert "--candidates 14" in message
    assert "12 texts in others/; allowed: at most 13" in message


def test_corpus_without_others_is_refused(given):
    assert "no others/; allowed: a corpus for article search" in refusal(given, "others")


def test_an_article_that_is_among_its_own_others_is_refused(tiny):
    corpus = with_others(tiny.corpus([{}], split="valid"), [("x", "t"), ("g0", "u"), ("y", "v")])
    message = refusal(corpus, "others", candidates=4)
    assert "example e0: its article is among others/; allowed: --split valid or test" in message


@pytest.mark.parametrize("source", [*SOURCES, "others"])
def test_corpus_without_the_split_is_refused(tiny, source):
    corpus = tiny.corpus([{}], split="train")
    assert "no examples in valid/" in refusal(corpus, source)
