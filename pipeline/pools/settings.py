"""The settings of a pool that `jobs.embed_pool` makes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

from pipeline.config import NOT_IDENTITY, require
from pipeline.corpora.formats import tables
from pipeline.models.precision import Precision
from pipeline.pools.shard import KNOWN_CONTEXTS, ROWS
from pipeline.pools.vector_format import FILE_DTYPES, Dtype

TEXT, ID, CONTEXT = "embed.text_column", "embed.id_column", "embed.context_column"
FILTER = "embed.filter_columns"


@dataclass(frozen=True, kw_only=True)
class EmbedConfig(tables.TableFormat):
    """Which texts are embedded, and how they are divided into shards."""

    GROUP = "embed"
    text_column: str = "text"
    """Column with the candidate's text. Where the first file has no `text`, its only column that is called
    answer, response, positive, reply, completion, output or passage."""
    id_column: str = "id"
    """Column with the candidate's id, text or integer; empty: a hash of the text and of its filter
    columns is the id."""
    repeated_ids: Literal["stop", "first"] = field(default="stop", metadata=NOT_IDENTITY)
    """What to do with an id whose rows have different texts: stop, or keep its first row and count the
    others."""
    filter_columns: tuple[str, ...] = ()
    """Columns that searches can filter by. A text with other values in them is another candidate."""
    context_column: str = ""
    """Column with a context that the text answers, such as a FAQ's question: text, or a list of turns.
    Rows with the same text are one candidate, and its vector lies between its text's and its contexts':
    new contexts find it by both. For bi and convert; one process reads all files."""
    rows_per_shard: int = 16_384
    """Rows in a shard at most; a small pool has 16 shards. A killed job loses one shard per actor."""
    dtype: Dtype = "float32"
    """The stored type of a vector: float32, bfloat16, float16, or int8 with a scale for each vector."""
    precision: Precision = "auto"
    """The precision that the encoder computes in; auto: bf16 where the actors' hardware multiplies it. int8:
    layers of 8 bits, on CPUs without bf16 faster than float32.
    Vectors of another precision are not copied from the version before."""
    neighbours: bool = False
    """Make an index for approximate searches. It needs faiss-cpu, and a byte for six numbers."""
    batch_tokens: int = 0
    """Tokens in a batch at most, padding included; 0: as many as suit the device."""
    max_text_bytes: int = 1 << 20
    """Longer texts are set aside."""

    NOT_OF_VECTORS: ClassVar[tuple[str, ...]] = (
        "text_column", "encoding", "delimiter", "quotes", "id_column", "repeated_ids", "rows_per_shard",
        "batch_tokens", "max_text_bytes", "filter_columns", "neighbours",
        "precision",  # what it was on the hardware of then is in the manifest
    )  # fmt: skip
    """Settings that say which rows there are, or how they are filed. All others decide a vector: with another
    value of one, nothing is copied from earlier versions."""

    def __post_init__(self) -> None:
        super().__post_init__()
        require(self.dtype in FILE_DTYPES, "embed.dtype", self.dtype, ", ".join(FILE_DTYPES))
        require(bool(self.text_column), "embed.text_column", self.text_column, "a column's name")
        for column in self.filter_columns:
            reserved = (*ROWS.names, KNOWN_CONTEXTS)
            require(column not in ("", *reserved), "embed.filter_columns", column,
                    f"names of columns, but {', '.join(reserved)}")  # fmt: skip
        require(len(set(self.filter_columns)) == len(self.filter_columns), "embed.filter_columns",
                self.filter_columns, "each column once")  # fmt: skip
        require(self.batch_tokens >= 0, "embed.batch_tokens", self.batch_tokens, ">= 0")
        for name in ("rows_per_shard", "max_text_bytes"):
            require(getattr(self, name) >= 1, f"embed.{name}", getattr(self, name), ">= 1")

    @property
    def columns_by_option(self) -> dict[str, str]:
        """The columns that are read, by the option that names each."""
        columns = {TEXT: self.text_column, ID: self.id_column}
        columns |= {f"{FILTER}[{n}]": name for n, name in enumerate(self.filter_columns)}
        columns[CONTEXT] = self.context_column
        return {option: column for option, column in columns.items() if column}
