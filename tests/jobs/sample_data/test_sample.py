from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import pytest

from jobs.sample_data import sample
from pipeline.corpora.raw import Reading, read_lines
from pipeline.evaluation import metrics, ranking
from pipeline.evaluation.baselines import BM25, Chance, TfIdf
from pipeline.evaluation.questions import questions

TINY = sample.Size(reddit_threads=40, train_dialogues=30, valid_dialogues=12, articles=20)
CONVAI2 = ("train_self_original.sample_no_cands.txt", "valid_self_original.sample.txt")


def files_of(folder: Path) -> dict[str, bytes]:
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def personas_of(file: Path) -> list[frozenset[str]]:
    dialogues: list[set[str]] = []
    for line in file.read_text().splitlines():
        number, _, text = line.partition(" ")
        if number == "1":
            dialogues.append(set())
        if text.startswith("your persona: "):
            dialogues[-1].add(text)
    return [frozenset(persona) for persona in dialogues]


@pytest.fixture(scope="module")
def default_files(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("default")
    sample.generate(folder)
    return folder


@pytest.fixture(scope="module")
def comments(default_files) -> list[dict[str, object]]:
    files = sorted((default_files / "reddit_dump").iterdir())
    return [json.loads(text) for file in files for _, text in read_lines(str(file), Reading())]


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        sample.generate(tmp_path / name, seed=seed, size=TINY)
    first, again, other = (files_of(tmp_path / name) for name in "abc")
    assert first == again
    assert set(first) == set(other)
    assert [name for name in first if first[name] == other[name]] == []


def test_the_layout_is_that_of_the_public_sets(default_files):
    assert set(files_of(default_files)) == {
        "convai2/train_self_original.sample_no_cands.txt",
        "convai2/valid_self_original.sample.txt",
        "reddit_dump/RC_2011-01.zst",
        "reddit_dump/RC_2011-02.bz2",
        "wikipedia/extracted/AA/wiki_00",
        "wikipedia/extracted/AA/wiki_01",
    }


def test_the_default_size_is_a_few_megabytes(default_files, comments):
    files = files_of(default_files)
    assert 2_000_000 < sum(map(len, files.values())) < 10_000_000
    size = sample.Size()
    assert len({comment["link_id"] for comment in comments}) == size.reddit_threads
    assert [len(personas_of(default_files / "convai2" / name)) for name in CONVAI2] == [
        size.train_dialogues, size.valid_dialogues
    ]  # fmt: skip


def test_no_persona_is_in_both_files(default_files):
    train, valid = (personas_of(default_files / "convai2" / name) for name in CONVAI2)
    assert {len(persona) for persona in [*train, *valid]} == {3}
    assert set(train) & set(valid) == set()


def test_the_candidates_of_an_example_are_20_different_texts(default_files):
    text = (default_files / "convai2" / CONVAI2[1]).read_text()
    lists = [line.split("\t")[3].split("|") for line in text.splitlines() if "\t" in line]
    assert len(lists) > 500
    assert {len(set(candidates)) for candidates in lists} == {20}


def test_word_overlap_helps_but_does_not_rank_the_right_answer_first(convai2_corpus):
    asked = questions(convai2_corpus, "valid", "given", 20, 10_000, seed=0)
    recall = {
        type(scorer).__name__: metrics.recall_at(
            ranking.rank(scorer.prepare(asked), asked).ranks_N, 1
        )
        for scorer in (TfIdf.fit(asked.texts), BM25.fit(asked.texts), Chance())
    }
    assert recall["Chance"] < recall["TfIdf"] < 0.4
    assert recall["Chance"] < recall["BM25"] < 0.4


def test_the_dumps_hold_what_real_dumps_hold(comments):
    bodies = [str(comment["body"]) for comment in comments]
    share = {
        "deleted": sum(body in ("[deleted]", "[removed]") for body in bodies),
        "too long": sum(len(body) > 127 for body in bodies),
        "too short": sum(len(body) < 9 for body in bodies),
        "bot": sum(comment["author"] == "AutoModerator" for comment in comments),
        "user": sum(re.search(r"\bu/\w+", body) is not None for body in bodies),
        "mail": sum("@example.org" in body for body in bodies),
    }
    assert {name: n for name, n in share.items() if n < 0.005 * len(comments)} == {}
    assert max(share.values()) < 0.2 * len(comments)
    assert {str(c["author"]) for c in comments if c["body"] == "[deleted]"} == {"[deleted]"}


def test_comment_ids_are_unique_and_threads_may_cross_the_border_of_two_months(comments):
    assert len({comment["id"] for comment in comments}) == len(comments)
    ids = {f"t1_{comment['id']}" for comment in comments}
    parents = Counter(str(comment["parent_id"])[:3] for comment in comments)
    assert parents["t1_"] > parents["t3_"] > 1000
    assert all(c["parent_id"] in ids for c in comments if str(c["parent_id"]).startswith("t1_"))


def test_articles_are_documents_and_some_have_no_text(default_files):
    text = "".join(
        path.read_text() for path in (default_files / "wikipedia" / "extracted" / "AA").iterdir()
    )
    documents = re.findall(r'<doc id="(\d+)"[^>]* title="([^"]+)">\n(.*?)</doc>\n', text, re.S)
    assert len(documents) == text.count("<doc ") == sample.Size().articles
    assert len({number for number, _, _ in documents}) == len(documents)
    assert len({title for _, title, _ in documents}) == len(documents)
    empty = sum(body.strip() == title for _, title, body in documents) / len(documents)
    assert 0.01 < empty < 0.1
