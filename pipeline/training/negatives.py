"""Mines hard negatives: wrong responses that the model in training scores nearly as high as the right one.

Each round draws P rows of train. Their responses, the pool, are embedded with the current weights. Every
train context then looks for its nearest responses in the pool, but those that are right, too, or probably
are. Each rank reads a share of the rows, row group by row group, and all ranks get what the others found.

Memory of one rank, with N rows, K = `top_k` and vectors of D dimensions: the pool's texts and 4 · P · D
bytes, 128 MB of scores, and the texts of one row group. The places found, 4 · N · K bytes, lie in an
unlinked file in the directory for temporary files; its pages are the kernel's to drop, also while a
checkpoint is written from it. For five million articles with P = 20,000, K = 30, D = 768 and texts of 1 KB
these are 81 MB + 128 MB + 2 MB, and 600 MB on disk (twice that while a round replaces the one before).
Drawing the rows takes 40 MB (8 · N bytes) for a moment where P is above N / 50.
"""

from __future__ import annotations

import itertools
import os
import tempfile
from collections import defaultdict
from collections.abc import Hashable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor

from pipeline.models import inference
from pipeline.models.ranker import Ranker
from pipeline.training.data import Epoch, ExampleRow, Rows, answer_keys
from pipeline.training.guide import highest_allowed
from pipeline.training.loop import gather_items
from pipeline.training.settings import Mining

_CONTEXTS_AT_ONCE = 64
_LOGITS_AT_ONCE = 1 << 23  # of float32; scoring holds some four arrays of them: 128 MB
_ROWS_AT_ONCE = 1 << 16  # exchanged; 8 MB a rank with 30 places each


_RightPlaces = dict[Hashable, set[int]]
"""The places in the pool that are right for a row with this response, or with this key of `answer_keys`."""


class _Round(NamedTuple):
    """The result of one round."""

    number: int
    """The round's number, from 1; 0: nothing has been mined."""
    pool: list[str]
    places_NK: NDArray[np.int32]
    """Places in the pool of each row's negatives, nearest first; -1 where there are no more."""


_NO_ROUND = _Round(0, [], np.empty((0, 0), np.int32))


