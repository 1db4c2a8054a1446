from __future__ import annotations

import json

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.corpora import privacy
from pipeline.corpora.file_tasks import redact_rows
from pipeline.corpora.privacy import Privacy, hash_names, redact


def redacted(*texts: str) -> list[str]:
    return redact(pa.array(texts, pa.string())).to_pylist()


def hashed(names: list[str], salt: str = "salt") -> list[str]:
    return hash_names(pa.array(names, pa.string()), salt).to_pylist()


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("mail jo.doe+x@mail.example.co.uk now", "mail <email> now"),
        ("ask u/some_one-1 or /u/Other", "ask <user> or <user>"),
        ("u/abc u/def\nu/ghi", "<user> <user>\n<user>"),
        (r"u/John\_Doe, /u/a\_b\_c", "<user>, <user>"),
        ("see /user/Jo_9 or r/u_Jo_9, /r/U_Jo_9/x", "see <user> or r/u_<user>, /r/U_<user>/x"),
        ("reddit.com/user/Jo_9 reddit.com/r/u_Jo_9", "reddit.com/<user> reddit.com/r/u_<user>"),
        ("from 192.168.0.254 today", "from <ip> today"),
        ("at 2001:db8:0:0:0:0:2:1, or 2001:db8::2:1.", "at <ip>, or <ip>."),
        ("fe80::1 is mine", "<ip> is mine"),
        ("call +1 555-123-4567", "call <phone>"),
        ("+44 20 7946 0958!", "<phone>!"),
        ("1 555 123 4567 or 1.555.123.4567", "<phone> or <phone>"),
        ("1 (555) 123-4567, 1-(555)-123-4567, 1(555)123-4567", "<phone>, <phone>, <phone>"),
        ("555-123-4567 x89 or 555-123-4567, Ext. 12!", "<phone> or <phone>!"),
        ("555-123-4567-8901", "<phone>"),
        ("+33 6 12 34 56 78; +49 171 12 34 56 78; +49(0)30/1234567", "<phone>; <phone>; <phone>"),
        ("(+1) 555-123-4567", "(<phone>"),
    ],
)
def test_what_identifies_somebody_becomes_a_tag(text, expected):
    assert redacted(text) == [expected]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "see r/python",
        "meet @ 5",
        "version 1.2.3",
        "300.1.2.400",
        "at 12:30:45",
        "std::vector<abc::def> a::b",
        "it cost 1,234,567.89",
        "in /home/user/notes and r/umbrellas",
    ],
)
def test_other_text_stays_as_it_is(text):
    assert redacted(text) == [text]


@given(st.lists(st.text()))
def test_redacting_twice_is_redacting_once(texts):
    once = redacted(*texts)
    assert len(once) == len(texts)
    assert redacted(*once) == once


def test_a_name_has_one_hash_for_a_salt_and_another_for_another():
    one, two = hashed(["ann", "bob", "ann"]), hashed(["ann", "bob"], "pepper")
    assert one[0] == one[2] != one[1]
    assert not set(one) & set(two)
    assert hashed(["bob"]) == [one[1]]
    assert all(len(name) == 16 and int(name, 16) >= 0 for name in one)
    assert hashed(["[deleted]", "ann"])[0] == "[deleted]"


@given(st.lists(st.text(), unique=True))
def test_different_names_have_different_hashes(names):
    assert len(set(hashed(names))) == len(names)


