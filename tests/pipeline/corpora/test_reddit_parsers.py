"""Parsers of Reddit dumps are busy while there are blocks: 4 files, 12 logical CPUs, work that waits."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from functools import partial
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


def wait_in_parser(log: Path) -> None:
    parse_block = partition._parse_block

    def parse_late(*arguments: Any) -> Any:
        began = time.time()
        time.sleep(PARSING_S)
        record = parse_block(*arguments)
        with log.open("a") as stream:
            print(began, time.time(), file=stream)
        return record

    partition._parse_block = parse_late  # type: ignore[assignment]


def read(folder: Path) -> None:
    """Reads the dumps on a Ray of this process."""
    import ray

    hook = partial(wait_in_parser, folder / "log")
    ray.init("local", num_cpus=CORES, runtime_env={"worker_process_setup_hook": hook},
             object_store_memory=3 << 30, logging_level="ERROR", log_to_driver=False)  # fmt: skip
    cluster.silence_ray()
    files = sorted(map(str, folder.glob("RC_*")))
    block_bytes = LINES * len(json.dumps(COMMENT) + "\n")
    privacy = Privacy(redact=False, authors="plain", salt="")
    out = draft(str(folder / "out"), "corpus", Options(), {})
    assert isinstance(out, Draft)
    partition.read_dumps(out, files, 2, block_bytes, Options(), raw.Reading(), privacy)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_parsers_are_busy_from_the_first_block_to_the_last(tmp_path):
    """The start of their processes counts, too, which takes the first seconds of a machine of 2 cores."""
    block = (json.dumps(COMMENT) + "\n") * LINES
    for number in range(FILES):
        (tmp_path / f"RC_2012-{number:02d}").write_text(block * BLOCKS)
    subprocess.run([sys.executable, "-m", __name__, str(tmp_path)], cwd=ROOT, check=True)
    lines = (tmp_path / "log").read_text().splitlines()
    times = [tuple(map(float, line.split())) for line in lines]
    assert len(times) >= FILES * (BLOCKS - 1)
    seconds = max(ended for _, ended in times) - min(began for began, _ in times)
    assert sum(ended - began for began, ended in times) / (CORES * seconds) >= 0.85


if __name__ == "__main__":
    read(Path(sys.argv[1]))
