from __future__ import annotations

import hashlib
import json
import re
from collections import Counter, defaultdict, deque
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.config import BadInput
from pipeline.corpora import raw, reddit
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit import Options, languages
from pipeline.corpora.reddit.comments import normalise, trim
from pipeline.corpora.reddit.lines import kind_of, parse_comments, parse_submissions
from pipeline.corpora.reddit.threads import Examples, build_examples, split_of
from pipeline.engine import report
from pipeline.engine.draft import draft

PLAIN = Privacy(redact=False, authors="plain", salt="")
Comment = dict[str, Any]
Example = tuple[Any, ...]


# The oracle: PolyAI's rules once more, on dictionaries, comment by comment.


def oracle_trim(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    text = text[: most + 1]
    while len(text) > 1 and text[-1].isalnum() == text[-2].isalnum():
        text = text[:-1]
    return text[:-1]


def oracle(comments: list[Comment], rules: Options | None = None) -> Counter[Example]:
    rules = rules or Options()
    threads: dict[str, dict[str, Comment]] = defaultdict(dict)
    for comment in comments:
        thread = re.sub("^t[0-9]_", "", comment["link_id"])
        threads[thread].setdefault(comment["id"], comment)

    def skipped(comment: Comment) -> bool:
        body = comment["body"]
        long, short = len(body) > rules.max_characters, len(body) < rules.min_characters
        return long or short or body in ("[deleted]", "[removed]")

    examples: Counter[Example] = Counter()
    for thread, by_id in threads.items():
        place = int(hashlib.md5(thread.encode()).hexdigest(), 16) % 4096
        split = "train" if (1 + place) / 4096 < rules.train_share else "test"
        replies = defaultdict(list)
        paths: deque[list[Comment]] = deque()
        for comment in by_id.values():
            parent = re.sub("^t[0-9]_", "", comment["parent_id"])
            if parent in by_id:
                replies[parent].append(comment)
            else:
                paths.append([comment])
        while paths:
            path = paths.popleft()
            paths.extend([*path, reply] for reply in replies[path[-1]["id"]])
            if len(path) > 1 and not skipped(path[-1]) and not skipped(path[-2]):
                turns = [oracle_trim(c["body"], rules.max_characters) for c in path]
                context = tuple(turns[:-1][-rules.max_context_turns :])
                authors = (path[-2]["author"], path[-1]["author"])
                row = (thread, path[-1]["id"], context, turns[-1], *authors)
                examples[(*row, path[-1]["subreddit"], split)] += 1
    return examples


def as_examples(rows: list[dict[str, Any]]) -> Counter[Example]:
    """Our rows in the oracle's form."""
    found: Counter[Example] = Counter()
    for row in rows:
        assert (row["source"], row["candidates"], row["label"]) == ("reddit", None, None)
        thread, comment = row["example_id"].split("/")
        assert thread == row["group_id"]
        authors = (row["context_author"], row["response_author"])
        found[
            thread, comment, tuple(row["context"]), row["response"], *authors,
            row["subreddit"], row["split"]
        ] += 1  # fmt: skip
    return found


def lines_of(comments: list[Any]) -> bytes:
    return "".join(json.dumps(comment) + "\n" for comment in comments).encode()


def parsed(comments: list[Any]) -> pa.Table:
    return parse_comments(lines_of(comments), "dump", 1, raw.Rejects())


def examples_of(
    comments: list[Comment], rules: Options | None = None, privacy: Privacy = PLAIN
) -> tuple[list[dict[str, Any]], dict[str, int]]:
    rules = (rules or Options()).with_name_keys(privacy)
    examples, rejects = build_examples(normalise(parsed(comments), rules, privacy)[0], rules)
    return rows_of(examples), dict(rejects.counts)


def rows_of(examples: Examples) -> list[dict[str, Any]]:
    return examples.rows(np.arange(len(examples.responses))).to_pylist()


def comment(name: str, parent: str | None = None, body: str = "a text that is long enough", **more):
    return {
        "id": name,
        "link_id": "t3_th",
        "parent_id": f"t1_{parent}" if parent else "t3_th",
        "body": body,
        "author": f"author of {name}",
        "subreddit": "sub",
        **more,
    }


@pytest.fixture(scope="module")
def sample_comments(sample_files: Path) -> list[Comment]:
    files = sorted((sample_files / "reddit_dump").iterdir())
    lines = [text for file in files for _, text in raw.read_lines(str(file), raw.Reading())]
    return [json.loads(line) for line in lines]


# Rules


_names = st.sampled_from("abcdefgh")
_bodies = st.one_of(
    st.sampled_from(["[deleted]", "[removed]", "too short", "2 short", "é" * 9, "w" * 127]),
    st.sampled_from(["wo rd " * 21 + "x", "wo rd " * 22, "w" * 128, "!" * 300, "w, " * 60]),
    st.text(st.characters(exclude_categories=["Cs"]), max_size=160),
)
_forests = st.lists(
    st.builds(
        lambda thread, name, parent, body: comment(
            name, parent, body, link_id=f"t3_{thread}", parent_id=parent or f"t3_{thread}"
        ),
        thread=st.sampled_from(["x1", "y2", "t1_z"]),
        name=_names,
        parent=st.one_of(st.none(), _names, _names.map("t1_{}".format)),
        body=_bodies,
    ),
    max_size=25,
)
_rules = st.builds(
    Options,
    max_characters=st.sampled_from([127, 9, 30]),
    min_characters=st.sampled_from([9, 0, 5]),
    max_context_turns=st.sampled_from([10, 1, 3]),
    train_share=st.sampled_from([0.9, 0.5, 1.0]),
)


@given(_forests, _rules)
@example([comment("a", "b"), comment("b", "a"), comment("c", "a")], Options())
@example([comment("a", "a")], Options())
@example([], Options())
def test_any_threads_give_the_examples_of_an_independent_implementation(comments, rules):
    rows, dropped = examples_of(comments, rules)
    assert as_examples(rows) == oracle(comments, rules)
    assert len(rows) + sum(dropped.values()) == len(comments)


def test_comments_that_give_no_example_are_counted_by_reason():
    long, short = "x" * 128, "x" * 8
    comments = [
        comment("root"),
        comment("orphan", "nowhere"),
        comment("long", "root", long),
        comment("after", "long"),
        comment("short", "root", short),
        comment("gone", "root", "[deleted]"),
        comment("removed", "gone", "[removed]"),
        comment("circle", "circle"),
        comment("good", "root"),
        comment("good", "root", "the second of that name"),
    ]
    rows, dropped = examples_of(comments)
    assert [row["example_id"] for row in rows] == ["th/good"]
    assert dropped == {
        "answers no comment that is there": 2,
        "response too long": 1,
        "context too long": 1,
        "response too short": 1,
        "response deleted": 2,
        "thread runs in a circle": 1,
        "duplicate id": 1,
    }


def test_a_notice_that_a_comment_was_removed_is_as_if_it_said_deleted():
    notice = "[ Removed by Reddit ]"
    comments = [comment("a"), comment("b", "a", notice), comment("c", "b"), comment("d", "c")]
    rows, dropped = examples_of(comments, Options(layout="dialogue"))
    contexts = [(row["example_id"], row["context"]) for row in rows]
    assert contexts == [("th/d", [comments[2]["body"]])]
    assert dropped["response deleted"] == dropped["context deleted"] == 1


@given(st.text(), st.integers(1, 20))
def test_a_trimmed_text_is_the_beginning_of_it_cut_at_the_edge_of_a_word(text, most):
    cut = trim(text, most)
    assert cut == oracle_trim(text, most)
    assert text.startswith(cut) and len(cut) <= most


def test_of_4096_hashes_the_first_3686_are_for_training():
    hashes = np.array([0, 3685, 3686, 4095, 4096 + 3685, 4096 + 3686])
    train, test = "train", "test"
    assert split_of(hashes, 0.9) == [train, train, test, test, train, test]


def test_a_chain_of_ten_thousand_answers_is_no_circle_and_is_built_one_row_group_at_a_time():
    """In contexts of 50 turns, 50,000 comments of 1,000 characters have 2.5 GB of text; a column holds
    2 GiB."""
    chain = [comment(str(n), str(n - 1) if n else None) for n in range(10_000)]
    examples, rejects = build_examples(normalise(parsed(chain), Options(), PLAIN)[0], Options())
    assert rejects.counts == {"answers no comment that is there": 1}
    table = examples.rows(np.arange(9_999)[::-1])
    assert [len(chunk) for chunk in table["context"].chunks] == [2048] * 4 + [1807]
    assert table["example_id"].to_pylist() == [f"th/{n}" for n in range(9_999, 0, -1)]
    # Of a bucket, which may hold more than 2 GiB; samples of rejected comments are rows of the table.
    assert examples.bodies.type == examples.comments["body"].type == pa.large_string()
    assert table.schema.field("response").type == pa.string()


def kept(rules: Options, *comments: Comment) -> list[str]:
    """Ids of the responses; examples and drops add up."""
    rows, dropped = examples_of([comment("root"), *comments], rules)
    assert len(rows) + sum(dropped.values()) == len(comments) + 1
    return [row["example_id"].removeprefix("th/") for row in rows]


def test_as_dialogue_a_context_is_one_text_from_the_last_deleted_turn_on():
    bodies = ["the first of all", "[deleted]", "after the gap", "and another one", "the response"]
    chain = [comment(f"c{n}", f"c{n - 1}" if n else None, body) for n, body in enumerate(bodies)]
    rows, _ = examples_of(chain, Options(layout="dialogue"))
    assert [(row["context"], row["response"]) for row in rows] == [
        (["after the gap"], "and another one"),
        (["after the gap\nand another one"], "the response"),
    ]
    rows, _ = examples_of(chain, Options(layout="dialogue", max_context_turns=1))
    assert [row["context"] for row in rows] == [["after the gap"], ["and another one"]]


def test_tokens_are_words_and_punctuation_marks():
    comments = [
        comment("three", "root", "wonderful, yes"),
        comment("four", "root", "wonderful, yes!"),
    ]
    assert kept(Options(max_tokens=20, min_tokens=4), *comments) == ["four"]
    assert kept(Options(max_tokens=6), *comments) == ["three", "four"]
    assert kept(Options(max_tokens=3), *comments) == []  # their context has six


def test_only_subreddits_that_are_asked_for_are_used_whatever_their_case():
    comments = [
        comment(f"{place}{name}", place if name == "b" else None, subreddit=place, link_id=f"t3_{place}",
                parent_id=f"t1_{place}a" if name == "b" else f"t3_{place}")
        for place in ("Ask", "news", "pics") for name in ("a", "b")
    ]  # fmt: skip
    for rules, wanted in (
        (Options(subreddits=("ASK", "news")), {"Ask", "news"}),
        (Options(exclude_subreddits=("ask",)), {"news", "pics"}),
        (Options(subreddits=("ask", "news"), exclude_subreddits=("News",)), {"Ask"}),
    ):
        table, elsewhere, _ = normalise(parsed(comments), rules, PLAIN)
        examples, _ = build_examples(table, rules)
        assert {row["subreddit"] for row in rows_of(examples)} == wanted
        assert elsewhere == 6 - 2 * len(wanted)


def test_responses_with_a_low_score_or_none_are_left_out_but_may_be_contexts():
    comments = [comment("low", "root", score=1), comment("high", "low", score=2),
                comment("none", "root"), comment("text", "root", score="high")]  # fmt: skip
    assert kept(Options(min_score=2), *comments) == ["high"]
    assert kept(Options(min_score=-5), *comments) == ["low", "high"]
    assert kept(Options(), *comments) == ["low", "high", "none", "text"]


def test_neither_side_of_an_example_is_a_bots_or_an_excluded_authors():
    names = [
        "AutoModerator",
        "nice_bot",
        "SomeBot2",
        "talbot",
        "robot",
        "[deleted]",
        "spammer",
        "ann",
    ]
    comments = [comment(f"c{n}", "root", author=name) for n, name in enumerate(names)]
    comments += [comment(f"r{n}", f"c{n}") for n in range(len(names))]

    def authors(**rules: Any) -> set[str]:
        ids = kept(Options(**rules), *comments)
        assert {name[1:] for name in ids if name[0] == "r"} == {
            name[1:] for name in ids if name[0] == "c"
        }
        return {names[int(name[1:])] for name in ids if name[0] == "c"}

    assert authors(bots="drop") == {"talbot", "robot", "[deleted]", "spammer", "ann"}
    assert authors(deleted_authors="drop") == {*names} - {"[deleted]"}
    assert authors(exclude_authors=("spammer", "ann")) == {*names} - {"spammer", "ann"}
    assert authors(exclude_authors=("SpammeR", "ANN", "nobody")) == {*names} - {"spammer", "ann"}


@pytest.mark.parametrize("privacy", [PLAIN, Privacy(redact=True, authors="hash", salt="s")])
@pytest.mark.parametrize("more", [{}, {"bots": "drop"}])
def test_a_context_begins_after_the_turn_of_an_excluded_author(privacy, more):
    chain = [
        comment(f"c{n}", f"c{n - 1}" if n else None, f"comment number {n}", author=author)
        for n, author in enumerate(["ann", "bob", "Some_Bot", "cat", "dan", "eve"])
    ]
    contexts = {
        layout: [
            (row["context"], row["response"])
            for row in examples_of(
                chain, Options(layout=layout, exclude_authors=("some_bot",), **more), privacy
            )[0]
        ]
        for layout in ("turns", "dialogue")
    }
    assert contexts["turns"] == [
        (["comment number 0"], "comment number 1"),
        (["comment number 3"], "comment number 4"),
        (["comment number 3", "comment number 4"], "comment number 5"),
    ]
    assert contexts["dialogue"] == [
        (["\n".join(context)], response) for context, response in contexts["turns"]
    ]
    rules = Options(exclude_authors=("some_bot",), **more).with_name_keys(privacy)
    _, rejects = build_examples(normalise(parsed(chain), rules, privacy)[0], rules)
    texts = {sample["reason"]: sample["text"] for sample in rejects.samples}
    assert texts["response by an excluded author"] == ""
    assert texts["context by an excluded author"] == "comment number 3"


def test_only_responses_in_the_languages_asked_for_are_used():
    pytest.importorskip("py3langid")
    comments = [comment("english", "root", "I think that this is a very good idea, thank you"),
                comment("german", "root", "Das ist eine sehr gute Idee, vielen Dank dafür"),
                comment("french", "german", "Je pense que c'est une très bonne idée, merci")]  # fmt: skip
    assert kept(Options(languages=("en",)), *comments) == ["english"]
    assert kept(Options(languages=("de", "fr")), *comments) == ["german", "french"]


def test_a_language_that_is_not_known_is_refused():
    pytest.importorskip("py3langid")
    with pytest.raises(BadInput, match=r"^reddit\.languages: 'klingon'; allowed: .*\ben, "):
        languages.check(("en", "klingon"))


SUBMISSION = {"id": "th", "title": "A title of it", "selftext": "and its text", "author": "ann",
              "subreddit": "sub", "created_utc": "1136073600"}  # fmt: skip


@pytest.mark.parametrize(
    ("selftext", "turn"),
    [
        ("and its text", "A title of it\nand its text"),
        ("", "A title of it"),
        ("[ Removed by Reddit ]", "A title of it"),
        (5, "A title of it"),
    ],
)
def test_a_submission_is_the_first_turn_of_its_thread(selftext, turn):
    rules = Options(submissions="first-turn")
    rejects = raw.Rejects()
    data = lines_of([{**SUBMISSION, "selftext": selftext}])
    assert kind_of(data) == "submissions"
    first = parse_submissions(data, "RS", 1, rejects)
    # A comment's id may be the thread's: the two are numbered apart.
    comments = parsed([comment("top"), comment("th", "top", "an answer to the top one")])
    tables = [normalise(table, rules, PLAIN)[0] for table in (first, comments)]
    examples, dropped = build_examples(pa.concat_tables(tables), rules)
    assert [(row["context"], row["context_author"]) for row in rows_of(examples)] == [
        ([turn], "ann"),
        ([turn, "a text that is long enough"], "author of top"),
    ]
    assert dropped.counts == {"submission (a first turn)": 1}
    assert not rejects.counts


@pytest.mark.parametrize(
    ("title", "selftext", "body"),
    [
        ("A title", "its text", "A title\nits text"),
        ("[deleted by user]", "its text", "its text"),
        ("[deleted by user]", "[removed]", "[deleted by user]"),  # which `normalise` drops
        ("A title", "[removed]", "A title"),
    ],
)
def test_a_notice_is_no_title_and_no_text_of_a_submission(title, selftext, body):
    data = lines_of([{**SUBMISSION, "title": title, "selftext": selftext}])
    assert parse_submissions(data, "RS", 1, raw.Rejects())["body"].to_pylist() == [body]


def test_rejected_comments_are_kept_to_look_at():
    table, *_ = normalise(parsed([comment("a"), comment("b", "a", "short")]), Options(), PLAIN)
    _, rejects = build_examples(table, Options())
    assert [(s["reason"], s["file"], s["text"]) for s in rejects.samples] == [
        ("answers no comment that is there", "th/a", "a text that is long enough"),
        ("response too short", "th/b", "short"),
    ]


# Lines


def reason_of(line: bytes) -> str:
    """What our parser says of a line among good ones."""
    rejects = raw.Rejects()
    good = [lines_of([comment("before")]), lines_of([comment("after")])]
    table = parse_comments(good[0] + line + b"\n" + good[1], "dump", 7, rejects)
    assert [table["id"][0].as_py(), table["id"][-1].as_py()] == ["before", "after"]
    if not rejects.counts:
        return ""
    assert table.num_rows == 2
    assert [sample["line"] for sample in rejects.samples] == [8]
    return rejects.samples[0]["reason"]


GOOD = json.dumps(comment("c")).encode()


@pytest.mark.parametrize(
    ("fields", "author", "score"),
    [
        ({"author": None, "score": 5.0}, "[deleted]", 5),
        ({"score": "-5"}, "author of d", -5),
        ({"score": "hidden"}, "author of d", None),
        ({"score": 5.5}, "author of d", None),
    ],
)
def test_fields_are_read_as_other_programs_write_them(fields, author, score):
    rejects = raw.Rejects()
    data = GOOD + b"\n" + json.dumps(comment("d", **fields)).encode() + b"\n"
    rows = parse_comments(data, "RC", 1, rejects).to_pylist()
    assert [(row["id"], row["author"], row["score"]) for row in rows[1:]] == [("d", author, score)]
    assert not rejects.counts


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b"rubbish", "not JSON"),
        (GOOD + GOOD, "not JSON"),
        (b"[1, 2]", "not a JSON object"),
        (b"[" * 100_000, "not JSON"),
        (GOOD.replace(b'"body"', b'"bodi"'), "no field body"),
        (json.dumps(comment("c", link_id=None)).encode(), "no field link_id"),
        (json.dumps(comment("c", body=5)).encode(), "field body is no string"),
        (json.dumps(comment("c", body="\ud83d half")).encode(), "field body is no text"),
        (GOOD.replace(b"enough", b"\xff\xfe"), "not UTF-8"),
        (raw.OVERLONG + GOOD, "line too long"),
    ],
)
def test_a_line_that_is_no_comment_is_set_aside_with_its_reason(line, reason):
    assert reason_of(line) == reason


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"  \t",
        GOOD,
        GOOD + b"\r",
        json.dumps(comment("0012", body="1e5 2011-01-01T00:00:00")).encode(),
        json.dumps(comment("c", edited={"a": [1, "x", None]}, score="?")).encode(),
        json.dumps(comment("c", body="a\u2028b\x85c\nd \U0001f600"), ensure_ascii=False).encode(),
    ],
)
def test_a_line_that_is_a_comment_or_blank_is_no_reject(line):
    assert reason_of(line) == ""


