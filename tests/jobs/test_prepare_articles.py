"""Articles as a user prepares them: XML dumps, WikiExtractor's output, StarSpace's files."""

from __future__ import annotations

import bz2
import json
from collections import Counter
from pathlib import Path
from xml.sax.saxutils import escape

import pytest

from pipeline.artifact import Artifact, open_artifact
from pipeline.corpora.formats import wikipedia_xml
from pipeline.corpora.raw import Reading, read_lines
from tests.helpers import rows_of

SEARCH = ("--wikipedia.task", "search")


@pytest.fixture
def prepare(run_job_here, tmp_path: Path):
    """The job on files, to a corpus; or its refusal."""

    def run(corpus: str, files: list[Path], *options: object, output: str = "out") -> Artifact:
        done = run_job_here("prepare_corpus", "--corpus", corpus, "--input", *files,
                       "--output", tmp_path / output, *options)  # fmt: skip
        found = open_artifact(done.summary["output"], "corpus")
        dropped = sum(found.manifest["dropped"].values())
        assert found.counts["records"] >= dropped
        return found

    return run


@pytest.fixture(scope="session")
def documents(sample_files: Path) -> list[tuple[str, str, list[str]]]:
    """(id, title, paragraphs) of the sample articles."""
    found = []
    for file in sorted((sample_files / "wikipedia" / "extracted" / "AA").iterdir()):
        lines = [line for _, line in read_lines(str(file), Reading())]
        for place, line in enumerate(lines):
            if line.startswith("<doc "):
                end = lines.index("</doc>", place)
                text = [line for line in lines[place + 2 : end] if line]
                found.append((line.split('"')[1], lines[place + 1], text))
    assert len(found) == 60
    return found


def xml_dump(documents: list[tuple[str, str, list[str]]]) -> list[str]:
    """The same articles as a dump: its head, its pages, its tail."""
    pages = [
        f"<page><title>{escape(title)}</title><ns>0</ns><id>{name}</id><revision><id>1</id>"
        f"<text>{escape(chr(10).join(text))}</text></revision></page>\n"
        for name, title, text in documents
    ]
    return ["<mediawiki>\n", *pages, "</mediawiki>\n"]


def json_lines(documents: list[tuple[str, str, list[str]]]) -> str:
    return "".join(
        json.dumps({"id": name, "url": "", "title": title, "text": "\n".join(text)}) + "\n"
        for name, title, text in documents
    )


def test_all_forms_of_the_same_articles_give_the_same_corpus(
    prepare, sample_files, documents, tmp_path, monkeypatch
):
    monkeypatch.setattr(wikipedia_xml, "PART_BYTES", 4000)  # the driver cuts the dump into parts
    streams = [bz2.compress(piece.encode()) for piece in xml_dump(documents)]
    (tmp_path / "dump.xml.bz2").write_bytes(b"".join(streams))
    (tmp_path / "wiki.json").write_text(json_lines(documents))
    inputs = {"xml": tmp_path / "dump.xml.bz2", "json": tmp_path / "wiki.json"}
    inputs["extracted"] = sample_files / "wikipedia"
    found = {}
    for name, file in inputs.items():
        corpus = prepare("wikipedia", [file], *SEARCH, "--wikipedia.others", 5, output=name)
        assert corpus.counts["records"] == 60
        assert corpus.counts["examples"] + sum(corpus.manifest["dropped"].values()) == 60
        examples = [row for split in ("train", "valid", "test") for row in rows_of(corpus, split)]
        examples.sort(key=lambda row: row["example_id"])
        found[name] = examples, rows_of(corpus, "others")
        tasks = len({entry["path"].split("/")[1][:10] for entry in corpus.manifest["files"]})
        assert name != "xml" or tasks > 5
    assert found["xml"] == found["json"] == found["extracted"]
    assert len(found["xml"][1]) == 5


