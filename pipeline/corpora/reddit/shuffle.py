"""Merges the files of blocks between the two phases, so that the join reads from few files.

Each bucket is read from each file, in three requests: the file's size, its offsets, the bucket. The 18,600
blocks and 3,725 buckets of all Reddit would be 208 million requests under one prefix, of which S3 answers
some 5,500 a second: 10 hours. Merged in groups of 137 blocks they are 2.4 million.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from pipeline.corpora import buckets
from pipeline.engine.draft import Draft
from pipeline.engine.records import TaskRecord
from pipeline.engine.run import run_tasks

_READ_REQUESTS = 3
_MERGED_FROM = 1_000_000  # reads of a bucket from a block: minutes


@dataclass(frozen=True)
class Shuffle:
    """The numbers of blocks and buckets, and of the files and requests between them."""

    blocks: int
    buckets: int

    @property
    def is_merged(self) -> bool:
        return self.blocks > 1 and self.blocks * self.buckets > _MERGED_FROM

    @property
    def group_blocks(self) -> int:
        """Blocks in a merged file: as many as there are merged files, so that both levels cost alike."""
        return math.isqrt(self.blocks - 1) + 1 if self.is_merged else 1

    @property
    def files(self) -> int:
        """Number of files that each bucket is read from."""
        return -(-self.blocks // self.group_blocks)

    def requests(self, block_bytes: int) -> int:
        """Reads from an object store; `block_bytes`: of a block's file."""
        join = self.files * self.buckets * _READ_REQUESTS
        if not self.is_merged:
            return join
        pieces = max(1, -(-self.group_blocks * block_bytes // buckets.MERGE_BYTES))
        reads_of_block = 1 + min(pieces, self.buckets)  # its offsets, then its pieces
        return join + self.blocks * 2 * reads_of_block  # each asks for the file's size, too


def merge_blocks(draft: Draft, blocks: Sequence[str], bucket_count: int) -> list[str]:
    """The files to read buckets from: those of the blocks, or merged ones in the same order."""
    shuffle = Shuffle(len(blocks), bucket_count)
    if not shuffle.is_merged:
        return list(blocks)
    size = shuffle.group_blocks
    groups = [list(blocks[start : start + size]) for start in range(0, len(blocks), size)]
    tasks = {f"merged-{number:05d}": group for number, group in enumerate(groups)}
    work = functools.partial(_merge, bucket_count=bucket_count)
    memory = 3 * buckets.MERGE_BYTES
    run_tasks(draft, tasks, work, "reddit: blocks merged", TaskRecord, memory)
    return list(tasks)


def _merge(draft: Draft, task: str, blocks: list[str], bucket_count: int) -> TaskRecord:
    record = TaskRecord()
    if not draft.is_marked(task):
        buckets.merge(draft, blocks, task, bucket_count)
        draft.mark(task, record)
    buckets.remove(draft, blocks)  # after the mark: a task that is killed here is not done again
    return record
