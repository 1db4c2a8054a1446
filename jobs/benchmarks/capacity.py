"""The duration of work of full size on 50 nodes, by the rates that were measured on 2 cores.

    python -m jobs.benchmarks.capacity

Prints the table of OPERATING.md. Nobody has run these sizes: the arithmetic assumes that the work is shared
out evenly.
"""

from __future__ import annotations

from pipeline.corpora import dedup, reddit
from pipeline.corpora.dedup.options import Options
from pipeline.cost import Estimate

NODES = 50
CORES = 16
# AWS, list prices in us-east-1, 2025: an m7i.4xlarge; 1,000 GET requests of S3. S3 promises so many GET
# requests a second for each prefix.
NODE_HOUR = 0.8064
THOUSAND_READS = 0.0004
READS_PER_S = 5500
# jobs.benchmark embed, the passages of BENCHMARKS.md: all-MiniLM-L6-v2, 2 cores with AMX.
TEXTS_PER_CORE_S = 164_271 / 755 / 2
# All dumps from 2005-12 to 2018-12, a file for each month.
_DUMPS = 157
_DUMP_BYTES = 500 * 10**9
_COMMENTS = 3_700_000_000
_COMMENT_BYTES = 635
# What jobs.prepare_corpus makes of made-up comments: 49,496 examples take 8.7 MB.
_EXAMPLE_BYTES = 176
_SHARD_ROWS = 250_000


def corpus(times: int) -> Estimate:
    """All of Reddit to 2018, so many times over: as many months, longer ones."""
    ratio = _COMMENTS * _COMMENT_BYTES / _DUMP_BYTES
    sizes = [_DUMP_BYTES * times // _DUMPS] * _DUMPS
    return reddit.estimate(sizes, _COMMENT_BYTES, ratio, reddit.Options())


def cleaning(times: int) -> Estimate:
    rows = 174_000_000 * times
    sizes = [_SHARD_ROWS * _EXAMPLE_BYTES] * -(-rows // _SHARD_ROWS)
    # A tenth of the threads is test, which train must not share words with.
    return dedup.estimate(sizes, rows, Options(), evaluation_sizes=sizes[: len(sizes) // 10])


def embedding(times: int) -> Estimate:
    texts = 100_000_000 * times
    return Estimate(rows=texts, cpu_hours=texts / TEXTS_PER_CORE_S / 3600)


def line(name: str, estimate: Estimate) -> str:
    hours, reads = estimate.cpu_hours or 0.0, estimate.requests or 0
    minutes = hours / NODES / CORES * 60
    dollars = hours / CORES * NODE_HOUR
    requests = (f"{reads / 1e6:,.1f} million", f"{reads / READS_PER_S / 3600:,.1f}",
                f"{reads / 1000 * THOUSAND_READS:,.2f}") if reads else ("", "", "")  # fmt: skip
    cells = (name, f"{hours:,.0f}", f"{minutes:,.1f}", f"{dollars:,.2f}", *requests)
    return f"| {' | '.join(cells)} |"


def table() -> str:
    lines = [
        f"| work | core hours | minutes on {NODES} nodes of {CORES} cores | nodes, $ | reads of the bucket "
        f"| hours of these at {READS_PER_S:,} a second | reads, $ |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for times in (1, 10):
        lines += [
            line(f"corpus of {3.7 * times:,.1f} billion comments", corpus(times)),
            line(f"cleaning {174 * times:,} million pairs", cleaning(times)),
            line(f"embedding {100 * times:,} million candidates", embedding(times)),
        ]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table())
