"""The work of an actor on a shard of a pool: it copies known vectors, and embeds the other texts.

A vector is copied by the text alone: columns to filter by have no part in it.

Texts are taken in windows, sorted by length in each, and go through the model in batches bounded by
tokens, while the next window is tokenised. An actor works on several shards at once, each in a thread: one
is in the model while others are read, checked and written. In bf16 the weights are bf16 too.
"""

from __future__ import annotations

import itertools
import os
import time
from bisect import insort
from collections.abc import Sequence
from pathlib import Path
from threading import Condition, Lock, local
from zlib import crc32

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from pipeline.arrays import Bools, Floats, Ints
from pipeline.config import BadInput
from pipeline.corpora import raw
from pipeline.engine.draft import Draft
from pipeline.engine.resources import best_device
from pipeline.models import inference
from pipeline.models.precision import Precision
from pipeline.models.ranker import load_ranker
from pipeline.models.truncation import truncated_candidates
from pipeline.pools import build, candidates
from pipeline.pools.build_records import CheckRecord, EmbedRecord
from pipeline.pools.gate import KEY_DIGITS, Answers, ShardAnswers, ShardCheck, write_answers
from pipeline.pools.plan import NEW, Slices, read_verdicts
from pipeline.pools.pool import Pool, known_contexts
from pipeline.pools.shard import KNOWN_CONTEXTS
from pipeline.pools.vector_format import Dtype, decode, encode

_SCORED_ROWS = 2048  # at once: 8 MB of products with 16 canaries of 64 vectors
_LOOKED_AT = 200  # rows of a shard, for the count of truncated texts: they are tokenised once more
_ORDINARY = "an ordinary text"


class FirstBegun:
    """A lock. Of the threads that wait for it, the one that called `begin` first is next.

    Shards that took turns would end together, and their actor would take three new ones at once. Of 16 shards
    on two actors the last three were then left to one of them: for 3 of 19 minutes the other had none.
    """

    def __init__(self) -> None:
        self._changed, self._is_held = Condition(), False
        self._waiting: list[int] = []
        self._numbers, self._thread = itertools.count(), local()

    def begin(self) -> None:
        self._thread.number = next(self._numbers)

    def __enter__(self) -> None:
        number = self._thread.number
        with self._changed:
            insort(self._waiting, number)
            self._changed.wait_for(lambda: not self._is_held and self._waiting[0] == number)
            del self._waiting[0]
            self._is_held = True

    def __exit__(self, *_: object) -> None:
        with self._changed:
            self._is_held = False
            self._changed.notify_all()