_values = st.one_of(st.text(), st.none(), st.integers(), st.booleans(), st.floats(), st.just([]))
_mostly_texts = st.one_of(st.text(), st.text(), st.text(), st.text(), _values)
_lines = st.one_of(
    st.fixed_dictionaries(
        {name: st.text() for name in comment("c")}, optional={"score": _values, "edited": _values}
    ),
    st.fixed_dictionaries({name: _mostly_texts for name in comment("c")}),
    st.dictionaries(st.sampled_from(list(comment("c"))), _mostly_texts),
    _values,
)


@given(st.lists(_lines), st.booleans())
@example([None], True)  # a block that begins so crashes pyarrow 25
def test_the_fast_parser_reads_what_a_plain_one_reads(values, ascii_only):
    lines = [json.dumps(value, ensure_ascii=ascii_only) for value in values]
    rejects = raw.Rejects()
    table = parse_comments("\n".join(lines).encode(errors="replace"), "dump", 1, rejects)

    def is_comment(value: Any) -> bool:
        return isinstance(value, dict) and all(
            isinstance(value.get(name), str) for name in comment("c")
        )

    good = [{name: value[name] for name in comment("c")} for value in values if is_comment(value)]
    assert [{name: row[name] for name in comment("c")} for row in table.to_pylist()] == good
    assert rejects.counts.total() == len(values) - len(good)


