from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.corpora.formats.articles import split_sentences

# Sentences


@pytest.mark.parametrize(
    "parts",
    [
        ["One ends here.", "Another begins."],
        ["Is it so?", "It is!", "Good."],
        ["Dr. Smith met Mrs. Jones at St. Paul.", "They left."],
        ["J. R. R. Tolkien wrote it.", "He was English."],
        ["It cost approx. 5 dollars, cf. Fig. 3.", "Then it rose."],
        ["The U.S. Army came, e.g. Gen. Lee.", "It won."],
        ['He said "Go away."', '"No," she said.'],
        ["(It was so.)", "(Then it was not.)"],
        ["It is version 2.0 of it.", "9 more came."],
        ["no capital. so no end."],
        ["Wait... for it."],
        ["one"],
    ],
)
def test_sentences_end_before_a_capital_but_not_after_an_abbreviation(parts):
    assert split_sentences(" ".join(parts)) == parts


@given(st.text(st.sampled_from("aA1 .!?\"')]([\nDr")))
def test_sentences_are_the_text_without_a_character_lost(text):
    found = split_sentences(text)
    assert "".join("".join(found).split()) == "".join(text.split())
    assert all(part and part == part.strip() for part in found)


def test_a_list_of_initials_is_one_sentence_and_takes_no_square_of_the_time():
    text = "A. " * 200_000
    assert split_sentences(text) == [text.strip()]
