"""Sends a job to a Ray cluster: `python -m jobs.submit --wait -- embed_pool --config reembed.yaml`.

The words after `--` are those that you would type after `python -m jobs.` on this machine. The code travels
with the settings files that the command names. Inputs and outputs are URIs that all nodes reach.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from jobs import dashboard, packages, program, workflow
from jobs.__main__ import VERBS
from jobs.dashboard import first_line
from pipeline import storage
from pipeline.config import BadInput, Stopped, choice_options, require
from pipeline.provenance import git_revision

_JOB = ("python", "-m")
# They say which server, registry, store and hub the command means. Secrets, and paths of this machine, stay
# here unless --env names them. A bucket's region is looked up.
_EXPERIMENT = "MLFLOW_EXPERIMENT_NAME"
_STORES = ("MLFLOW_S3_ENDPOINT_URL", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "GOOGLE_BASE_URL",
           "AZURE_STORAGE_ENDPOINT", "AZURE_STORAGE_ACCOUNT_NAME")  # fmt: skip
_ADDRESSES = ("MLFLOW_TRACKING_URI", "MLFLOW_REGISTRY_URI", *_STORES, "HF_ENDPOINT")
_ACTIVE = ("PENDING", "RUNNING")
_MAX_STARTS = 3
# Of a head whose agent starts; that took over a minute on two busy cores.
_START_S, _NO_AGENT = 300.0, "No available agent"
_PATIENCE_S = 600.0  # a head that restarts is back by then
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Sends a job to a Ray cluster, and prints its output with --wait.

    The job and its options stand after `--`. Its id is a key, so that a scheduler may try again: the same
    command with the id of a job that runs follows that job, with the id of one that has succeeded it does
    nothing, and with the id of one that failed it resumes it.
    """

    AFTER_DASHES = "command"
    command: tuple[str, ...] = ()
    """The words after `--`: the verb and the options of the job."""
    address: str = ""
    """The cluster's dashboard, http://…:8265; empty: RAY_API_SERVER_ADDRESS, or port 8265 of this machine."""
    name: str = ""
    """The job's id; empty: <verb>-<time in UTC>."""
    wait: bool = False
    """Print the job's output until it ends, and exit with its code. A job whose process dies without a
    word is sent again, twice."""
    env: tuple[str, ...] = ()
    """Names of variables of this environment that the job gets too, such as MLFLOW_TRACKING_TOKEN. Whoever
    may see the cluster's dashboard sees their values. The job always gets MLFLOW_TRACKING_URI,
    MLFLOW_REGISTRY_URI, MLFLOW_EXPERIMENT_NAME, and the addresses of stores and hubs (AWS_ENDPOINT_URL,
    HF_ENDPOINT)."""
    max_upload_mib: int = 50
    """Larger uploads are refused: each node downloads them."""
    dry_run: bool = False
    """Print what would be sent, and ask no cluster."""

    def __post_init__(self) -> None:
        is_allowed = re.fullmatch(r"[A-Za-z0-9_.-]*", self.name) is not None
        require(is_allowed, "name", self.name, "letters, digits, -, _ and .")
        require(self.max_upload_mib >= 1, "max_upload_mib", self.max_upload_mib, ">= 1")


@dataclass(frozen=True)
class _Parcel:
    """The upload to the cluster."""

    entrypoint: str
    files: dict[str, Path] = field(repr=False)
    """Files by their path below the job's working directory."""
    environment: dict[str, str] = field(repr=False)

    @property
    def bytes(self) -> int:
        return sum(file.stat().st_size for file in self.files.values())


def run(config: Config) -> program.Summary:
    parcel = _pack(config)
    name = config.name or f"{config.command[0]}-{datetime.now(UTC):%Y%m%dT%H%M%S}"
    summary: program.Summary = {
        "name": name,
        "entrypoint": parcel.entrypoint,
        "files": len(parcel.files),
        "bytes": parcel.bytes,
        "environment": sorted(parcel.environment),
    }
    if config.dry_run:
        folders = Counter(file.partition("/")[0] for file in parcel.files)
        for folder, count in sorted(folders.items()):
            print(folder if folder in parcel.files else f"{folder}/: {count} files")
        return {**summary, "submitted": False}
    url = config.address or os.environ.get("RAY_API_SERVER_ADDRESS") or "http://127.0.0.1:8265"
    client = _connect(url)
    summary["submitted"], failure = False, ""
    for start in range(1, _MAX_STARTS + 1):
        job_id, status = _find(client, name, parcel.entrypoint)
        summary["name"] = job_id
        if status:
            _say(f"{job_id} is {status}; another --name sends it again")
        else:
            _submit(client, job_id, parcel)
            summary["submitted"] = True
        if status == "SUCCEEDED" or not config.wait:
            return {**summary, **({"status": status} if status else {})}
        code_of_death = _follow(url, job_id, config.command[0])
        if code_of_death is None:
            return {**summary, "status": "SUCCEEDED"}
        died = f"its process died (exit code {code_of_death}, start {start} of {_MAX_STARTS})"
        failure = f"{job_id}: FAILED, {died}"
        if start < _MAX_STARTS:
            _say(f"{program.command_of_verb.format('submit')}: {failure}")
    raise Stopped(failure)