class Embedder:
    """A model, the version to copy from and the canaries, in memory."""

    def __init__(
        self,
        model: Path,
        batch_tokens: int,
        plan: str,
        gate_name: str,
        source: str,
        canaries: list[list[str]],
        top_k: int,
        sample: int,
        dtype: Dtype = "float32",
        precision: Precision = "auto",
    ) -> None:
        """`plan`: the name of the plan; `gate_name`: the name of the gate's questions.

        `source`: a version whose vectors are those that the model would make; "": there is none.
        `canaries`: contexts; `top_k`: how many answers to each are kept. `sample`: rows of a shard that are
        embedded once more. `dtype`: the stored type of vectors; `precision`: that of the computation.
        """
        # Several shards are worked on at once, each by a thread. A tokenizer takes one at a time.
        self._model_is_free, self._tokenizer_is_free = FirstBegun(), Lock()
        # Ray gives torch as many threads as the actor has cores; the tokenizer would take all there are.
        os.environ.setdefault("RAYON_NUM_THREADS", str(torch.get_num_threads()))
        self._plan, self._gate_name = plan, gate_name
        self._batch_tokens, self._top_k, self._sample = batch_tokens, top_k, sample
        self._dtype: Dtype = dtype
        self._ranker = inference.prepare(load_ranker(model), best_device(), precision)
        # [CLS] and [SEP]; ConveRT has neither, and pads an empty text.
        (self._empty_row,) = self._ranker.candidate_rows([""])
        self._source: Pool | None = None
        self._notes: list[str] = []
        try:
            self._source = Pool.open(source) if source else None
        except BadInput as error:
            self._notes.append(f"nothing is copied, as {source} cannot be opened: {error}")
        self._contexts = inference.context_vectors(self._ranker, canaries) if canaries else None

    def __call__(self, draft: Draft, name: str, slices: Slices) -> EmbedRecord:
        """Writes a shard's rows and vectors."""
        self._model_is_free.begin()
        started = time.time()
        rows, verdict_N, places_N = self._read_candidates(draft, slices)
        vectors_ND = np.zeros((len(rows), self._ranker.dual.dimensions), np.float32)
        copied_N = np.zeros(len(rows), bool)
        if self._source is not None:
            copied_N = _copy(rows, places_N, vectors_ND, self._source)
        todo = np.flatnonzero(~copied_N)
        todo_rows = rows.take(todo)
        vectors_ND[todo], is_empty_N, actor_seconds = self._embed(todo_rows)
        with self._tokenizer_is_free:
            looked_at = todo_rows["text"][:_LOOKED_AT].to_pylist()
            truncated = truncated_candidates(self._ranker, looked_at)
        poisoned = {"text has no tokens": todo[is_empty_N]}
        infinite = np.flatnonzero(~np.isfinite(vectors_ND).all(axis=1))
        if len(infinite) and not np.isfinite(self._embed_texts([_ORDINARY])[0]).all():
            raise FloatingPointError(f"{name}: the model made vectors that are not finite")
        poisoned["vector is not finite"] = infinite
        rejects = _reject(draft, name, rows, poisoned)
        invalid = np.unique(np.concatenate(list(poisoned.values())))
        set_aside = candidates.row_set(rows.take(invalid))
        valid = np.delete(np.arange(len(rows)), invalid)
        rows, is_known_N = rows.take(valid), verdict_N[valid] >= 0
        layer = encode(vectors_ND[valid], self._dtype)
        vectors_ND = decode(layer)  # the gate looks at what searches will
        return EmbedRecord(
            files=build.write_shard(draft, name, rows, layer) if len(rows) else [],
            counts={"candidates": len(rows), "shards": int(len(rows) > 0)},
            dropped=rejects,
            malformed=rejects,
            check=self._check(draft, name, rows, vectors_ND, is_known_N) if len(rows) else None,
            asked=self._gate_name,
            rows_embedded=len(todo),
            actor_seconds=round(actor_seconds, 3),
            started=started,
            ended=time.time(),
            notes=self._notes,
            set_aside=set_aside,
            truncated=truncated,
        )

    def check_again(self, draft: Draft, task: str, shard: tuple[str, Slices]) -> CheckRecord:
        """Asks a finished shard the gate's questions again, because CURRENT has moved since it was made."""
        self._model_is_free.begin()
        name, slices = shard
        rows, verdict_N, _ = self._read_candidates(draft, slices)
        finished_rows, layer = build.read_shard(draft, name)
        is_valid_N = pc.is_in(rows["id"], finished_rows["id"].combine_chunks()).to_numpy()
        is_known_N = verdict_N[is_valid_N] >= 0
        return CheckRecord(check=self._check(draft, name, finished_rows, decode(layer), is_known_N))

    def _read_candidates(self, draft: Draft, slices: Slices) -> tuple[pa.Table, Ints, Ints]:
        """(a shard's candidates, the place of each one's text in the version before, in the one to copy from)

        A place is NEW where the text is not there.
        """
        tables, verdict, places = [], [], []
        for part, start, end in slices:
            part_verdict, part_places = read_verdicts(draft, self._plan, part)
            keep = part_verdict[start:end] >= NEW
            tables.append(candidates.read_rows(draft, part).slice(start, end - start).filter(keep))
            verdict.append(part_verdict[start:end][keep])
            places.append(part_places[start:end][keep])
        rows = pa.concat_tables(tables).combine_chunks()
        return rows, np.concatenate(verdict), np.concatenate(places)

    def _embed(self, rows: pa.Table) -> tuple[Floats, Bools, float]:
        """(vectors [N, D], whether each text has no tokens of its own [N], seconds in the model)"""
        vectors_ND, is_empty_N, seconds = self._embed_texts(rows["text"].to_pylist())
        if contexts := known_contexts(rows):
            with self._model_is_free, self._tokenizer_is_free:
                began = time.perf_counter()
                turned_ND = inference.toward_contexts(
                    self._ranker, torch.from_numpy(vectors_ND), contexts, self._batch_tokens
                )
                vectors_ND, seconds = turned_ND.numpy(), seconds + time.perf_counter() - began
        return vectors_ND, is_empty_N, seconds

    def _embed_texts(self, texts: Sequence[str]) -> tuple[Floats, Bools, float]:
        vectors: list[Floats] = [np.empty((0, self._ranker.dual.dimensions), np.float32)]
        is_empty: list[bool] = []
        seconds = 0.0
        for rows, (part, part_seconds) in inference.in_windows(
            texts, self._tokenize, self._vectors
        ):
            vectors.append(part.numpy())
            is_empty += [row == self._empty_row for row in rows]
            seconds += part_seconds
        return np.concatenate(vectors), np.array(is_empty, bool), seconds

    def _tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        with self._tokenizer_is_free:
            return self._ranker.candidate_rows(texts)

    def _vectors(self, rows: list[list[int]]) -> tuple[torch.Tensor, float]:
        """(vectors [N, D], seconds in the model)"""
        with self._model_is_free:
            began = time.perf_counter()
            vectors = inference.row_vectors(self._ranker, rows, self._batch_tokens)
            return vectors, time.perf_counter() - began

    def _check(
        self, draft: Draft, name: str, rows: pa.Table, vectors_ND: Floats, is_known_N: Bools
    ) -> ShardCheck:
        """Returns the facts of the shard, and writes its answers to the canaries."""
        norms_N = np.linalg.norm(vectors_ND, axis=1)
        rng = np.random.default_rng(crc32(name.encode()))
        sample = rng.permutation(len(rows))[: self._sample]
        again_SD = self._embed(rows.take(sample))[0]
        lengths_S = np.maximum(norms_N[sample] * np.linalg.norm(again_SD, axis=1), 1e-30)
        cosines_S = np.einsum("sd,sd->s", vectors_ND[sample], again_SD) / lengths_S
        texts = rows["text"].to_pylist()
        keys = np.array([candidates.content_hash(text)[:KEY_DIGITS] for text in texts])
        # A text that comes with several values to filter by is one answer.
        distinct_rows = np.sort(np.unique(keys, return_index=True)[1])
        known_rows = distinct_rows[is_known_N[distinct_rows]]
        answers = ShardAnswers(
            best=self._answers(vectors_ND[distinct_rows], keys[distinct_rows].tolist()),
            best_known=self._answers(vectors_ND[known_rows], keys[known_rows].tolist()),
        )
        write_answers(draft, name, self._gate_name, answers)
        return ShardCheck(
            dimensions=vectors_ND.shape[1],
            norms=(float(norms_N.min()), float(norms_N.mean()), float(norms_N.max())),
            cosine=min(cosines_S.tolist(), default=None),
        )

    def _answers(self, vectors_ND: Floats, keys: Sequence[str]) -> Answers:
        """The shard's best rows for each canary."""
        if self._contexts is None:
            return []
        if not keys:
            return [[] for _ in self._contexts[0]]
        starts = range(0, len(vectors_ND), _SCORED_ROWS)
        parts = [torch.from_numpy(vectors_ND[place : place + _SCORED_ROWS]) for place in starts]
        with torch.inference_mode():
            scores = self._ranker.dual.scores
            scores_QN = torch.cat([scores(*self._contexts, part) for part in parts], dim=1)
            top = scores_QN.topk(min(self._top_k, len(keys)), dim=1)
        return [
            [(score, keys[place]) for score, place in zip(scores, places, strict=True)]
            for scores, places in zip(top.values.tolist(), top.indices.tolist(), strict=True)
        ]


