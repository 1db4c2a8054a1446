"""How a job says in its last line that it has failed, and what ends a process before it can."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import ray

from jobs import cluster, packages, program
from pipeline.config import Stopped
from tests.helpers import TERMINATED, job_command

SUBMITTED = """
import shutil, sys
from dataclasses import dataclass
from jobs import program

@dataclass(frozen=True)
class Config:
    pass

def run(config):
    shutil.rmtree(folder)  # as Ray does when it unpacks the folder again
    with open("notes.txt") as notes:
        return {"notes": notes.read()}

folder = sys.argv.pop()
program.main(Config, run, "inspect")
"""

ENDS = """
import sys
from dataclasses import dataclass
from jobs import program
from pipeline.config import BadInput

@dataclass(frozen=True)
class Config:
    pass

def run(config):
    sys.stdin.read()  # till the reader of the output is killed
    exec(code)
    return {"rows": 3}

code = sys.argv.pop()
program.main(Config, run, "inspect")
"""


def test_a_refusal_is_the_summary_of_a_job(tmp_path):
    command = job_command("inspect", "--corpus", tmp_path / "gone")
    done = subprocess.run(command, capture_output=True, text=True)
    summary = json.loads(done.stdout.splitlines()[-1])
    assert (summary["job"], summary["exit_code"], done.returncode) == ("inspect", 2, 2)
    assert done.stderr == f"python -m jobs.inspect: {summary['error']}\n"
    assert program.said_by_job(done.stdout, "inspect", 2)


@pytest.mark.parametrize(("verb", "option"), [
    ("evaluate", "--json"), ("evaluate", "--errors"), ("evaluate_search", "--json"),
    ("classify_intents", "--json"), ("benchmark", "--json"), ("inspect", "--html"),
])  # fmt: skip
def test_a_report_that_cannot_be_written_is_refused_before_the_work(
    run_job_here, tmp_path, verb, option
):
    needed = {
        "evaluate": ("--model", "m", "--corpus", "c"),
        "evaluate_search": ("--model", "m", "--data", "d", "--work", "w"),
        "classify_intents": ("--encoder", "e", "--input", "i", "--output", "o"),
        "benchmark": ("corpora",),
        "inspect": ("--corpus", "c"),
    }
    refusal = run_job_here(verb, *needed[verb], option, tmp_path).refusal
    assert f": {option[2:]}: '{tmp_path}' is not allowed; allowed: a file in a folder" in refusal


@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        ("", 2, False),
        ("Intel oneMKL FATAL ERROR: Cannot load x.so.\n", 2, False),
        ('50%|{"job": "inspect", "exit_code": 2, "error": ""}\nlater\n', 2, True),
        ('{"job": "inspect", "exit_code": 2, "error": ""}\n', 137, False),
        ('{"job": "clean_corpus", "exit_code": 2, "error": ""}\n', 2, False),
        ('{"job": "inspect", "rows": 3}\n', 2, False),  # it died when it had done its work
        ('{"job": "inspect", "rows": 3}\n', 0, True),
    ],
)
def test_only_the_job_itself_says_what_its_exit_code_means(output, code, said):
    assert program.said_by_job(output, "inspect", code) is said


REFUSES = "raise BadInput('x: 3 is not allowed')"


@pytest.mark.parametrize(("work", "code", "silent", "lines"), [
    ("pass", 141, False, []),
    ("print('more', flush=True)", 141, False, []),
    (REFUSES, 2, False, ["python -m jobs.inspect: x: 3 is not allowed"]),
    (REFUSES, 2, True, []),
    ("1 / 0", 1, False, ["ZeroDivisionError: division by zero"]),
])  # fmt: skip
def test_a_job_whose_reader_is_killed_ends_without_a_word(tmp_path, work, code, silent, lines):
    """The reader is most often the process that started it. `silent`: it read standard error, too."""
    with (tmp_path / "errors").open("w") as errors:
        reader = subprocess.Popen(["sleep", "60"], stdin=subprocess.PIPE)
        command = [sys.executable, "-c", ENDS, work]
        output = reader.stdin
        job = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=output,
                               stderr=output if silent else errors)  # fmt: skip
        output.close()
    reader.kill()
    reader.wait()
    job.communicate()
    assert job.returncode == code
    said = (tmp_path / "errors").read_text()
    assert said.splitlines()[-1:] == lines
    assert "BrokenPipe" not in said and said.count("Traceback") == ("Zero" in said)


@pytest.mark.parametrize(("change", "said"), [
    ("exec \"$@\" >&-", "n\\xfc: not a corpus (there is no such folder)"),
    ("rmdir \"$PWD\"; exec \"$@\"", "the current folder has been removed; type the command in another"),
])  # fmt: skip
def test_a_job_without_a_stream_or_a_folder_refuses_in_one_line(tmp_path, change, said):
    (tmp_path / "here").mkdir()
    command = ["sh", "-c", change, "sh", *job_command("inspect", "--corpus", "nü")]
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        command, cwd=tmp_path / "here", env=environment, capture_output=True, text=True
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and done.stderr.count("\n") == 1
    assert not done.stdout or json.loads(done.stdout)["exit_code"] == 2


@dataclass(frozen=True)
class Nothing:
    pass


@pytest.mark.parametrize(
    "said",
    [
        # A moment after it was written.
        "s3://b/a/_tasks/1.json: Object at location a/_tasks/1.json not found: 404 Not Found",
        "s3://b/a: Generic S3 error: Server returned non-2xx status code: 500 Internal Server Error",
    ],
)  # fmt: skip
def test_a_store_that_fails_for_longer_than_all_retries_is_one_line(monkeypatch, capfd, said):
    def run(config):
        raise OSError(said)

    monkeypatch.setattr(sys, "argv", ["inspect"])
    with pytest.raises(SystemExit) as ended:
        program.main(Nothing, run, "inspect")
    assert ended.value.code == 1
    expected = f"the object store fails: {said}; the same command resumes when it can"
    assert capfd.readouterr().err == f"python -m jobs.inspect: {expected}\n"


@pytest.mark.parametrize("outlives", [True, False])
def test_sigterm_is_one_line_and_the_ray_of_a_training_lives_on(monkeypatch, capfd, outlives):
    """`ray.init` sets a handler of its own; the processes that it starts inherit the mask."""
    masks = []

    def init(*arguments, **options):
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(number))
        masks.append(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
        return SimpleNamespace(dashboard_url="")

    def run(config):
        with cluster.session(outlives_sigterm=outlives):
            signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(ray, "is_initialized", lambda: False)  # tests before it may have one
    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster, "silence_ray", lambda: None)
    monkeypatch.setattr(sys, "argv", ["inspect"])
    with pytest.raises(SystemExit) as ended:
        program.main(Nothing, run, "inspect")
    assert ended.value.code == TERMINATED
    said = "terminated; the same command resumes"
    out, err = capfd.readouterr()
    assert json.loads(out) == {"job": "inspect", "exit_code": TERMINATED, "error": said}
    assert err == f"python -m jobs.inspect: {said}\n"
    assert [signal.SIGTERM in mask for mask in masks] == [outlives]
    assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


def test_sigterm_while_ray_starts_is_one_line(monkeypatch, capfd):
    def run(config):
        sys.exit(signal.SIGTERM)  # as Ray's handler does

    monkeypatch.setattr(sys, "argv", ["inspect"])
    with pytest.raises(SystemExit) as ended:
        program.main(Nothing, run, "inspect")
    assert ended.value.code == TERMINATED
    assert "terminated; the same command resumes" in capfd.readouterr().err


def test_a_submitted_job_outlives_the_folder_into_which_ray_has_unpacked_it(tmp_path):
    folder = tmp_path / "working_dir_files" / "_ray_pkg_1"
    for path, file in packages.files().items():
        if path.endswith(".py"):
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, folder / path)
    (folder / "notes.txt").write_text("mine")
    done = subprocess.run(
        [sys.executable, "-c", SUBMITTED, folder], cwd=folder, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(folder)},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["notes"] == "mine"


def test_a_ray_that_starts_too_slowly_is_tried_twice(monkeypatch):
    tried = []

    def init(*arguments, **options):
        tried.append(arguments)
        raise Exception("The current node timed out during startup. This could happen because")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(Stopped, match="Ray did not start within 30 s, twice"):
        cluster._start_ray("local", {})
    assert len(tried) == 2