@st.composite
def _mutated(draw: st.DrawFn) -> bytes:
    """A dump of good lines in which bytes were lost, changed or put in."""
    data = bytearray(lines_of([comment(name, "a" if name != "a" else None) for name in "abcdef"]))
    for _ in range(draw(st.integers(0, 8))):
        at = draw(st.integers(0, len(data)))
        junk = draw(st.sampled_from([b"", b"\x00", b"\n", b"\r\n", b'"', b"}", b"{", b"\\", b"\xff",
                                     b"\\ud83d", b"null", b"[", b"\xef\xbb\xbf", b"\x1a"]))  # fmt: skip
        data[at : at + draw(st.integers(0, 30))] = junk
    return bytes(data)


@given(_mutated())
def test_whatever_happens_to_a_dump_every_line_is_counted_once(data):
    rejects = raw.Rejects()
    comments = parse_comments(data, "dump", 1, rejects)
    lines = [line for line in data.split(b"\n") if line.strip()]
    assert comments.num_rows + rejects.counts.total() == len(lines)
    table, elsewhere, _ = normalise(
        comments, Options(), Privacy(redact=True, authors="hash", salt="s")
    )
    examples, dropped = build_examples(table, Options())
    assert len(examples.responses) + dropped.counts.total() + elsewhere == comments.num_rows


