"""Turns Reddit dumps into (context, response) examples, by the rules of PolyAI's pipeline.

There are two phases over storage, so that memory is bounded by one bucket of threads, whatever the size of
the input. `read_dumps` streams each dump file in blocks of lines, parses a block, and files its comments by
bucket, a hash of the thread. Many blocks are merged (`shuffle`). `build_bucket` is one task per bucket: it
reads the bucket from all blocks, joins comments to their parents and writes examples. Finished files and
buckets are marked: a job that was killed repeats only those that were under way.

The rules (github.com/PolyAI-LDN/conversational-datasets, reddit/create_data.py, 50f626a): a comment whose
parent is in its thread is a response. The parent is its context, with up to 9 earlier comments. Neither of
the two may be deleted, over 127 characters or under 9. Threads are split by the MD5 of their id. `Options`
has further rules.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

from pipeline import cost, storage
from pipeline.corpora import raw
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit import languages
from pipeline.corpora.reddit.options import Options
from pipeline.corpora.reddit.partition import read_dumps
from pipeline.corpora.reddit.shuffle import Shuffle, merge_blocks
from pipeline.corpora.reddit.threads import build_bucket
from pipeline.cost import Estimate
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

__all__ = ["Options", "estimate", "prepare"]

# A block of JSON lines is 16 MiB, some 25,000 comments and 0.2 s of work, as long as that makes no
# more than some 4,000 blocks; beyond, blocks grow to 256 MiB, and buckets to four times their size. Each
# bucket is read from each block, or from the files that many blocks are merged to (`shuffle`).
_MIB = 1 << 20
_BLOCK_MIB = (16, 256)
_TARGET_BLOCKS = 4096
_COMPRESSION_RATIO = 10  # of a dump to its .zst
_SHUFFLED_SHARE = 0.9  # of the dumps' size: what blocks write, 34.6 of 38.4 MB of made-up comments
_MEMORY_RATIO = 22  # of the memory that a bucket takes to its share of the compressed dump


def _block_bytes_and_buckets(size: int, options: Options) -> tuple[int, int]:
    """(bytes of a block of lines, number of buckets) for dumps of `size` compressed bytes."""
    block_bytes = min(
        max(size * _COMPRESSION_RATIO // _TARGET_BLOCKS, _BLOCK_MIB[0] * _MIB), _BLOCK_MIB[1] * _MIB
    )
    per_bucket = options.bucket_mib * _MIB
    return block_bytes, max(
        -(-size // (4 * per_bucket)), min(-(-size // per_bucket), _TARGET_BLOCKS // 4), 1
    )


def estimate(
    sizes: Sequence[int], comment_bytes: float, ratio: float, options: Options
) -> Estimate:
    """The cost of dumps of these compressed sizes. `comment_bytes`: of JSON; `ratio`: of JSON to its dump."""
    size = sum(sizes)
    block_bytes, buckets = _block_bytes_and_buckets(size, options)
    blocks = sum(max(1, round(file_size * ratio / block_bytes)) for file_size in sizes)
    shuffle = Shuffle(blocks, buckets)
    shuffled = round(size * _SHUFFLED_SHARE)
    tasks = len(sizes) + blocks + buckets + (shuffle.files if shuffle.is_merged else 0)
    return Estimate(
        input_files=len(sizes),
        input_bytes=size,
        rows=round(size * ratio / comment_bytes),
        tasks=tasks,
        requests=cost.reads(sizes) + shuffle.requests(shuffled // blocks) + 2 * tasks,
        shuffle_bytes=shuffled * (2 if shuffle.is_merged else 1),
        memory_bytes=size // buckets * _MEMORY_RATIO,
    )


def prepare(
    draft: Draft, files: list[str], options: Options, reading: raw.Reading, privacy: Privacy
) -> Sequence[TaskRecord]:
    """Fills the draft and returns the records of its tasks."""
    languages.check(options.languages)
    files = sorted(files, key=storage.name_of)
    size = sum(map(storage.size_of, files))
    block_bytes, buckets = _block_bytes_and_buckets(size, options)

    dumps = read_dumps(draft, files, buckets, block_bytes, options, reading, privacy)
    blocks = {name: block for dump in dumps for name, block in dump.blocks.items()}
    records = [*blocks.values(), *dumps]
    raw.check_share(draft, records, reading)
    parts = merge_blocks(draft, list(blocks), buckets)
    build = functools.partial(build_bucket, parts=parts, options=options)
    tasks = {f"bucket-{bucket:05d}": bucket for bucket in range(buckets)}
    memory = size // buckets * _MEMORY_RATIO
    label = "reddit: threads to examples"
    return [*records, *run_tasks(draft, tasks, build, label, TaskRecord, memory)]
