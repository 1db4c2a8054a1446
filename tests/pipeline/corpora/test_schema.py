from __future__ import annotations

import hashlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora.schema import hash_split, named_split, split_by_name_or_group


@pytest.mark.parametrize(
    ("split", "names"),
    [
        ("train", "train train.txt TRAIN train_self.txt train-00000-of-00003 training.csv trainset.tsv"),
        ("valid", "valid valid_both.txt validation val.json dev dev.csv devset Validation-1"),
        ("test", "test Test_both.txt test2 testing.csv testdata.jsonl"),
        (None, "validate developers.txt testimonials.csv trainer value.json latest my_train.txt"),
    ],
)  # fmt: skip
def test_a_name_is_the_split_that_its_first_word_says(split, names):
    assert {name: named_split(name) for name in names.split()} == dict.fromkeys(
        names.split(), split
    )


@given(st.text())
def test_what_names_no_split_is_cut_by_its_group_alone(group):
    assert split_by_name_or_group("lines.txt", group) == split_by_name_or_group("other.csv", group)
    assert split_by_name_or_group("test.txt", group) == "test"
    place = int(hashlib.md5(group.encode()).hexdigest(), 16) % 1000
    assert hash_split(group, (place, 1, 999 - place)) == "valid"


def test_shares_are_those_asked_for():
    found = Counter(hash_split(str(n), (700, 200, 100)) for n in range(20_000))
    for split, share in (("train", 0.7), ("valid", 0.2), ("test", 0.1)):
        assert abs(found[split] / 20_000 - share) < 0.015