# Privacy


def test_the_rules_look_at_a_text_as_it_was_written():
    comments = [
        comment("a", None, "u/somebody"),  # 10 characters, redacted 6
        comment("b", "a", "a@b.io " * 18 + "x"),  # 127 characters, redacted 145
    ]
    rows, _ = examples_of(comments, privacy=Privacy(redact=True, authors="hash", salt="s"))
    assert [(row["context"], row["response"]) for row in rows] == [
        (["<user>"], "<email> " * 18 + "x")
    ]


# The corpus


def test_the_blocks_of_a_dump_are_tasks_with_a_cost(sample_files, tmp_path, actors_in_process):
    files = [str(file) for file in sorted((sample_files / "reddit_dump").iterdir())]
    out = draft(str(tmp_path / "out"), "corpus", Options(), {})
    privacy = Privacy(redact=False, authors="plain", salt="")
    with report.collect_stages() as stages:
        records = reddit.prepare(out, files, Options(), raw.Reading(), privacy)
    (stage,) = (stage for stage in stages if stage.name == "reddit: dump files to threads")
    assert {task[:11] for task in stage.costs} == {f"block-{n:05d}" for n in range(len(files))}
    assert all(cost.host and cost.peak_memory_bytes for cost in stage.costs.values())
    lines = sum(record.counts.get("records", 0) for record in records)
    assert sum(cost.rows for cost in stage.costs.values()) == lines > 1000


