from __future__ import annotations

import ast
import gzip
import hashlib
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpora import raw
from pipeline.corpora.file_tasks import ParseReport
from pipeline.corpora.formats import amazonqa
from pipeline.corpora.formats.amazonqa import Options, Pair
from pipeline.corpora.privacy import Privacy

from ..conftest import parse_file

QUESTION, ANSWER = "Does it come with a cord?", "No, it does not."


def line(question: str = QUESTION, answer: str = ANSWER, product: str = "B1") -> str:
    return repr({"asin": product, "question": question, "answer": answer, "answerType": "?"})


def nested(product: str, *questions: tuple[str, list[str]]) -> str:
    return repr({"asin": product, "questions": [
        {"questionText": question, "answers": [{"answerText": text} for text in answers]}
        for question, answers in questions
    ]})  # fmt: skip


def read(folder: Path, text: str | bytes, **options: Any) -> tuple[list[Pair], ParseReport]:
    return parse_file(amazonqa, folder / "qa.json", text, **options)


@pytest.fixture(scope="session")
def prepare(prepare_here):
    """What files of the given texts leave."""

    def run(texts: list[str], privacy: Privacy | None = None, **options: Any):
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"qa_{number}.json" for number in range(len(texts))]
            for file, text in zip(files, texts, strict=True):
                file.write_text(text)
            return prepare_here(amazonqa.prepare, files, Options(**options), privacy=privacy)

    return run


# Lines


def test_both_forms_of_a_line_give_their_pairs(tmp_path):
    text = f"{line()}\n\n" + nested("B2", (QUESTION, [ANSWER, "Yes, I think so."]), (QUESTION, []))
    pairs, report = read(tmp_path, text)
    assert pairs == [
        ("B1", QUESTION, ANSWER),
        ("B2", QUESTION, ANSWER),
        ("B2", QUESTION, "Yes, I think so."),
    ]
    assert report.records == 3
    assert not report.malformed.counts and not report.dropped.counts


def test_a_line_of_json_is_read_as_json(tmp_path):
    """Where Python would read `\\/` as two characters, and a face as two halves."""
    texts = r'"question": "Is it red and\/or blue?", "answer": "It is so \ud83d\ude00"'
    text = f'{{"asin": "B1", "helpful": null, {texts}}}'
    pairs, report = read(tmp_path, text)
    assert pairs == [("B1", "Is it red and/or blue?", "It is so \U0001f600")]
    assert not report.malformed.counts


def test_words_are_what_spaces_part_and_there_are_4_to_59(tmp_path):
    texts = {n: " ".join(["word"] * n) for n in (3, 4, 59, 60)}
    both = [(first, second) for first in texts for second in texts]
    pairs, report = read(tmp_path, "\n".join(line(texts[a], texts[b]) for a, b in both))
    assert [(p.question, p.answer) for p in pairs] == [
        (texts[a], texts[b]) for a in (4, 59) for b in (4, 59)
    ]
    assert report.dropped.counts == {
        "question too short": 4, "question too long": 4, "answer too short": 2, "answer too long": 2,
    }  # fmt: skip
    assert read(tmp_path, line("two  spaces\tcount", "a  b c"))[0] == []
    assert len(read(tmp_path, line("two  spaces count", "a   b"))[0]) == 1
    assert len(read(tmp_path, line("one", "two"), min_words=1)[0]) == 1


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("{'asin': 'B1', 'question': open('x').read(), 'answer': 'b'}", "not a Python literal"),
        ('{"asin": "B1", "question": null}', "field question is no text"),
        ('{"asin": "B1", "question": nil}', "not a Python literal"),
        ("{'asin': 'B1', [1]: 2}", "not a Python literal"),
        ("[" * 100_000, "not a Python literal"),
        ("1" + "+1" * 100_000, "not a Python literal"),
        ("a\0b", "not a Python literal"),
        (f"{raw.OVERLONG.decode()}{{", "line too long"),
        ("[{'asin': 'B1'}]", "not a dictionary"),
        ("{'question': 'a', 'answer': 'b'}", "no field asin"),
        ("{'asin': 1, 'question': 'a', 'answer': 'b'}", "field asin is no text"),
        ("{'asin': 'B1', 'question': 'a', 'answer': '\\ud83d'}", "field answer is no text"),
        ("{'asin': 'B1', 'questions': {}}", "field questions is no list"),
        ("{'asin': 'B1', 'questions': [{'questionText': 'a'}]}", "no field answers"),
    ],
)
def test_a_line_that_is_no_dictionary_of_the_format_is_set_aside(tmp_path, text, reason):
    pairs, report = read(tmp_path, f"{line()}\n{text}\n{line()}")
    assert (len(pairs), report.records) == (2, 3)
    assert report.malformed.counts == {reason: 1}
    assert [(sample["line"], sample["text"]) for sample in report.malformed.samples] == [
        (2, text[:2000])
    ]


def test_a_product_without_answers_is_counted(tmp_path):
    pairs, report = read(tmp_path, nested("B1") + "\n" + nested("B2", (QUESTION, [])))
    assert (pairs, report.records, report.dropped.counts) == ([], 2, {"no answer": 2})


