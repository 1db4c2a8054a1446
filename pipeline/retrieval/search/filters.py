"""Which of a pool's rows a search may answer with.

Ids that are not in the pool are no mistake: a list may be older than last night's version.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.arrays import Bools
from pipeline.config import BadInput
from pipeline.retrieval.pools.candidates import ROWS
from pipeline.retrieval.pools.pool import Pool


def select(
    pool: Pool,
    allow: Collection[str] | None = None,
    deny: Collection[str] = (),
    where: Mapping[str, Collection[str]] | None = None,
) -> Bools:
    """[rows of the pool]: the rows that count.

    `allow`: their ids, None: any; `deny`: ids of others. `where`: columns that the pool keeps to filter
    by (`--embed.filter-columns`), and the values that a row may have there.

    Raises BadInput for a column that the pool does not keep.
    """
    kept = columns(pool)
    if unknown := [column for column in where or {} if column not in kept]:
        raise BadInput(f"where: {unknown[0]!r} is not allowed; allowed: columns that the pool keeps "
                       f"to filter by ({', '.join(kept) or 'none'})")  # fmt: skip
    wanted = dict(where or {}) if allow is None else {**(where or {}), "id": allow}
    unwanted = pa.array(list(deny), pa.string())
    found = [np.empty(0, bool)]
    for rows in pool.rows:
        among_N = np.ones(rows.num_rows, bool)
        if deny:
            among_N &= ~pc.is_in(rows["id"], unwanted).to_numpy()
        for column, values in wanted.items():
            among_N &= pc.is_in(rows[column], pa.array(list(values), pa.string())).to_numpy()
        found.append(among_N)
    return np.concatenate(found)


def columns(pool: Pool) -> list[str]:
    """The columns that a pool keeps to filter by."""
    names = pool.rows[0].column_names if pool.rows else []
    return [name for name in names if name not in ROWS.names]
