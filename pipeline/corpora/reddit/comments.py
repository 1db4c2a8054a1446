"""Turns raw fields into the columns of threads, and applies each rule on a single comment."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import Bools
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit import notices
from pipeline.corpora.reddit.options import Options

# Reasons why a comment makes no example. Of several reasons, for the context or for the response, the
# first in this order is counted; of a comment's own, "by an excluded author" comes right after "deleted".
RULED_OUT = (
    "",
    "deleted",
    "by a bot",
    "by someone who left",
    "by an excluded author",
    "too long",
    "too short",
    "scored too low",
)
DELETED = RULED_OUT.index("deleted")
BY_EXCLUDED_AUTHOR = RULED_OUT.index("by an excluded author")  # it ends contexts, too
SCORED_TOO_LOW = RULED_OUT.index("scored too low")  # as a context it is none the worse

COLUMNS = pa.schema(
    [
        ("thread", pa.string()),
        ("id", pa.string()),
        # The id of the comment that this one answers; of a submission it is "".
        ("parent", pa.string()),
        # Cut to the most characters, redacted.
        ("body", pa.string()),
        # The place in RULED_OUT; 0: nothing rules it out.
        ("ruled_out", pa.int8()),
        ("author", pa.string()),
        ("subreddit", pa.string()),
    ]
)

_DELETED = pa.array(["[deleted]", "[removed]"])  # as names of authors
_TOKEN = r"\w+|[^\w\s]"
# Well-known bots whose names do not end like a bot's.
_BOTS = pa.array(["automoderator", "autotldr", "gifreversingbot", "image_linker_bot", "imgurtranscriber",
                  "reddit-pipeline", "remindmebot", "sneakpeekbot", "totesmessenger",
                  "transcribot", "tweetposter", "videolinkbot", "wikitextbot"])  # fmt: skip
_BOT_NAME = r"(?:[a-z0-9]Bot|BOT|[_-][Bb]ot)[0-9]*$"


def normalise(comments: pa.Table, options: Options, privacy: Privacy) -> tuple[pa.Table, int, int]:
    """(`lines.COMMENT` and `score` as `COLUMNS`, the number of rows of subreddits not asked for, the number
    of texts redacted)

    Excluded authors and profiles are given by their keys (`Options.with_name_keys`).
    The rules look at the text as it was written; redaction comes after them.
    """
    row_count = comments.num_rows
    comments = _select_subreddits(comments, options, privacy)
    body = comments["body"].combine_chunks()
    author = comments["author"].combine_chunks()
    # Submissions keep their prefix, t3_: their ids and those of comments are numbered apart.
    prefix = r"^t[0-9]_" if options.submissions == "off" else r"^t1_"
    redacted, redacted_count = privacy.redacted_and_counted(body)
    columns = {
        "thread": pc.replace_substring_regex(comments["link_id"], r"^t[0-9]_", ""),
        "id": comments["id"],
        "parent": pc.replace_substring_regex(comments["parent_id"], prefix, ""),
        "body": _trim_long(redacted, pc.utf8_length(body), options.max_characters),
        "ruled_out": pa.array(_reason_codes(comments, options, privacy), pa.int8()),
        "author": privacy.hashed(author),
        "subreddit": privacy.profiles_hashed(comments["subreddit"].combine_chunks()),
    }
    table = pa.table(columns, schema=COLUMNS).combine_chunks()
    return table, row_count - comments.num_rows, redacted_count


def trim(text: str, max_characters: int) -> str:
    """Truncates a text to at most `max_characters`, at the edge of a word."""
    if len(text) <= max_characters:
        return text
    end = max_characters + 1
    while end > 1 and text[end - 1].isalnum() == text[end - 2].isalnum():
        end -= 1
    return text[: end - 1]


def _select_subreddits(comments: pa.Table, options: Options, privacy: Privacy) -> pa.Table:
    for names, keeps_listed in ((options.subreddits, True), (options.exclude_subreddits, False)):
        if names:
            listed_names = pa.array([name.lower() for name in names])
            keys = privacy.subreddit_keys(comments["subreddit"].combine_chunks())
            is_kept = pc.equal(pc.is_in(keys, listed_names), keeps_listed)
            comments = comments.filter(is_kept).combine_chunks()
    return comments


def _reason_codes(
    comments: pa.Table, options: Options, privacy: Privacy
) -> np.ndarray[tuple[int], np.dtype[np.int8]]:
    body, author = comments["body"].combine_chunks(), comments["author"].combine_chunks()
    length = pc.utf8_length(body)
    masks = {
        "too short": pc.less(length, options.min_characters),
        "too long": pc.greater(length, options.max_characters),
        "deleted": notices.is_notice(body),
    }
    if options.min_tokens or options.max_tokens:
        tokens = pc.count_substring_regex(body, _TOKEN)
        masks["too short"] = pc.or_(masks["too short"], pc.less(tokens, options.min_tokens))
        if options.max_tokens:
            masks["too long"] = pc.or_(masks["too long"], pc.greater(tokens, options.max_tokens))
    if options.min_score is not None:
        is_low = pc.less(comments["score"].combine_chunks(), options.min_score)
        masks["scored too low"] = pc.fill_null(is_low, True)
    if options.bots == "drop":
        is_known_bot = pc.is_in(pc.utf8_lower(author), _BOTS)
        masks["by a bot"] = pc.or_(is_known_bot, pc.match_substring_regex(author, _BOT_NAME))
    if options.deleted_authors == "drop":
        masks["by someone who left"] = pc.is_in(author, _DELETED)
    codes = np.zeros(comments.num_rows, np.int8)
    for code, name in reversed(list(enumerate(RULED_OUT))):
        if name in masks:
            codes[_mask(masks[name])] = code
    if options.exclude_authors:
        is_excluded = pc.is_in(privacy.author_keys(author), pa.array(options.exclude_authors))
        codes[_mask(is_excluded) & (codes != DELETED)] = BY_EXCLUDED_AUTHOR
    return codes


def _trim_long(body: pa.Array, length: pa.Array, max_characters: int) -> pa.Array:
    """`length`: of the texts as they were written."""
    is_long = pc.greater(length, max_characters)
    rows = np.flatnonzero(_mask(is_long))
    if not len(rows):
        return body
    trimmed = [trim(text, max_characters) for text in body.take(pa.array(rows)).to_pylist()]
    return pc.replace_with_mask(body, is_long, pa.array(trimmed, pa.string()))


def _mask(values: pa.Array) -> Bools:
    return np.asarray(values.to_numpy(zero_copy_only=False), bool)