def test_a_corpus_is_the_same_set_however_many_buckets_and_months_its_threads_fall_into(
    actors_in_process, sample_comments, tmp_path, monkeypatch
):
    """Half of the comments answer one of another month."""
    from jobs import prepare_corpus

    months = sample_comments[::2], sample_comments[1::2]
    for number, month in enumerate(months, 1):
        (tmp_path / f"RC_2011-0{number}").write_bytes(lines_of(month))
    monkeypatch.setattr(reddit, "_MIB", 200)
    config = prepare_corpus.Config(
        format="reddit",
        input=tuple(map(str, sorted(tmp_path.glob("RC_*")))),
        output=str(tmp_path / "out"),
        redact=False,
        authors="plain",
        reddit=Options(rows_per_shard=50),
    )
    summary = prepare_corpus.run(config)
    files = sorted((tmp_path / "out").glob("*/*.parquet"))
    assert len({file.name.split("-")[1] for file in files}) > 3
    tables = [pq.read_table(file, partitioning=None) for file in files]
    assert max(table.num_rows for table in tables) <= 50
    for file, table in zip(files, tables, strict=True):
        assert set(table["split"].to_pylist()) == {file.parent.name}
    rows = [row for table in tables for row in table.to_pylist()]
    assert as_examples(rows) == oracle([*months[0], *months[1]])
    assert summary["counts"]["examples"] == len(rows)
    assert summary["counts"]["records"] == len(sample_comments)
    assert summary["counts"]["files"] == 2
    assert sum(summary["dropped"].values()) == len(sample_comments) - len(rows)
