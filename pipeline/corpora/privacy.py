"""Privacy of the people in a corpus: tags replace personal data, hashes replace names."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

NOT_REDACTED = (
    "texts are kept as they are; --redact true replaces e-mail addresses and phone numbers by tags"
)

Authors = Literal["hash", "plain"]


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """How personal data is removed from a corpus."""

    redact: bool
    authors: Authors
    salt: str

    def redacted_and_counted(self, texts: pa.Array) -> tuple[pa.Array, int]:
        """(the texts, how many of them have changed)"""
        if not self.redact:
            return texts, 0
        redacted = redact(texts)
        return redacted, pc.sum(pc.not_equal(texts, redacted)).as_py() or 0

    def hashed(self, names: pa.Array) -> pa.Array:
        return hash_names(names, self.salt) if self.authors == "hash" else names

    def author_keys(self, names: pa.Array) -> pa.Array:
        """The keys by which authors are compared: their names in lower case, because Ann and ann are one
        author for Reddit, and hashed, so that a list of them can be stored."""
        return self.hashed(pc.utf8_lower(names))

    def subreddit_keys(self, subreddits: pa.Array) -> pa.Array:
        """The keys by which subreddits are compared: names in lower case; for a profile, the key of its
        author."""
        return self.profiles_hashed(pc.utf8_lower(subreddits))

    def profiles_hashed(self, subreddits: pa.Array) -> pa.Array:
        """The subreddits, with the hash of the author in the names of profiles: u_<author> becomes
        u_<hash>."""
        if self.authors == "plain":
            return subreddits
        names = pc.replace_substring_regex(subreddits, _PROFILE, "")
        hashed = pc.binary_join_element_wise("u_", hash_names(names, self.salt), "")
        return pc.if_else(pc.match_substring_regex(subreddits, _PROFILE), hashed, subreddits)

    def redacted_lines(self, lines: pa.Array) -> pa.Array:
        """Lines of JSON, which may be broken, with redacted texts and without names of authors."""
        if self.authors == "hash":
            for pattern, tag in _NAMES_IN_JSON:
                lines = pc.replace_substring_regex(lines, pattern, tag)
        return redact(lines) if self.redact else lines


REDACTION_RULES = "3"
"""Counts up when `redact` changes, so that pools are made again."""

# Reddit's Markdown writes John\_Doe; in a line of JSON two backslashes stand for that one.
_NAME = r"(?:\\{0,2}_|[A-Za-z0-9-]){3,20}"
_EXTENSION = r"(?:[.-]\d+)*(?:,? ?(?i:extension|ext\.?|x) ?\d{1,6}\b)?"

# RE2 syntax. They find the common written forms and no more: a name in running text, a spelt-out
# number or an address in prose stays. A false hit costs a word of one text.
_TAGS = (
    (r"[A-Za-z0-9._%+-]+@[A-Za-z0-9-]+(\.[A-Za-z0-9-]+)*\.[A-Za-z]{2,}", "<email>"),
    (rf"(reddit\.com/)(?:u|user)/{_NAME}", r"\1<user>"),
    (rf"(^|[^A-Za-z0-9_/.])(?:/user|/?[uU])/{_NAME}", r"\1<user>"),
    (rf"(\b[rR]/[uU])\\{{0,2}}_{_NAME}", r"\1_<user>"),
    (r"\b(25[0-5]|2[0-4]\d|1?\d?\d)(\.(25[0-5]|2[0-4]\d|1?\d?\d)){3}\b", "<ip>"),
    (r"(?i)\b(?:[0-9a-f]{1,4}:){7}[0-9a-f]{1,4}\b", "<ip>"),
    (
        r"(?i)\b(?:fe80|fc00|(?:[0-9a-f]{1,4}:){1,6}[0-9a-f]{1,4})::(?:[0-9a-f]{1,4}:){0,5}[0-9a-f]{1,4}\b",
        "<ip>",
    ),
    # A number is redacted as a whole: with the country's code before it, and an extension behind it.
    (rf"\+\d(?:[ .()/-]{{0,2}}\d){{7,}}\b{_EXTENSION}", "<phone>"),
    (
        rf"(?:\b(?:\d+[.-])*\d{{1,3}}[ .-]?)?\(\d{{2,4}}\)[ .-]?\d{{3}}[ .-]\d{{4}}\b{_EXTENSION}",
        "<phone>",
    ),
    (rf"\b(?:\d+[.-])*(?:\d{{1,3}} )?\d{{3}}[ .-]\d{{3}}[ .-]\d{{4}}\b{_EXTENSION}", "<phone>"),
)


_ANY = "|".join(f"(?:{pattern})" for pattern, _ in _TAGS)

_PROFILE = r"^[uU]_"
_AUTHOR = r"""("[A-Za-z_]*author[A-Za-z_]*"\s*:\s*)"""  # "author_fullname", too
_REST_OF_STRING = r"""(?:[^"\\]|\\.)*(?:"|$)"""  # a value may be cut off at the end
_FLAT = rf"""[^\[\]{{}}"]|"{_REST_OF_STRING}"""
_NESTED_ONCE = rf"[\[{{](?:{_FLAT})*(?:[\]}}]|$)"
_NESTED = rf"[\[{{](?:{_FLAT}|{_NESTED_ONCE})*(?:[\]}}]|$)"
# Values of authors' fields, and profiles, also in links. RE2 counts no brackets, so what stands deeper than
# twice in an author's field is dropped with the rest of the line.
_NAMES_IN_JSON = (
    (_AUTHOR + _NESTED, r'\1"<user>"'),
    (rf"{_AUTHOR}[\[{{].*", r'\1"<user>"'),
    (rf'{_AUTHOR}"{_REST_OF_STRING}', r'\1"<user>"'),
    (
        rf"""("(?:subreddit|name|display_name)"\s*:\s*)"[uU]_{_REST_OF_STRING}""",
        r'\1"u_<user>"',
    ),
    (r"(/r/[uU]_|/user/)[A-Za-z0-9_-]+", r"\1<user>"),
)


def redact(texts: pa.Array) -> pa.Array:
    """Replaces e-mail addresses, u/names, IP addresses and phone numbers by tags.

    One search for all of them finds the few texts that have any: 0.4 to 0.5 µs for a comment of Reddit, where
    ten replacements in every text took 2.4 to 3.2.
    """
    has_any = pc.match_substring_regex(texts, _ANY)
    redacted = texts.filter(has_any)
    for pattern, tag in _TAGS:
        redacted = pc.replace_substring_regex(redacted, pattern, tag)
    return pc.replace_with_mask(texts, has_any, redacted)


def hash_names(names: pa.Array, salt: str) -> pa.Array:
    """Each distinct name as 16 hex digits of a keyed hash; "[deleted]" stays what it is."""
    encoded = names.dictionary_encode()
    key = hashlib.sha256(salt.encode()).digest()
    hashed = [
        name
        if name == "[deleted]"
        else hashlib.blake2b(name.encode(), key=key, digest_size=8).hexdigest()
        for name in encoded.dictionary.to_pylist()
    ]
    return pa.array(hashed, pa.string()).take(encoded.indices)
