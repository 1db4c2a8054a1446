"""Evaluation sets, which must share no words with train: own splits, other corpora, files of texts."""

from __future__ import annotations

import functools
import itertools
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from pipeline import storage
from pipeline.artifact import MANIFEST, Artifact, open_artifact
from pipeline.config import BadInput
from pipeline.corpora import file_kinds, raw
from pipeline.corpora.dedup import hashing
from pipeline.corpora.dedup.examples import read_pieces, sides
from pipeline.corpora.dedup.hashing import Hashes, Tokens
from pipeline.corpora.schema import Split
from pipeline.storage import fingerprints

ComparedText = Literal["example", "response"]
"""All turns and the response of an example, or the response alone."""
_HELD_OUT: tuple[Split, ...] = ("valid", "test")
_LINES = 10_000
_JSON = re.compile(r'\s*(?:\[\s*)?\{\s*"\w')


@dataclass(frozen=True)
class EvaluationSet:
    """Texts that train must not share."""

    name: str
    """Its name in drop reasons."""
    files: tuple[str, ...]
    uri: str = ""
    """"": the corpus's own split."""


def own_sets(corpus: Artifact) -> list[EvaluationSet]:
    """The valid and the test split of a corpus, as far as it has them."""
    files = {split: tuple(corpus.files(f"{split}/", ".parquet")) for split in _HELD_OUT}
    return [EvaluationSet(split, paths) for split, paths in files.items() if paths]


def open_set(uri: str) -> tuple[EvaluationSet, Artifact | dict[str, Any]]:
    """The set at a URI and its lineage entry: a corpus's valid and test splits, or all texts of files.

    Raises BadInput for a URI that is not there, and for a corpus with train alone.
    """
    uri = uri.rstrip("/")
    if storage.exists(storage.join(uri, MANIFEST)):
        corpus = open_artifact(uri, "corpus")
        files = [file for split in own_sets(corpus) for file in split.files]
        if not files:
            raise BadInput(f"--evaluation {uri}: a corpus without a valid or test split; "
                           f"{storage.join(uri, 'train')} would be all its examples")  # fmt: skip
        return EvaluationSet(storage.name_of(uri), tuple(files), uri), corpus
    files = storage.expand([uri], "evaluation")
    reference = {"uri": uri, "kind": "raw", "fingerprint": fingerprints.raw_fingerprint(files)}
    return EvaluationSet(storage.name_of(uri), tuple(files), uri), reference


def set_names(sets: Sequence[EvaluationSet]) -> list[str]:
    """The sets' names in drop reasons."""
    names = [evaluation.name for evaluation in sets]
    return [
        name if names.count(name) == 1 else evaluation.uri or name
        for name, evaluation in zip(names, sets, strict=True)
    ]


def compared_words(rows: pa.Table, compared_text: ComparedText) -> Tokens:
    """The words of each example."""
    return functools.reduce(hashing.concatenate, sides(rows, compared_text, hashing.words))


def read_texts(uri: str, compared_text: ComparedText) -> Iterator[tuple[pa.Array, Hashes, Tokens]]:
    """(ids, hashes of groups, words) of the texts of a file, some at a time."""
    if not uri.endswith(".parquet"):
        lines = _text_lines(uri)
        while batch := list(itertools.islice(lines, _LINES)):
            ids = _ids(uri, (number for number, _ in batch))
            words = hashing.words(pa.array([text for _, text in batch]))
            yield ids, hashing.text_hashes(ids), words
        return
    texts, name_columns = _text_and_name_columns(uri, compared_text)
    for numbers, read_rows in read_pieces(uri, texts + name_columns):
        rows = _with_plain_types(read_rows)
        names = {name: rows[name].chunk(0) for name in name_columns}
        ids = names["example_id"] if "example_id" in names else _ids(uri, numbers + 1)
        if texts == ["text"]:
            words = hashing.words(rows["text"].chunk(0))
        else:
            words = compared_words(rows, compared_text)
        yield ids, hashing.text_hashes(names.get("group_id", ids)), words


def _text_lines(uri: str) -> Iterator[tuple[int, str]]:
    """The lines of a file of texts. Raises BadInput for a table, whose marks would be words of its texts."""
    lines = raw.read_lines(uri, raw.Reading())
    first = list(itertools.islice(lines, 1))
    if file_kinds.named_table(raw.plain_name(uri)) or any(_JSON.match(line) for _, line in first):
        raise BadInput(f"--evaluation {uri}: a table or JSON; allowed: a text in each line, Parquet with the "
                       "columns context (a list) and response, or text, or a corpus")  # fmt: skip
    return itertools.chain(first, lines)


def _text_and_name_columns(uri: str, compared_text: ComparedText) -> tuple[list[str], list[str]]:
    """(the columns with texts, those with names) of a Parquet file."""
    with storage.open_input(uri) as stream:
        try:
            schema = pq.ParquetFile(stream).schema_arrow
        except pa.ArrowInvalid as error:
            raise BadInput(f"{uri}: no Parquet file ({error})") from None

    def has_column(name: str) -> bool:
        if name not in schema.names:
            return False
        kind = schema.field(name).type
        if name != "context":
            return _is_text(kind)
        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        return is_list and _is_text(kind.value_type)

    examples = ["response"] if compared_text == "response" else ["context", "response"]
    texts = next(
        (columns for columns in (examples, ["text"]) if all(map(has_column, columns))), None
    )
    if texts is None:
        raise BadInput(f"{uri}: no texts; needed: the columns context (a list) and response, or text; "
                       f"there are: {', '.join(schema.names)}")  # fmt: skip
    return texts, [name for name in ("example_id", "group_id") if has_column(name)]


def _is_text(kind: pa.DataType) -> bool:
    """Whether a column of Parquet holds texts, also as other programs than pyarrow store them."""
    types = pa.types
    kind = kind.value_type if types.is_dictionary(kind) else kind
    return bool(types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind))


def _with_plain_types(rows: pa.Table) -> pa.Table:
    """The rows as a corpus has them; an empty cell is an empty text."""
    columns = {name: rows[name].chunk(0) for name in rows.column_names}
    return pa.table(
        {
            name: values.cast(pa.list_(pa.string()))
            if name == "context"
            else pc.fill_null(values.cast(pa.string()), "")
            for name, values in columns.items()
        }
    )


def _ids(uri: str, numbers: Iterable[int]) -> pa.Array:
    """Names for texts that have none, by line or row, from 1."""
    return pa.array([f"{storage.name_of(uri)}:{number}" for number in numbers], pa.string())
