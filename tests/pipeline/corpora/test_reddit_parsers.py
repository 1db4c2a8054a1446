"""Parsers of Reddit dumps are busy while there are blocks: 4 files, 12 logical CPUs, work that waits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import cluster
from pipeline.corpora import raw
from pipeline.corpora.privacy import Privacy
from pipeline.corpora.reddit import partition
from pipeline.corpora.reddit.options import Options
from pipeline.engine.draft import Draft, draft

ROOT = Path(__file__).parents[3]
FILES, BLOCKS, CORES, PARSING_S = 4, 36, 12, 5.0
COMMENT = {"id": "x", "name": "t1_x", "link_id": "t3_a", "parent_id": "t3_a", "subreddit": "pics", "score": 1,
           "author": "a", "body": "hello there my friend", "permalink": "x" * 60_000}  # fmt: skip
LINES = 32  # of a block, some 2 MB


def wait_in_parser(log: Path) -> Callable[[], None]:
    def hook() -> None:
        from pipeline.corpora.reddit import partition

        parse_block = partition._parse_block

        def parse_late(*arguments: Any) -> Any:
            began = time.time()
            time.sleep(PARSING_S)
            record = parse_block(*arguments)
            with log.open("a") as stream:
                print(began, time.time(), file=stream)
            return record

        partition._parse_block = parse_late  # type: ignore[assignment]

    return hook


def read(folder: Path) -> None:
    """Reads the dumps on a Ray of this process."""
    import ray

    hook = wait_in_parser(folder / "log")
    ray.init("local", num_cpus=CORES, runtime_env={"worker_process_setup_hook": hook},
             object_store_memory=3 << 30, logging_level="ERROR", log_to_driver=False)  # fmt: skip
    cluster.silence_ray()
    files = sorted(map(str, folder.glob("RC_*")))
    block_bytes = LINES * len(json.dumps(COMMENT) + "\n")
    privacy = Privacy(redact=False, authors="plain", salt="")
    out = draft(str(folder / "out"), "corpus", Options(), {})
    assert isinstance(out, Draft)
    partition.read_dumps(out, files, 2, block_bytes, Options(), raw.Reading(), privacy)


@pytest.mark.long  # a minute and a half
def test_parsers_are_busy_while_there_are_blocks(tmp_path):
    """From the moment when all run, because a machine of 2 cores starts 12 processes for 10 to 25 s."""
    block = (json.dumps(COMMENT) + "\n") * LINES
    for number in range(FILES):
        (tmp_path / f"RC_2012-{number:02d}").write_text(block * BLOCKS)
    subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], cwd=ROOT, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    times = [(float(began), float(ended)) for began, ended in map(str.split, lines)]
    assert len(times) >= FILES * (BLOCKS - 4)
    begins = sorted(began for began, _ in times)
    all_run = [t for t in begins if sum(began <= t < ended for began, ended in times) == CORES]
    start, end = min(all_run), begins[-1]
    busy_s = sum(max(0.0, min(ended, end) - max(began, start)) for began, ended in times)
    assert busy_s / (CORES * (end - start)) >= 0.85


if __name__ == "__main__":
    read(Path(sys.argv[1]))
