"""Runs of words that train shares with evaluation sets, against sets of tuples in plain Python."""

from __future__ import annotations

import gzip
import json
import random
import re

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.config import BadInput
from pipeline.corpora import buckets
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.decontaminate import Layout, Options
from pipeline.corpora.dedup.evaluation_sets import open_set, own_sets
from pipeline.corpora.dedup.options import Options as Duplicates
from pipeline.engine.draft import draft

ONLY = Duplicates(exact=False, near=False)
RULE = Options(ngram_words=4, min_words=2)
TEXT = " ".join(f"word{number}" for number in range(20))


def row(example_id, *turns, **more):
    return {"example_id": example_id, "context": list(turns[:-1]), "response": turns[-1], **more}


@pytest.fixture
def many_buckets(monkeypatch):
    """Eight buckets, and a filter that lets through one n-gram of two that are in no set."""

    def of(evaluation_bytes, train_bytes):
        return Layout(filter_bits=8, bucket_bits=3, filed_bytes=0)

    monkeypatch.setattr(Layout, "for_sizes", of)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "groups", "side"), [(0, 0, "example"), (1, 1, "example"), (2, 0, "response")]
)
def test_what_goes_is_what_one_table_of_all_n_grams_says(
    corpus_of, clean, many_buckets, tmp_path, seed, groups, side
):
    """The reason and the example that is named, too, against dictionaries in plain Python."""
    rng = random.Random(seed)

    def text():
        return " ".join(rng.choices("abcdef", k=rng.randint(1, 9)))

    rows = [row(f"e{n:03d}", text(), text()) for n in range(150)]
    held_out = [
        row(f"h{n:03d}", text(), text(), group_id=f"g{n % 7}", split=rng.choice(["valid", "test"]))
        for n in range(12)
    ]
    (tmp_path / "lines").write_text("".join(f"{text()} {text()}\n" for _ in range(6)))
    corpus = corpus_of([*rows, *held_out], shards=3)
    sets = [*own_sets(corpus), open_set(str(tmp_path / "lines"))[0]]

    def of_example(example):
        turns = example["context"] if side == "example" else []
        return " ".join([*turns, example["response"]]).split()

    def ngrams(words):
        if len(words) < 4:
            return [tuple(words)] if len(words) >= 2 else []
        return [tuple(words[start : start + 4]) for start in range(len(words) - 3)]

    # (set, hash of the group, order) and the id: of an n-gram the least entry of all
    table = {}
    groups_of = {}
    order = 0
    lines = (tmp_path / "lines").read_text().splitlines()
    for number, one in enumerate(sets):
        texts = [
            (f"lines:{n}", f"lines:{n}", line.split()) for n, line in enumerate(lines, 1)
        ] if one.uri else [
            (example["example_id"], example["group_id"], of_example(example))
            for file in one.files for example in pq.read_table(file, partitioning=None).to_pylist()
        ]  # fmt: skip
        for name, group, words in texts:
            hash_ = int(hashing.text_hashes(pa.array([group]))[0])
            for gram in ngrams(words):
                order += 1
                groups_of.setdefault(gram, set()).add(group)
                entry = (number, hash_, order, name)
                table[gram] = min(table.get(gram, entry), entry)
    if groups:
        table = {gram: entry for gram, entry in table.items() if len(groups_of[gram]) <= groups}
    expected = {}
    for example in rows:
        words = of_example(example)
        hits = [
            (table[gram][0], place, table[gram][3])
            for place, gram in enumerate(ngrams(words))
            if gram in table
        ]
        if hits:
            number, _, name = min(hits)
            kind = "4 words" if len(words) >= 4 else "text"
            expected[example["example_id"]] = (f"{kind} of {sets[number].name}", name)
    sharing = Options(ngram_words=4, min_words=2, boilerplate_groups=groups, text=side)
    done = clean(corpus, ONLY, sharing, sets)
    samples = [
        json.loads(line)
        for file in (tmp_path / "clean-0" / "rejected").iterdir()
        for line in file.read_text().splitlines()
    ]
    assert 10 < len(expected) < 150
    assert {r["example_id"] for r in rows} - set(done.rows) == set(expected)
    reasons = [reason for reason, _ in expected.values()]
    assert done.dropped == {reason: reasons.count(reason) for reason in set(reasons)}
    assert len(samples) > 10
    for sample in samples:
        assert (sample["reason"], sample["same_as"]) == expected[sample["example_id"]]


