"""What a replica tells Prometheus, beside Serve's own numbers; Ray puts `ray_` before each name."""

from __future__ import annotations

import time
from collections.abc import Iterable
from datetime import datetime

from ray.serve import metrics

from pipeline.retrieval.pools.pool import Pool
from serve.scheduling import Batch
from serve.service import Answer

_SECONDS = [0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
_ROWS = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024]


class Metrics:
    """`stage` is tokenize, contexts, candidates, pairs, scores, search, second_stage or intents."""

    def __init__(self) -> None:
        self._seconds = metrics.Histogram(
            "polyrank_stage_seconds",
            description="Seconds that a batch of a stage took.",
            boundaries=_SECONDS,
            tag_keys=("stage",),
        )
        self._waited = metrics.Histogram(
            "polyrank_waited_seconds",
            description="Seconds that the first row of a batch waited for its turn.",
            boundaries=_SECONDS,
            tag_keys=("stage",),
        )
        self._rows = metrics.Histogram(
            "polyrank_batch_rows",
            description="Rows of a batch.",
            boundaries=_ROWS,
            tag_keys=("stage",),
        )
        self._units = metrics.Counter(
            "polyrank_units_total",
            description="Tokens encoded, products of scores, questions searched.",
            tag_keys=("stage",),
        )
        self._answers = metrics.Counter(
            "polyrank_answers_total",
            description="Questions answered, by the versions that did.",
            tag_keys=("model", "pool", "version", "certified"),
        )

        self._missing = metrics.Counter(
            "polyrank_missing_shards_total",
            description="Times that a shard of a pool did not answer in time.",
            tag_keys=("pool", "shard"),
        )
        self._pool_age = metrics.Gauge(
            "polyrank_pool_age_seconds",
            description="Seconds since the version that is served was made.",
            tag_keys=("pool",),
        )

    def pools(self, pools: Iterable[Pool]) -> None:
        """Which versions are served now."""
        for pool in pools:
            made = datetime.fromisoformat(pool.artifact.manifest["created_at"]).timestamp()
            self._pool_age.set(time.time() - made, {"pool": pool.name})

    def batch(self, batch: Batch) -> None:
        """A batch was computed."""
        tags = {"stage": batch.kind}
        self._seconds.observe(batch.seconds, tags)
        self._waited.observe(batch.waited_s, tags)
        self._rows.observe(batch.rows, tags)
        self._units.inc(batch.units, tags)

    def answered(self, answer: Answer) -> None:
        """A question was answered."""
        certified = "true" if answer.certified else "false"
        self._answers.inc(1, {"model": answer.engine.model.fingerprint, "pool": answer.pool,
                              "version": answer.pool_version, "certified": certified})  # fmt: skip
        for shard in answer.missing_shards:
            self._missing.inc(1, {"pool": answer.pool, "shard": str(shard)})