class Miner:
    """Mines hard negatives, and returns those of each row of the train split."""

    def __init__(
        self,
        ranker: Ranker,
        rows: Rows,
        config: Mining,
        every_steps: int,
        rank: int,
        world: int,
        same_group_negatives: bool = True,
    ) -> None:
        """`rows`: the whole train split, the same files in the same order as batches are made of, with
        the columns of `example_columns`. Nothing of it is read before the first round."""
        self.every_steps = every_steps
        self._ranker, self._config, self._seed = ranker, config, rows.seed
        self._rank, self._world = rank, world
        self._same_group_negatives = same_group_negatives
        self._rows = rows.in_order()
        self._count = len(rows)
        # Batches that are prepared meanwhile read it in another thread: it is replaced as a whole.
        self._round = _NO_ROUND

    def negatives_of(self, place: int) -> list[str]:
        """The hard negatives of the row at this `data.PLACE`, nearest first; none before the first
        round."""
        latest = self._round
        if not latest.number:
            return []
        return [latest.pool[number] for number in latest.places_NK[place].tolist() if number >= 0]

    def state(self) -> dict[str, Any]:
        """The state in a checkpoint. `found` is the mapped file, not a copy of it."""
        number, pool, places_NK = self._round
        return {"round": number, "pool": pool, "found": torch.from_numpy(places_NK)}

    def load(self, state: dict[str, Any]) -> None:
        self._round = _NO_ROUND
        if state["round"]:
            places_NK = _mapped_array(*state["found"].shape)
            for start in range(0, self._count, _ROWS_AT_ONCE):
                part_BK = state["found"][start : start + _ROWS_AT_ONCE]
                places_NK[start : start + _ROWS_AT_ONCE] = part_BK.cpu().numpy()
            self._round = _Round(state["round"], state["pool"], places_NK)

    @torch.inference_mode()
    def __call__(self) -> None:
        """Mines them with the current weights. A collective call; it leaves the ranker in evaluation mode.

        Raises OSError if the file of places does not fit on the disk.
        """
        self._ranker.eval()
        number = self._round.number + 1
        pool, right_places = self._draw(number)
        share = pool[slice(*self._share(len(pool)))]
        shares = gather_items([inference.candidate_vectors(self._ranker, share)] if share else [])
        vectors_PD = torch.cat(shares).to(self._ranker.device)
        places_NK = _mapped_array(self._count, min(self._config.top_k, len(pool)))
        self._search(places_NK, right_places, vectors_PD)
        if self._world > 1:
            self._exchange(places_NK)
        self._round = _Round(number, pool, places_NK)

    def _draw(self, number: int) -> tuple[list[str], _RightPlaces]:
        """The pool of a round, different responses of rows drawn at random, in the split's order; and the
        places in it that are right."""
        rng = np.random.default_rng([self._seed, number])
        count = min(self._config.responses, self._count)
        drawn = np.sort(rng.choice(self._count, count, replace=False))
        drawn = drawn[slice(*self._share(count))]
        keys_of_rows = list[tuple[str, list[int]]]()
        for start, stop in _row_groups(self._rows, 0, self._count):
            drawn_in_group = drawn[np.searchsorted(drawn, start) : np.searchsorted(drawn, stop)]
            if len(drawn_in_group):
                table = self._rows.read(start, stop).take(pa.array(drawn_in_group - start))
                keys_of_rows += [
                    (row["response"], answer_keys(row, self._same_group_negatives))
                    for row in table.to_pylist()
                ]
        keys_of_rows = gather_items(keys_of_rows)
        places, right_places = dict[str, int](), defaultdict[Hashable, set[int]](set)
        for text, keys in keys_of_rows:
            place = places.setdefault(text, len(places))
            for key in (text, *keys):
                right_places[key].add(place)
        return list(places), dict(right_places)

    def _share(self, count: int, rank: int | None = None) -> tuple[int, int]:
        """The part of `count` rows that a rank works on, by default this rank: (start, stop)."""
        size, rank = -(-count // self._world), self._rank if rank is None else rank
        return min(count, rank * size), min(count, (rank + 1) * size)

    def _search(
        self, places_NK: NDArray[np.int32], right_places: _RightPlaces, vectors_PD: Tensor
    ) -> None:
        """Fills in this rank's share of the rows."""
        for start, stop in _row_groups(self._rows, *self._share(self._count)):
            table = self._rows.read(start, stop)
            for row in range(0, len(table), _CONTEXTS_AT_ONCE):
                rows = table.slice(row, _CONTEXTS_AT_ONCE).to_pylist()
                row += start
                nearest_BK = self._nearest(rows, right_places, vectors_PD)
                places_NK[row : row + len(rows)] = nearest_BK.numpy()

    def _exchange(self, places_NK: NDArray[np.int32]) -> None:
        """Fills in the other ranks' shares."""
        shares = [self._share(self._count, rank) for rank in range(self._world)]
        for begin in range(0, self._share(self._count, 0)[1], _ROWS_AT_ONCE):
            parts = [places_NK[start + begin : stop][:_ROWS_AT_ONCE] for start, stop in shares]
            for part_BK, found_BK in zip(parts, gather_items([parts[self._rank]]), strict=True):
                part_BK[:] = found_BK

    def _nearest(
        self, rows: list[ExampleRow], right_places: _RightPlaces, vectors_PD: Tensor
    ) -> Tensor:
        """Places in the pool, [B, K] int32, nearest first, -1 where there are no more."""
        dual, device = self._ranker.dual, self._ranker.device
        contexts, responses = ([row[name] for row in rows] for name in ("context", "response"))
        vectors = inference.context_vectors(self._ranker, contexts)
        vectors_BMD, mask_BM = (part.to(device) for part in vectors)
        responses_BD = inference.candidate_vectors(self._ranker, responses).to(device)
        response_B = dual.scores(vectors_BMD, mask_BM, responses_BD[:, None])[:, 0]
        columns = max(1, _LOGITS_AT_ONCE // (vectors_BMD.shape[0] * vectors_BMD.shape[1]))
        scores_BP = torch.cat(
            [dual.scores(vectors_BMD, mask_BM, part) for part in torch.split(vectors_PD, columns)],
            dim=1,
        ).cpu()
        limit_B1 = highest_allowed(self._config, response_B.double()).float().cpu()[:, None]
        scores_BP.masked_fill_(scores_BP > limit_B1, -torch.inf)
        for row, scores_P in zip(rows, scores_BP, strict=True):
            for key in (row["response"], *answer_keys(row, self._same_group_negatives)):
                scores_P[list(right_places.get(key, ()))] = -torch.inf
        best = scores_BP.topk(min(self._config.top_k, len(vectors_PD)), dim=1)
        return best.indices.masked_fill(best.values == -torch.inf, -1).int()


def _row_groups(order: Epoch, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """The rows from start to stop, cut where row groups end, as (from, to)."""
    for group_start, group_end in itertools.pairwise([0, *order.ends]):
        if max(group_start, start) < min(group_end, stop):
            yield max(group_start, start), min(group_end, stop)


def _mapped_array(rows: int, columns: int) -> NDArray[np.int32]:
    """[rows, columns] int32 in a file that goes with the array.

    Its bytes are reserved first: a disk that fills up later would kill the process by a signal.
    """
    with tempfile.TemporaryFile() as file:
        os.posix_fallocate(file.fileno(), 0, rows * columns * np.dtype(np.int32).itemsize)
        return np.memmap(file, np.int32, "r+", shape=(rows, columns))