def _pack(config: Config) -> _Parcel:
    """Raises BadInput for an unknown job, for files that cannot be uploaded, and for too large an upload."""
    verb, *arguments = config.command or ("",)
    verbs = sorted({*VERBS} - {"submit"})
    require(verb in verbs, "--", verb, f"a job: {', '.join(verbs)}")
    files = packages.files()
    step = workflow.Step("", (*_JOB, f"jobs.{verb}", *arguments))
    for path in _path_words(step):
        if not path or Path(path).is_absolute() or not _exists(path):
            continue
        if Path(path).is_dir():
            raise BadInput(f"{path}: a folder of this machine; allowed: a URI that all nodes reach, such "
                           "as s3://…, or an absolute path that all nodes have")  # fmt: skip
        is_inside = Path(path).resolve().is_relative_to(Path.cwd())
        require(is_inside, "--", path, "files below the working directory")
        files[Path(path).resolve().relative_to(Path.cwd()).as_posix()] = Path(path)
    for name in _settings_of_workflow(step):
        files[name] = Path(name)
    entrypoint = shlex.join(step.command)
    parcel = _Parcel(entrypoint, files, environment(config.env))
    if parcel.bytes > config.max_upload_mib << 20:
        largest = max(files, key=lambda name: files[name].stat().st_size)
        raise BadInput(
            f"the upload has {parcel.bytes / 2**20:.1f} MiB (largest: {largest}), more than "
            f"--max-upload-mib {config.max_upload_mib}; put data where all nodes reach it and name its URI"
        )
    _check_outputs(step)
    return parcel


def _check_outputs(step: workflow.Step) -> None:
    """Raises BadInput for options that the job does not take, and for outputs below its working directory,
    which the cluster removes."""
    config = step.config()
    if step.verb == "workflow":
        for inner_step in workflow.read_steps(config.file, config.set):
            if inner_step.verb:  # other programs need be installed on the cluster alone
                workflow.check(inner_step)
                _check_outputs(inner_step)
    for option in fields(config):
        uri = getattr(config, option.name) if option.metadata.get("output") else ""
        is_lost = bool(uri) and storage.is_local(uri) and not Path(uri).is_absolute()
        require(not is_lost, option.name, uri,
                "a URI that all nodes reach, such as s3://…, or an absolute path")  # fmt: skip


def _path_words(step: workflow.Step) -> Iterator[str]:
    """The values of a job's options that may be paths; `test` in `--split test` is none."""
    choices, option = choice_options(step.job.Config), ""
    for word in step.options:
        value = word
        if word.startswith("--"):
            option, _, value = word.partition("=")
            option = option[2:].replace("-", "_")
        if option not in choices:
            yield value


def _exists(path: str) -> bool:
    try:
        return Path(path).exists()
    except OSError:  # a text that is longer than the name of a file may be
        return False


def _settings_of_workflow(step: workflow.Step) -> set[str]:
    """Files below the working directory that the commands of a workflow name, its variables replaced."""
    if step.verb != "workflow":
        return set()
    config, names = step.config(), set[str]()
    for inner_step in workflow.read_steps(config.file, config.set):
        words = {word.partition("=")[2] or word for word in inner_step.command}
        names |= {
            word for word in words
            if word.endswith((".yaml", ".yml", ".txt")) and not Path(word).is_absolute()
            and ".." not in Path(word).parts and Path(word).is_file()
        } | _settings_of_workflow(inner_step)  # fmt: skip
    return names


def environment(names: tuple[str, ...] = ()) -> dict[str, str]:
    """The variables that the job gets. Raises BadInput for one that this environment lacks, and for one with
    a password that `names` does not ask for."""
    for name in names:
        if name not in os.environ:
            raise BadInput(f"--env {name}: no such variable in this environment")
    variables = {name: os.environ[name] for name in (*names, _EXPERIMENT) if os.environ.get(name)}
    for name in _ADDRESSES:
        value = os.environ.get(name, "")
        if not value or name in names:
            continue
        if re.search(r"://[^/@]*:[^/@]*@", value):
            raise BadInput(f"{name}: has a password, which the cluster's dashboard would show; allowed: an "
                           f"address without one, or --env {name}")  # fmt: skip
        if reason := _stays_here(name, value):
            _say(f"{name} is not sent: {value} is {reason}")
        else:
            variables[name] = value
    if "MLFLOW_TRACKING_URI" not in variables:
        _say("the job logs to a file in its folder, which the cluster removes; set MLFLOW_TRACKING_URI to "
             "the address of a server to keep its runs")  # fmt: skip
    if revision := git_revision():
        variables["POLYRANK_GIT_REVISION"] = revision
    return variables