def test_the_driver_holds_a_filter_and_a_task_one_bucket(
    corpus_of, clean, many_buckets, monkeypatch
):
    """Some 12 bits of each n-gram; the index is read by the tasks that match, a bucket each."""
    read = []

    def counted(draft, names, bucket, schema):
        names = list(names)
        read.extend(name for name in names if name.startswith("evaluation-index"))
        return original(draft, names, bucket, schema)

    original = buckets.read
    monkeypatch.setattr(buckets, "read", counted)
    corpus = corpus_of([row("a", "w1 w2", "w3 w4"), row("t", "w1 w2", "w3 w4", split="test")])
    assert set(clean(corpus, ONLY, RULE, own_sets(corpus)).rows) == {"t"}
    assert sorted(read) == sorted(
        name
        for b in range(8)
        for name in (f"evaluation-index-{b:05d}", f"evaluation-index-{b:05d}-filter")
    )


@pytest.mark.parametrize(
    "evaluation, train", [(0, 10**9), (10**5, 10**12), (10**10, 10**11), (10**12, 0)]
)
def test_buckets_and_the_filter_grow_with_what_is_filed(evaluation, train):
    layout = Layout.for_sizes(evaluation, train)
    assert layout.filed_bytes / layout.bucket_count <= 256 << 20
    assert layout.bucket_count == 1 or layout.filed_bytes / layout.bucket_count > 128 << 20
    ngrams = evaluation * 0.4
    assert 1 << layout.filter_bits >= 6 * ngrams
    assert layout.filter_bits == 22 or 1 << layout.filter_bits <= 12 * ngrams + 2


def test_contaminated_examples_do_not_stand_for_their_duplicates(corpus_of, clean):
    """The response alone is compared: the first of the two is ruled out by its context."""
    rows = [row("a", "w1 w2 w3 w4", "same answer"), row("b", "other", "same answer"),
            row("c", "w1 w2 w3 w4", "else", split="test")]  # fmt: skip
    corpus = corpus_of(rows)
    done = clean(corpus, Duplicates(text="response"), RULE, own_sets(corpus))
    assert set(done.rows) == {"b", "c"}


def test_short_held_out_splits_rule_nothing_out(corpus_of, clean):
    corpus = corpus_of([row("a", "x", "y"), row("b", "x", "y", split="test")])
    assert clean(corpus, ONLY, Options(), own_sets(corpus)).dropped == {}


# What an evaluation set may be


def as_text(folder):
    (folder / "set.txt").write_text(f"something else\n{TEXT}\n")
    return "set.txt:2"


def as_gzip(folder):
    (folder / "set.gz").write_bytes(gzip.compress(f"{TEXT}\n".encode()))
    return "set.gz:1"


def as_texts(folder):
    table = pa.table({"number": [1, 2, 3], "text": [None, "something else", TEXT]})
    pq.write_table(table, folder / "set.parquet")
    return "set.parquet:3"


def as_texts_of_other_programs(folder):
    texts = pa.array([None, TEXT], pa.large_string())
    pq.write_table(pa.table({"text": texts}), folder / "set.parquet")
    return "set.parquet:2"


def as_examples_of_other_programs(folder):
    columns = {
        "context": pa.array([[TEXT[:40]]], pa.large_list(pa.string_view())),
        "response": pa.array([TEXT[40:]]).dictionary_encode(),
    }
    pq.write_table(pa.table(columns), folder / "set.parquet")
    return "set.parquet:1"