_literals = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner)
        | st.dictionaries(st.sampled_from(["asin", "question", "answer", "questions"]), inner)
    ),
    max_leaves=6,
).map(repr)


@settings(max_examples=12)
@given(st.lists(_literals | st.text(st.characters(exclude_categories=["Cs"])), max_size=6))
def test_any_lines_are_pairs_or_counted(tmp_path_factory, lines):
    pairs, report = read(tmp_path_factory.getbasetemp(), "\n".join(lines).encode(errors="replace"))
    counted = report.dropped.counts.total() + report.malformed.counts.total()
    assert len(pairs) + counted == report.records


# The whole way


def test_a_pair_is_an_example_of_its_product(prepare):
    found = prepare([line()])
    (row,) = found.rows
    assert row.pop("example_id").startswith("B1/")
    assert row == {
        "group_id": "B1", "context": [QUESTION], "response": ANSWER, "candidates": None, "label": None,
        "source": "amazonqa", "split": row["split"], "product_id": "B1",
    }  # fmt: skip
    assert found.counts == {
        "records": 1,
        "dictionaries": 1,
        "examples": 1,
        "examples.train": int(row["split"] == "train"),
        "examples.test": int(row["split"] == "test"),
    }


_texts = st.sampled_from(["a b c d", "a b c e", "a b\0c d e", "f g h i", "too short"])
_pairs = st.tuples(st.sampled_from(["B1", "B2", "B10"]), _texts, _texts)
_files = st.lists(st.lists(_pairs, max_size=12), min_size=1, max_size=3).filter(any)


@pytest.mark.slow
@given(files=_files, bucket_bytes=st.sampled_from([150, 400, 10**6]))
@settings(max_examples=6)
def test_of_equal_pairs_in_all_files_that_of_the_smallest_product_stays(
    prepare, files, bucket_bytes
):
    long = [pair for file in files for pair in file if "too short" not in pair]
    smallest: dict[tuple[str, str], str] = {}
    for product, *texts in sorted(long, reverse=True):
        smallest[tuple(texts)] = product
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(amazonqa, "_BUCKET_BYTES", bucket_bytes)
        patch.setattr(amazonqa, "_PAIRS_PER_PART", 3)
        found = prepare(["\n".join(line(*pair[1:], pair[0]) for pair in file) for file in files])
    kept = [(row["product_id"], row["context"][0], row["response"]) for row in found.rows]
    assert Counter(kept) == Counter((product, *texts) for texts, product in smallest.items())
    assert found.dropped.get("duplicate", 0) == len(long) - len(smallest)


@pytest.mark.parametrize("share", [0.9, 1.0])
def test_products_are_split_by_the_md5_of_their_id(prepare, share):
    products = [f"B{n}" for n in range(200)]
    texts = [line(f"Is this the product {product}?", product=product) for product in products]
    rows = prepare(["\n".join(texts)], train_share=share).rows
    assert len(rows) == 200
    for row in rows:
        place = int(hashlib.md5(row["product_id"].encode()).hexdigest(), 16) % 4096
        assert row["split"] == ("train" if (1 + place) / 4096 < share else "test")
    assert ("test" in {row["split"] for row in rows}) == (share < 1)


def test_addresses_are_redacted_after_duplicates_are_found(prepare):
    two = [line(answer=f"Ask {name}@example.org about it.") for name in ("ann", "bob")]
    privacy = Privacy(redact=True, authors="hash", salt="")
    found = prepare(["\n".join(two)], privacy)
    assert [row["response"] for row in found.rows] == ["Ask <email> about it."] * 2
    assert found.dropped == {}


@pytest.mark.slow
@pytest.mark.shared
def test_a_real_file_gives_what_a_reading_by_hand_gives(run_job_here, shared, tmp_path):
    file = shared / "data" / "amazonqa" / "qa_Appliances.json.gz"
    products: dict[tuple[str, str], list[str]] = {}
    with gzip.open(file, "rt", encoding="utf-8", newline="\n") as stream:
        for record in map(ast.literal_eval, stream):
            texts = (record["question"], record["answer"])
            if all(4 <= len(text.split(" ")) <= 59 for text in texts):
                products.setdefault(texts, []).append(record["asin"])
    summary = run_job_here(
        "prepare_corpus", "--corpus", "amazonqa", "--input", file, "--output", tmp_path / "out",
        "--redact", "off"
    ).summary  # fmt: skip
    assert summary["counts"] == {
        "records": 7578, "dictionaries": 7578, "examples": len(products),
        "examples.train": 5019, "examples.test": 636,
    }  # fmt: skip
    assert summary["dropped"]["duplicate"] == sum(map(len, products.values())) - len(products)
    rows = pq.read_table(tmp_path / "out" / "test", partitioning=None).to_pylist()
    assert {(row["context"][0], row["response"]): row["product_id"] for row in rows}.items() <= {
        texts: min(ids) for texts, ids in products.items()
    }.items()
