"""The options for reddit: which comments of a dump make an example, and the form of an example."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import pyarrow as pa

from pipeline.config import require
from pipeline.corpora.privacy import Privacy


@dataclass(frozen=True, kw_only=True)
class Options:
    """The rules. The defaults are PolyAI's. Notices that a comment was removed are as "[deleted]"."""

    layout: Literal["turns", "dialogue"] = "turns"
    """`turns`: PolyAI's layout; each earlier comment is a turn, also a deleted one. `dialogue`: the
    Poly-encoder's layout; the context is one text, with its turns joined by line breaks, after the last
    deleted one."""
    submissions: Literal["off", "first-turn"] = "off"
    """`first-turn`: title and text of a submission (RS_* files in the input) are the first turn of its
    thread."""
    max_characters: int = 127
    """Longer texts are truncated at the end of a word, and make no example."""
    min_characters: int = 9
    """Shorter texts make no example."""
    max_tokens: int = 0
    """Texts with more words and punctuation marks make no example; 0: no bound."""
    min_tokens: int = 0
    """Texts with fewer words and punctuation marks make no example."""
    max_context_turns: int = 10
    """Number of earlier comments in a context, the immediate one included."""
    subreddits: tuple[str, ...] = ()
    """Use only these subreddits; none named: all. For a profile, such as u_Name, the hash of its author
    is stored."""
    exclude_subreddits: tuple[str, ...] = ()
    """Leave these subreddits out. Profiles are stored as for `subreddits`."""
    languages: tuple[str, ...] = ()
    """Use only responses in these languages (ISO 639-1: en, de, …); none named: all. Needs the extra
    `language`."""
    min_score: int | None = None
    """Comments with a lower score, or without a score, are no response; null: no bound."""
    bots: Literal["keep", "drop"] = "keep"
    """Keep or drop texts of well-known bots, and of names that end in "Bot", "_bot" or "-bot"."""
    deleted_authors: Literal["keep", "drop"] = "keep"
    """Keep or drop texts of people who have left since."""
    exclude_authors: tuple[str, ...] = ()
    """Leave out the texts of these people; upper and lower case are the same. Only hashes of the names
    are stored."""
    train_share: float = 0.9
    """Share of the threads in `train`; the rest is `test`."""
    rows_per_shard: int = 250_000
    """Examples in one Parquet file at most."""
    bucket_mib: int = 32
    """Threads are processed in buckets of this many MiB of compressed dump; 32 needs 0.7 GB of memory."""

    def with_name_keys(self, privacy: Privacy) -> Options:
        """The rules with authors and profiles as the corpus, its manifest and its tasks may know them."""

        def profiles_keyed(subreddits: tuple[str, ...]) -> tuple[str, ...]:
            keys = privacy.subreddit_keys(pa.array(subreddits, pa.string())).to_pylist()
            # Others stay as they are written: they are part of the corpus's identity.
            return tuple(
                name if key == name.lower() else key
                for name, key in zip(subreddits, keys, strict=True)
            )

        keys = privacy.author_keys(pa.array(self.exclude_authors, pa.string())).to_pylist()
        return replace(
            self,
            exclude_authors=tuple(sorted(set(keys))),
            subreddits=profiles_keyed(self.subreddits),
            exclude_subreddits=profiles_keyed(self.exclude_subreddits),
        )

    def __post_init__(self) -> None:
        for name, least in (("max_characters", 1), ("max_context_turns", 1), ("rows_per_shard", 1),
                            ("bucket_mib", 1), ("max_tokens", 0)):  # fmt: skip
            require(
                getattr(self, name) >= least, f"reddit.{name}", getattr(self, name), f">= {least}"
            )
        require(0 <= self.min_characters <= self.max_characters, "reddit.min_characters",
                self.min_characters, "0 to reddit.max_characters")  # fmt: skip
        require(0 <= self.min_tokens <= (self.max_tokens or self.min_tokens), "reddit.min_tokens",
                self.min_tokens, "0 to reddit.max_tokens")  # fmt: skip
        require(0 < self.train_share <= 1, "reddit.train_share", self.train_share, "above 0, to 1")