def as_examples(folder):
    examples = [row("i", "none"), row("j", TEXT[:40], TEXT[40:]), row("k", None, None)]
    schema = pa.schema(
        {"example_id": pa.string(), "context": pa.list_(pa.string()), "response": pa.string()}
    )
    pq.write_table(pa.Table.from_pylist(examples, schema), folder / "set.parquet")
    return "j"


@pytest.mark.parametrize(
    ("make", "as_folder"),
    [
        (as_text, True),
        (as_gzip, False),
        (as_texts, False),
        (as_texts_of_other_programs, False),
        (as_examples_of_other_programs, False),
        (as_examples, True),
    ],
)
def test_files_of_texts_are_evaluation_sets(corpus_of, clean, tmp_path, make, as_folder):
    folder = tmp_path / "set"
    folder.mkdir()
    match = make(folder)
    uri = folder if as_folder else next(folder.iterdir())
    evaluation, reference = open_set(str(uri))
    assert reference["uri"] == str(uri) and reference["fingerprint"]
    corpus = corpus_of([row("a", "x", TEXT), row("b", "x", "y")])
    done = clean(corpus, ONLY, Options(), [evaluation])
    assert done.dropped == {f"13 words of {uri.name}": 1}
    (sample,) = (tmp_path / "clean-0" / "rejected").iterdir()
    assert f'"same_as": "{match}"' in sample.read_text()


def test_a_corpus_is_an_evaluation_set_by_its_held_out_splits(corpus_of, clean):
    other = corpus_of([row("t", "x", "r1 r2 r3 r4"), row("v", "x", "s1 s2 s3 s4", split="valid")])
    corpus = corpus_of([row("a", "x", "r1 r2 r3 r4"), row("b", "x", "s1 s2 s3 s4")])
    evaluation, reference = open_set(f"{other.uri}/")
    assert reference.fingerprint == other.fingerprint
    assert set(clean(corpus, ONLY, RULE, [evaluation]).rows) == {"a"}
    everything = open_set(f"{other.uri}/train")[0]
    assert set(clean(corpus, ONLY, RULE, [everything]).rows) == {"b"}


def test_what_is_no_evaluation_set_is_refused(corpus_of, clean, tmp_path):
    corpus = corpus_of([row("a", "x", TEXT)])
    with pytest.raises(BadInput, match=r"--evaluation .*: a corpus without a valid or test split"):
        open_set(corpus.uri)
    with pytest.raises(BadInput, match=r"--evaluation .*/none: no such file or folder"):
        open_set(str(tmp_path / "none"))
    encoder = draft(str(tmp_path / "encoder"), "encoder", ONLY, {}).publish([], {})
    with pytest.raises(BadInput, match="kind is 'encoder'; needed here: corpus"):
        open_set(encoder.uri)

    def refusal(name, write):
        write(tmp_path / name)
        with pytest.raises(BadInput) as error:
            clean(corpus, ONLY, Options(), [open_set(str(tmp_path / name))[0]])
        return str(error.value)

    short = refusal("short.txt", lambda path: path.write_text("too few words\n\n"))
    assert re.match("--evaluation .*short.txt: no text of decontaminate.min_words 8", short)
    broken = refusal("b.parquet", lambda path: path.write_text("rubbish"))
    assert "b.parquet: no Parquet file" in broken
    for name, text in (
        ("q.jsonl.gz", "x\n"),
        ("q.txt", '{"_id": "1", "text": "x"}\n'),
        ("q.csv", "x\n"),
    ):
        table = refusal(name, lambda path, text=text: path.write_text(text))
        assert re.match(
            f"--evaluation .*{name}: a table or JSON; allowed: a text in each line", table
        )
    numbers = pa.table({"text": [1], "response": ["a"]})
    wrong = refusal("n.parquet", lambda path: pq.write_table(numbers, path))
    assert re.search("n.parquet: no texts; needed: .* there are: text, response", wrong)
