"""The metrics of a replica, on Ray's Prometheus endpoint. Ray adds `ray_` before each name."""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from ray.serve.metrics import Counter, Gauge, Histogram

from serve.batcher import Batch, Batcher
from serve.service import RankAnswer

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_TOGETHER_S = 0.1
_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


class Metrics:
    """`stage` is tokenize, contexts, candidates, pairs, scores, search, second_stage, explanations or
    intents."""

    def __init__(self) -> None:
        self.batcher: Batcher | None = None
        """Of which requests and waiting rows are recorded."""
        stage = ("stage",)
        self._seconds = Histogram(
            "polyrank_stage_seconds", "Seconds that a batch of a stage took.", _SECONDS, stage
        )
        self._waited = Histogram(
            "polyrank_waited_seconds",
            "Seconds that the first row of a batch waited.",
            _SECONDS,
            stage,
        )
        self._rows = Histogram("polyrank_batch_rows", "Rows of a batch.", _ROWS, stage)
        self._units = Counter(
            "polyrank_units_total", "Tokens encoded, products of scores, questions searched.", stage
        )
        self._errors = Counter(
            "polyrank_errors_total", "Answers with an error, by HTTP status.", ("status",)
        )
        self._new_errors = collections.Counter[int]()
        """By status; not written yet."""
        self._is_due = False
        self._answers = Counter(
            "polyrank_answers_total",
            "Questions answered, by model and pool version.",
            ("model", "pool", "version", "certified"),
        )
        self._answer_seconds = Histogram(
            "polyrank_answer_seconds",
            "Seconds until a model's answer, in the replica.",
            _SECONDS,
            ("model", "route", "status"),
        )
        self._candidates = Counter(
            "polyrank_candidates_total",
            "Candidates ranked: given with the questions, or rows of pools.",
            ("pool",),
        )
        self._ages = Gauge(
            "polyrank_pool_age_seconds",
            "Seconds since the served version of a pool was made.",
            ("pool",),
        )
        self._problems = Gauge(
            "polyrank_problems",
            "Number of reasons, listed in /info, why the wanted versions are not served.",
            ("of",),
        )
        self._requests = Gauge(
            "polyrank_requests", "Requests admitted and not answered; a list is one."
        )
        self._waiting_rows = Gauge("polyrank_waiting_rows", "Rows that wait for a batch.")
        self.load_seconds = Gauge(
            "polyrank_load_seconds", "Seconds that the served model and pools took to load."
        )
        self._missing = Counter(
            "polyrank_missing_shards_total",
            "Times that a shard of a pool did not answer in time.",
            ("pool", "shard"),
        )

    def record_batch(self, batch: Batch) -> None:
        self._record_queue()
        tags = {"stage": batch.stage}
        self._seconds.observe(batch.seconds, tags)
        self._waited.observe(batch.waited_s, tags)
        self._rows.observe(batch.rows, tags)
        self._units.inc(batch.cost, tags)

    def record_ranking(self, answer: RankAnswer) -> None:
        certified = "true" if answer.certified else "false"
        self._answers.inc(1, {"model": answer.engine.model.fingerprint, "pool": answer.pool,
                              "version": answer.pool_version, "certified": certified})  # fmt: skip
        self._candidates.inc(answer.candidates, {"pool": answer.pool})

    def record_answer(self, model: str, route: str, status: int, seconds: float) -> None:
        """Records the time of a model's answer, or of its failure."""
        self._write_soon()
        tags = {"model": model, "route": route, "status": str(status)}
        self._answer_seconds.observe(seconds, tags)

    def _record_queue(self) -> None:
        """It is called after each batch, and soon after each answer."""
        if self.batcher:
            self._requests.set(self.batcher.requests)
            self._waiting_rows.set(self.batcher.waiting_rows)

    def record_error(self, status: int) -> None:
        self._new_errors[status] += 1
        self._write_soon()

    def _write_soon(self) -> None:
        """On an event loop. Writes what comes within a tenth of a second together: one by one, errors took a
        fifth of the loop's time at three times the load that a replica answers."""
        if not self._is_due:
            self._is_due = True
            asyncio.get_running_loop().call_later(_TOGETHER_S, self._write)

    def _write(self) -> None:
        self._is_due = False
        self._record_queue()
        new_errors, self._new_errors = self._new_errors, collections.Counter()
        for status, count in new_errors.items():
            self._errors.inc(count, {"status": str(status)})

    def record_missing_shard(self, pool: str, shard: int) -> None:
        self._missing.inc(1, {"pool": pool, "shard": str(shard)})

    def record_decision(
        self, decider: str, problems: Sequence[str], pools: Sequence[Mapping[str, Any]]
    ) -> None:
        """Records a decision (`decider`: versions or candidate) and the pools that the champion serves."""
        self._problems.set(len(problems), {"of": decider})
        for pool in pools:
            created = datetime.fromisoformat(pool["created_at"])
            age_s = (datetime.now(UTC) - created).total_seconds()
            self._ages.set(age_s, {"pool": pool["name"]})
