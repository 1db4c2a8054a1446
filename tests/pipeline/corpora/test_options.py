"""Options outside their range are refused, with the option's name, its value and what is allowed."""

from __future__ import annotations

import re

import pytest

from pipeline.config import BadInput
from pipeline.corpora import raw, reddit
from pipeline.corpora.dedup import decontaminate
from pipeline.corpora.dedup import options as dedup
from pipeline.corpora.formats import amazonqa, intents, opensubtitles, pairs, starspace, wikipedia


@pytest.mark.parametrize(
    ("kind", "options", "field", "allowed"),
    [
        (raw.Reading, {"max_malformed_share": -0.01}, "reading.max_malformed_share", "0 to 1"),
        (raw.Reading, {"max_malformed_share": float("nan")}, "reading.max_malformed_share", "0 to 1"),
        (reddit.Options, {"max_characters": 0}, "reddit.max_characters", ">= 1"),
        (reddit.Options, {"min_characters": 128}, "reddit.min_characters", "0 to reddit.max_c"),
        (reddit.Options, {"bucket_mib": 0}, "reddit.bucket_mib", ">= 1"),
        (reddit.Options, {"max_tokens": -1}, "reddit.max_tokens", ">= 0"),
        (reddit.Options, {"max_tokens": 5, "min_tokens": 6}, "reddit.min_tokens", "0 to reddit.max_t"),
        (reddit.Options, {"min_tokens": -1}, "reddit.min_tokens", "0 to reddit.max_tokens"),
        (reddit.Options, {"train_share": 0}, "reddit.train_share", "above 0, to 1"),
        (reddit.Options, {"train_share": 1.1}, "reddit.train_share", "above 0, to 1"),
        (amazonqa.Options, {"min_words": 0}, "amazonqa.min_words", ">= 1"),
        (amazonqa.Options, {"max_words": 3}, "amazonqa.max_words", ">= amazonqa.min_words"),
        (amazonqa.Options, {"train_share": 1.1}, "amazonqa.train_share", "above 0, to 1"),
        (intents.Options, {"valid_share": 1.0}, "banking77.valid_share", "0 to below 1"),
        (opensubtitles.Options, {"max_characters": 8}, "opensubtitles.max_characters", ">= open"),
        (opensubtitles.Options, {"earlier_lines": -1}, "opensubtitles.earlier_lines", ">= 0"),
        (opensubtitles.Options, {"train_share": 0}, "opensubtitles.train_share", "above 0, to 1"),
        (pairs.Options, {"context_column": ""}, "pairs.context_column", "a column"),
        (pairs.Options, {"label_column": "y"}, "pairs.label_column", "none without"),
        (pairs.Options, {"shares": (0.5, 0.5, 0.5)}, "pairs.shares", "three shares"),
        (pairs.Options, {"shares": (1.1, -0.1, 0)}, "pairs.shares", "three shares"),
        (pairs.Options, {"shares": (0.9995, 0.0005, 0)}, "pairs.shares", "three shares, thousandths at"),
        (starspace.Options, {"queries": 0}, "starspace.queries", ">= 1"),
        (starspace.Options, {"others": -1}, "starspace.others", ">= 0"),
        (wikipedia.Options, {"min_words": 0}, "wikipedia.min_words", ">= 1"),
        (wikipedia.Options, {"max_article_characters": 0}, "wikipedia.max_article_characters", ">= 1"),
        (dedup.Options, {"drop_from": ()}, "dedup.drop_from", "one split at least"),
        (dedup.Options, {"shingle": 0}, "dedup.shingle", ">= 1"),
        (dedup.Options, {"bands": 0}, "dedup.bands", ">= 1"),
        (dedup.Options, {"rows_per_band": -1}, "dedup.rows_per_band", ">= 1"),
        (dedup.Options, {"threshold": 0.0}, "dedup.threshold", "above 0, to 1"),
        (dedup.Options, {"threshold": 1.5}, "dedup.threshold", "above 0, to 1"),
        (decontaminate.Options, {"ngram_words": 0}, "decontaminate.ngram_words", ">= 1"),
        (decontaminate.Options, {"min_words": 14}, "decontaminate.min_words", "1 to decontaminate.n"),
        (decontaminate.Options, {"boilerplate_groups": -1}, "decontaminate.boilerplate_groups", ">= 0"),
    ],
)  # fmt: skip
def test_an_option_outside_its_range_is_refused(kind, options, field, allowed):
    value = re.escape(repr(options[field.rpartition(".")[2]]))
    with pytest.raises(BadInput, match=f"^{field}: {value} is not allowed; allowed: {allowed}"):
        kind(**options)
