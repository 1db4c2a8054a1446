"""Selects the rows of a pool that a search may return.

Ids that are not in the pool are no mistake: a list may be older than last night's version.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import Bools
from pipeline.config import require
from pipeline.corpora.formats import tables
from pipeline.corpora.raw import is_text
from pipeline.pools.pool import Pool

_LOOKED_THROUGH = 10_000  # rows of each shard
_SHOWN_VALUES = 5
# A number with zeros that no column of numbers keeps (`tables.cell_text`); of versions, 3.10 is not 3.1.
_ZERO_AT_END = re.compile(r"^-?[0-9]+\.[0-9]*0$")


def select(
    pool: Pool,
    allow: Collection[str] | None = None,
    deny: Collection[str] = (),
    where: Mapping[str, Collection[str]] | None = None,
) -> Bools:
    """[rows of the pool]: the rows that count.

    `allow`: their ids, None: any; `deny`: ids of others. `where`: columns that the pool keeps to filter
    by (`--embed.filter-columns`), and the values that a row may have there.

    A text instead of several stands for itself; 2015.0 finds 2015, and True finds true. 9.50 finds 9.5 in a
    column of numbers, which has no value such as 9.50 itself. "" finds rows without a value. Raises BadInput
    for a column that the pool does not keep, and for an id or a value that is no text.
    """
    is_mapping = where is None or isinstance(where, Mapping)
    require(is_mapping, "where", where, "columns with values, such as {'language': ['en']}")
    names = pool.filter_columns
    allowed_names = f"columns that the pool keeps to filter by ({', '.join(names) or 'none'})"
    for column in where or {}:
        require(column in names, "where", column, allowed_names)
    allowed_values = {
        column: _with_filter_texts(_texts(f"where[{column!r}]", values), pool, column)
        for column, values in (where or {}).items()
    }
    if allow is not None:
        allowed_values["id"] = _texts("allow", allow)
    denied_ids = _texts("deny", deny)
    masks = [np.empty(0, bool)]
    for rows in pool.rows:
        mask_N = np.ones(rows.num_rows, bool)
        if len(denied_ids):
            mask_N &= ~pc.is_in(rows["id"], denied_ids).to_numpy()
        for column, values in allowed_values.items():
            mask_N &= pc.is_in(rows[column], values).to_numpy()
        masks.append(mask_N)
    return np.concatenate(masks)


def examples_of_values(pool: Pool, column: str) -> list[str]:
    """Some values of a column that the pool keeps to filter by."""
    columns = (rows[column].slice(0, _LOOKED_THROUGH) for rows in pool.rows)
    values = (value for texts in columns for value in pc.unique(texts).to_pylist() if value)
    return list(itertools.islice(values, _SHOWN_VALUES))


def _with_filter_texts(values: pa.Array, pool: Pool, column: str) -> pa.Array:
    """The values, and what they are in a pool."""
    given = values.to_pylist()
    texts = [*given, *map(tables.filter_text, given)]
    if "" in given:
        texts.append(None)  # an empty cell of Parquet and JSON; CSV's is ""
    decimals = [text for text in texts if text and _ZERO_AT_END.fullmatch(text)]
    if decimals and not any(
        pc.any(pc.match_substring_regex(rows[column], _ZERO_AT_END.pattern)).as_py()
        for rows in pool.rows
    ):
        texts += [text.rstrip("0").removesuffix(".") for text in decimals]
    return pa.array(dict.fromkeys(texts), pa.string())


def _texts(name: str, values: Collection[str]) -> pa.Array:
    is_one_value = isinstance(values, str) or not isinstance(values, Collection)
    texts = [values] if is_one_value else list(values)
    for value in texts:
        require(is_text(value), name, value, "texts, as the pool keeps them")
    return pa.array(texts, pa.string())
