"""A job that is killed while it publishes, at each change of a file: nothing half-made is taken for complete.

Each step is a real process that ends itself by SIGKILL right before the change of number n, from the
writing of the manifest on: files that are opened for writing, linked, renamed and removed. It starts from a
draft whose tasks are all done, and the command that follows has to find them done.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

import pytest

from pipeline import storage
from pipeline.artifact import MANIFEST, open_artifact
from pipeline.config import BadInput, parse
from pipeline.engine import executors
from pipeline.pools.pool import Pool

pytestmark = pytest.mark.long  # 51 s on two slow cores

Command = tuple[str, ...]
_MOST_STEPS = 60
# What the jobs import when they run: 3 s, which the processes spend once.
_MODULES = (
    "jobs.prepare_corpus", "jobs.embed_pool", "jsonargparse", "pipeline.tracking",
    "mlflow.store.tracking.sqlalchemy_store", "pipeline.engine.resources", "pipeline.models.ranker",
)  # fmt: skip
_CHANGES = ("os.link", "os.remove", "os.rename")


def run(verb: str, *arguments: object) -> executors.InThisProcess:
    """Runs a job in this process; returns which tasks it did."""
    module = import_module(f"jobs.{verb}")
    with executors.in_this_process() as here:
        done = len(here.tasks), len(here.actor_tasks)
        module.run(parse(module.Config, list(map(str, arguments)), verb))
        return executors.InThisProcess(here.tasks[done[0] :], here.actor_tasks[done[1] :])


def run_until(step: int, folder: str, tracking_uri: str, verb: str, *arguments: str) -> None:
    """The main function of the process that is killed."""
    os.environ |= {"MLFLOW_TRACKING_URI": tracking_uri, "POLYRANK_GIT_REVISION": "test"}
    said = os.open(f"{folder}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(said, stream)
    count = -1  # the manifest is not being written yet
    emptied = Counter[str]()

    def before(event: str, details: tuple[object, ...]) -> None:
        nonlocal count
        writes = event == "open" and int(str(details[2])) & (os.O_WRONLY | os.O_RDWR)
        if not writes and event not in _CHANGES:
            return
        path = str(details[0])
        if not path.startswith(f"{folder}/"):
            return
        if event == "os.remove":
            folder_of_file = path.rpartition("/")[0]
            emptied[folder_of_file] += 1
            if emptied[folder_of_file] > 2:
                return  # nothing of a folder removed, and one file: the others are like these
        if count >= 0 or MANIFEST in path:
            count += 1
            if count > step:
                os.kill(os.getpid(), signal.SIGKILL)

    storage.delete = delete
    sys.addaudithook(before)
    run(verb, *arguments)


def delete(uri: str) -> None:
    """As `storage.delete`, file by file in Python: a kill may come between any two."""
    path = Path(storage.absolute(uri))
    if path.is_dir():
        for child in sorted(path.iterdir()):
            delete(str(child))
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


@pytest.fixture
def killed_at(tracking_uri: str) -> Callable[..., bool]:
    """`killed_at(step, folder, verb, …)`: whether the job came to this change of a file below the folder."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *_MODULES])

    def run_process(step: int, folder: Path, *command: object) -> bool:
        arguments = (step, str(folder), tracking_uri, *map(str, command))
        process = context.Process(target=run_until, args=arguments)
        process.start()
        process.join(60)
        assert process.exitcode in (0, -signal.SIGKILL), Path(f"{folder}.log").read_text()
        return process.exitcode != 0

    return run_process


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder but manifests, which hold times."""
    return {
        str(path.relative_to(folder)): b"" if path.name == MANIFEST else path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


@pytest.fixture
def each_step(killed_at, tmp_path: Path) -> Callable[..., Iterator[Path]]:
    """`each_step(prepared, command)`: a copy of the folder for each step, in which the job was killed
    there. `command(folder)` is the job in it."""

    def steps(prepared: Path, command: Callable[[Path], Command]) -> Iterator[Path]:
        for step in range(_MOST_STEPS):
            folder = tmp_path / f"step-{step:02d}"
            shutil.copytree(prepared, folder)
            if not killed_at(step, folder, *command(folder)):
                assert step > 5
                return
            yield folder
            shutil.rmtree(folder)
        raise AssertionError(f"more than {_MOST_STEPS} changes")

    return steps


def test_a_corpus(each_step, killed_at, sample_files, tmp_path):
    def command(folder: Path) -> Command:
        return ("prepare_corpus", "--corpus", "convai2", "--input", str(sample_files / "convai2"),
                "--output", str(folder / "out"))  # fmt: skip

    (prepared := tmp_path / "prepared").mkdir()
    assert killed_at(0, prepared, *command(prepared))
    assert not list(prepared.rglob(MANIFEST))
    (whole := tmp_path / "whole").mkdir()
    assert run(*command(whole)).tasks
    expected = contents(whole)
    fingerprint = open_artifact(str(whole / "out"), "corpus").fingerprint
    published = list[bool]()
    for folder in each_step(prepared, command):
        try:
            assert open_artifact(str(folder / "out"), "corpus").fingerprint == fingerprint
            published.append(True)
        except BadInput as error:
            assert "unfinished" in str(error)
            published.append(False)
        assert run(*command(folder)).tasks == []
        assert contents(folder) == expected, len(published)
        assert open_artifact(str(folder / "out"), "corpus").fingerprint == fingerprint
    assert published == sorted(published) and len(set(published)) == 2  # from one step on


def test_a_version_of_a_pool(each_step, killed_at, tiny_ranker, tmp_path):
    texts = tmp_path / "texts.jsonl"

    def command(folder: Path) -> Command:
        return ("embed_pool", "--model", tiny_ranker("poly").uri, "--candidates", str(texts),
                "--pools", str(folder), "--name", "p", "--keep", "1",
                "--gate.max-changed-share", "1")  # fmt: skip

    def write(word: str) -> None:
        texts.write_text("".join(f'{{"id": {n}, "text": "{word} {n}"}}\n' for n in range(9)))

    write("old")
    (prepared := tmp_path / "prepared").mkdir()
    run(*command(prepared))
    shutil.copytree(prepared, whole := tmp_path / "whole")
    write("new")
    assert killed_at(0, prepared, *command(prepared))
    before = Pool.open(str(prepared / "p"))
    assert run(*command(whole)).actor_tasks
    expected = contents(whole)
    after = Pool.open(str(whole / "p"))
    seen = list[str]()
    for folder in each_step(prepared, command):
        pool = Pool.open(str(folder / "p"))
        seen.append(pool.row(0).text)
        whole_ones = (before.artifact.fingerprint, after.artifact.fingerprint)
        assert pool.artifact.fingerprint in whole_ones
        done = run(*command(folder))
        assert done.actor_tasks == []
        assert not any(task.startswith(("file-", "plan-")) for task in done.tasks)
        assert contents(folder) == expected, len(seen)
    assert seen == sorted(seen, reverse=True) and set(seen) == {"old 0", "new 0"}