def test_the_others_are_a_file_of_the_corpus_apart_from_its_examples(prepare, sample_files):
    options = ("--wikipedia.queries", 3, "--wikipedia.others", 10)
    corpus = prepare("wikipedia", [sample_files / "wikipedia"], *SEARCH, *options)
    others, train = rows_of(corpus, "others"), rows_of(corpus, "train")
    assert len(others) == len({row["id"] for row in others}) == 10
    assert corpus.rows("others/") == corpus.counts["others"] == 10
    splits = ("train/", "valid/", "test/")
    assert corpus.counts["examples"] == sum(map(corpus.rows, splits))
    responses = {(row["group_id"], row["response"]) for row in train}
    for row in others:
        assert row.keys() == {"id", "text"}
        assert (row["id"], row["text"]) in responses
    # Exactly what is published is listed, and nothing is left of the choice.
    listed = {entry["path"] for entry in corpus.manifest["files"]}
    there = {p.relative_to(corpus.uri).as_posix() for p in Path(corpus.uri).rglob("*.parquet")}
    assert there == listed


def labels(start: int, end: int) -> str:
    return "".join(
        f"Article {n} begins here .\tWrite to a{n}@example.org .\tIt ends {n} .\n"
        for n in range(start, end)
    )


def test_starspaces_files_with_their_base_documents(prepare, tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    (folder / "wikipedia_train250k.txt").write_text(labels(0, 60))
    (folder / "wikipedia_test10k.txt").write_text(labels(60, 80))
    (folder / "wikipedia_test_basedocs.txt").write_text(labels(75, 100))  # 5 of them in test
    corpus = prepare("starspace", [folder], "--starspace.others", 15)
    per_split = {split: len(rows_of(corpus, split)) for split in ("train", "valid", "test")}
    assert per_split == {"train": 60, "valid": 0, "test": 20}
    assert corpus.counts["records"] == 80
    others = rows_of(corpus, "others")
    numbers = [int(row["text"].split()[1]) for row in others]
    assert len(set(numbers)) == 15 and set(numbers) < set(range(80, 100))
    for row, number in zip(others, numbers, strict=True):
        text = f"Article {number} begins here . Write to <email> . It ends {number} ."
        assert row["text"] == text
    all_of_them = prepare("starspace", [folder], output="all")
    assert all_of_them.counts["others"] == 20
    assert all_of_them.counts["others.missing"] == 9980


def test_without_base_documents_starspaces_others_are_of_train_alone(prepare, tmp_path):
    (tmp_path / "wikipedia_train.txt").write_text(labels(0, 30))
    (tmp_path / "wikipedia_test.txt").write_text(labels(20, 40))  # half of it is in train, too
    files = [tmp_path / "wikipedia_train.txt", tmp_path / "wikipedia_test.txt"]
    corpus = prepare("starspace", files)
    train, test = rows_of(corpus, "train"), rows_of(corpus, "test")
    assert (len(train), len(test)) == (30, 20)
    chosen = {row["id"] for row in rows_of(corpus, "others")}
    assert chosen == {row["group_id"] for row in train} - {row["group_id"] for row in test}
    assert len(chosen) == 20


def test_only_base_documents_are_refused(run_job_here, tmp_path):
    (tmp_path / "wikipedia_test_basedocs.txt").write_text(labels(0, 5))
    done = run_job_here("prepare_corpus", "--corpus", "starspace", "--input", tmp_path,
                   "--output", tmp_path / "out")  # fmt: skip
    assert "--input" in done.refusal


@pytest.mark.long  # 14 s on two slow cores; test_wikipedia_xml.py reads the same dump to its last page
@pytest.mark.shared
def test_the_real_dumps_make_a_corpus_for_search(prepare, shared):
    corpus = prepare("wikipedia", [shared / "data" / "wikipedia" / "xml_dump"], *SEARCH)
    assert corpus.counts["records"] == 211
    assert corpus.counts["examples"] == 211 - sum(corpus.manifest["dropped"].values()) == 102
    assert corpus.manifest["dropped"]["redirect"] == 99
    # An article that is in both dumps is used twice, in one split, and is one of the others.
    ids = Counter(row["group_id"] for row in rows_of(corpus, "train"))
    assert sorted(ids.values())[-2:] == [1, 2]
    assert {row["id"] for row in rows_of(corpus, "others")} == ids.keys()