def _copy(rows: pa.Table, places_N: Ints, vectors_ND: Floats, source: Pool) -> Bools:
    """Fills in the vectors that `source` has of the same texts; returns the rows that are filled.

    `places_N`: the place of each text there, or NEW.
    """
    copied_N = np.zeros(len(rows), bool)
    indices = np.flatnonzero(places_N >= 0)
    if not len(indices):
        return copied_N
    indices = indices[np.argsort(places_N[indices])]
    source_rows, known_ND = source.rows_and_vectors_at(places_N[indices])
    is_same = np.ones(len(indices), bool)
    for name in ("text", KNOWN_CONTEXTS):
        if name in rows.column_names or name in source_rows.column_names:
            is_same &= _is_equal(rows.take(indices), source_rows, name)
    vectors_ND[indices[is_same]] = known_ND[is_same]
    copied_N[indices[is_same]] = True
    return copied_N


def _is_equal(rows: pa.Table, others: pa.Table, name: str) -> Bools:
    """[N]: whether the texts in a column are equal; a pool without it has no known contexts, `[]`."""
    columns = [
        table[name] if name in table.column_names else pa.array(["[]"] * len(table))
        for table in (rows, others)
    ]
    return np.asarray(pc.equal(*columns))


def _reject(draft: Draft, name: str, rows: pa.Table, poisoned: dict[str, Ints]) -> dict[str, int]:
    """Counts rows that cannot be embedded, and keeps some to look at."""
    rejects = raw.Rejects()
    for reason, places in poisoned.items():
        for place in places.tolist():
            text = f"id {rows['id'][place].as_py()!r}: {rows['text'][place].as_py()!r}"
            rejects.add(reason, f"rows/{name}", place + 1, text)
    rejects.save(draft, name)
    return dict(rejects.counts)