def _stays_here(name: str, value: str) -> str:
    """Why an address means nothing on other machines; "": it does."""
    if value.startswith(("sqlite:", "file:", "/", ".")):
        return "a file of this machine"
    # Such as a forwarded port of a store that the nodes reach by another name.
    is_loopback = urlsplit(value).hostname in ("localhost", "127.0.0.1", "::1")
    return "a port of this machine" if name in _STORES and is_loopback else ""


def _connect(url: str) -> Any:
    """Raises Stopped where no cluster answers; BadInput where it refuses the token or runs another Ray."""
    cluster_version, client = dashboard.connect(
        lambda url: (dashboard.ray_version(url), _job_client(url)), url
    )
    import ray

    if cluster_version != ray.__version__:
        raise BadInput(f"--address {url}: the cluster runs Ray {cluster_version}, this machine "
                       f"{ray.__version__}; allowed: the same version")  # fmt: skip
    return client


def _job_client(url: str) -> Any:
    from ray.job_submission import JobSubmissionClient

    return JobSubmissionClient(url)


def _find(client: Any, name: str, entrypoint: str) -> tuple[str, str]:
    """(the job's id, its status; "": it is not sent yet): the name, or name-2, name-3, … where the ones
    before have failed. Raises BadInput where another command has the id."""
    job_of_id = {str(job.submission_id): job for job in client.list_jobs()}
    job_id, number = name, 1
    while job := job_of_id.get(job_id):
        status = str(job.status.value)
        if status in (*_ACTIVE, "SUCCEEDED"):
            if job.entrypoint != entrypoint:
                raise BadInput(f"--name {name}: {job_id} is {status}, and is `{job.entrypoint}`; choose "
                               "another name")  # fmt: skip
            return job_id, status
        number += 1
        job_id = f"{name}-{number}"
    if number > 1:
        _say(f"{job_id} resumes {name}")
    return job_id, ""


def _submit(client: Any, job_id: str, parcel: _Parcel) -> None:
    """Raises Stopped where the cluster does not take the job, which may pass; BadInput for a wrong one."""
    with tempfile.TemporaryDirectory() as folder:
        for path, file in parcel.files.items():
            target = Path(folder) / path
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
        began, is_said = time.monotonic(), False
        while True:
            try:
                client.submit_job(
                    entrypoint=parcel.entrypoint,
                    submission_id=job_id,
                    runtime_env={"working_dir": folder, "env_vars": parcel.environment},
                    metadata={"revision": parcel.environment.get("POLYRANK_GIT_REVISION", "")},
                )
                break
            except ValueError as error:
                raise BadInput(f"--name {job_id}: not taken ({first_line(error)})") from None
            except dashboard.LOST as error:
                if _NO_AGENT not in str(error) or time.monotonic() > began + _START_S:
                    raise Stopped(f"--name {job_id}: not taken ({first_line(error)})") from None
            if not is_said:
                _say("waits for the head's agent, which takes jobs")
                is_said = True
            time.sleep(1)
    _say(f"{job_id} is submitted")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _follow(url: str, name: str, verb: str) -> int | None:
    """Prints what the job prints until its end.

    Returns the exit code of a process that died without a word; None: the job has succeeded. Raises Stopped
    with the job's exit code for one that failed otherwise, such as a job that was stopped.
    """
    try:
        job, output = _wait(url, name)
    except KeyboardInterrupt:
        _say(f"\n{name} goes on; `ray job stop {name}` ends it")
        sys.exit(130)
    status, code = job["status"], job.get("driver_exit_code")
    if status == "SUCCEEDED":
        return None
    if status == "FAILED" and code is not None and not program.said_by_job(output, verb, code):
        return int(code)
    is_of_ray = status == "FAILED" and code is None  # such as of a head without memory
    error = job["message"] if is_of_ray else program.summary_of(output, verb).get("error", "")
    stopped = Stopped(": ".join(filter(None, [name, status, error])))
    stopped.exit_code = code or 1
    raise stopped


def _wait(url: str, name: str) -> tuple[dict[str, Any], str]:
    """Ray's facts about the job once it has ended, and its output, which is printed as it comes.

    A lost connection ends neither the job nor this. Raises Stopped where the cluster does not answer for
    minutes.
    """
    printed, lost_since = 0, None
    while True:
        began = time.monotonic()
        try:
            job, output = dashboard.job(url, name)
        except dashboard.LOST as error:
            reason = first_line(error)
            if lost_since is None:
                lost_since = began
                _say(f"the connection to {name} is lost ({reason}); connecting again")
            if began - lost_since > _PATIENCE_S:
                raise Stopped(
                    f"{name}: the cluster has not answered for {_PATIENCE_S / 60:.0f} minutes ({reason}); "
                    f"the job may go on: `ray job logs --follow {name}`"
                ) from None
        else:
            lost_since = None
            print(output[printed:], end="", flush=True)
            printed = len(output)
            if job["status"] not in _ACTIVE:
                return job, output
        # Each answer has the whole output, so a long one is asked for less often.
        time.sleep(max(_LOOK_EVERY_S, 10 * (time.monotonic() - began)))


if __name__ == "__main__":
    program.main(Config, run, "submit")