HASH = Privacy(redact=True, authors="hash", salt="salt")
PLAIN = Privacy(redact=False, authors="plain", salt="")


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('{"author":"Jo_9","id":"a"}', '{"author":"<user>","id":"a"}'),
        ('{"id": 1, "author" : "Jo \\" x", "b": 2}', '{"id": 1, "author" : "<user>", "b": 2}'),
        ('{"author":["Jo","Al"],"id":"a"}', '{"author":"<user>","id":"a"}'),
        ('{"author":{"name":"Jo"},"id":"a"}', '{"author":"<user>","id":"a"}'),
        ('{"author":["Jo","A', '{"author":"<user>"'),
        ('{"author":{"of":{"name":"Jo"},"and":["Al"]},"id":"a"}', '{"author":"<user>","id":"a"}'),
        ('{"author":{"of":{"name":"Jo"},"and":["A', '{"author":"<user>"'),
        ('{"author":["J]o","A}l"],"id":"a"}', '{"author":"<user>","id":"a"}'),
        ('{"id":"a","author":[[["Jo"]]],"b":"c"}', '{"id":"a","author":"<user>"'),
        (r'{"body":"u/John\\_Doe"}', '{"body":"<user>"}'),
        ('{"author_fullname":"t2_x"}', '{"author_fullname":"<user>"}'),
        ('{"body":"hi","author":"Jo_', '{"body":"hi","author":"<user>"'),
        ('{"subreddit":"u_Jo_9","author":null}', '{"subreddit":"u_<user>","author":null}'),
        ('{"permalink":"/r/u_Jo_9/comments/"}', '{"permalink":"/r/u_<user>/comments/"}'),
        ('{"subreddit":"U_Jo_9","author":null}', '{"subreddit":"u_<user>","author":null}'),
        ('{"permalink":"/r/U_Jo_9/comments/"}', '{"permalink":"/r/U_<user>/comments/"}'),
        ('{"subreddit":"umbrellas","body":"the author"}', '{"subreddit":"umbrellas","body":"the author"}'),
    ],
)  # fmt: skip
def test_lines_as_they_were_read_name_no_author(line, expected):
    lines = pa.array([line, "mail a@b.io"])
    assert HASH.redacted_lines(lines).to_pylist() == [expected, "mail <email>"]
    assert PLAIN.redacted_lines(lines).to_pylist() == lines.to_pylist()


_names = st.text('"\\\\[]{}:, x').map(lambda text: f"Zaphod{text}")


@settings(max_examples=12)
@given(
    st.recursive(_names, lambda inner: st.lists(inner) | st.dictionaries(_names, inner)),
    st.integers(0, 60),
)
def test_no_author_of_any_shape_is_left_in_a_line_whole_or_cut_off(author, cut):
    line = json.dumps({"id": "a", "author": author, "score": 1})
    for given_line in (line, line[: len(line) - cut]):
        (left,) = HASH.redacted_lines(pa.array([given_line])).to_pylist()
        assert "Zaphod" not in left and left.startswith(given_line[:10])


def test_a_profile_has_the_hash_of_its_author():
    subreddits = pa.array(["u_Jo_9", "umbrellas", "U_other"])
    found = HASH.profiles_hashed(subreddits).to_pylist()
    assert found == [f"u_{hashed(['Jo_9'])[0]}", "umbrellas", f"u_{hashed(['other'])[0]}"]
    assert PLAIN.profiles_hashed(subreddits) == subreddits


def test_redacted_texts_are_counted():
    rows = pa.table(
        {
            "context": [["a@b.io", "x"], ["y"], None],
            "response": ["call 1-555-123-4567", "z", None],
            "candidates": pa.nulls(3, pa.list_(pa.string())),
        }
    )
    found, counts = redact_rows(rows, HASH)
    assert found["response"].to_pylist() == ["call <phone>", "z", None]
    assert counts == {"texts.redacted": 2}
    assert redact_rows(rows, PLAIN) == (rows, {})
    assert redact_rows(found, HASH) == (found, {})


_PIECES = [
    "me@example.org", " /u/Ann_B", "u/x", "reddit.com/user/abc", "r/u_abc", "10.0.0.1", "1.2.3", "fe80::1",
    "::", "a:b:c:d:1:2:3:4", "+49 30 1234567", "(030) 123-4567", "555 123 4567", "x12", " ext. 5", "@",
    "<email>", " text ", "ü", ".", "7", "\\\\_",
]  # fmt: skip


@given(
    st.lists(st.none() | st.lists(st.sampled_from(_PIECES), max_size=6).map("".join), max_size=8)
)
def test_texts_are_those_of_every_rule_after_the_other(texts):
    expected = pa.array(texts, pa.string())
    for pattern, tag in privacy._TAGS:
        expected = pc.replace_substring_regex(expected, pattern, tag)
    assert redact(pa.array(texts, pa.string())).equals(expected)
