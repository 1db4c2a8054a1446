"""Submits a command to a Ray cluster at the times of a cron line, for clusters without a scheduler.

    python -m jobs.schedule --cron "0 3 * * *" --name reembed-articles \\
        --command "python -m jobs.embed_pool --config jobs/schedules/reembed.yaml"

One run at a time: where one is still going, the next is missed, and that is said. What has been submitted
is known from the cluster alone, by the runs' ids, such as reembed-articles-20261121T0300: a scheduler that
is started again, or a second one beside it, submits nothing twice and says what was missed.
"""

from __future__ import annotations

import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from croniter import croniter

from jobs import program, submit
from pipeline.config import BadInput, require

_STAMP = "%Y%m%dT%H%M"
_GOING = ("PENDING", "RUNNING")
_MEMORY = timedelta(days=31)  # what was missed before is not told
_NO_ANSWER = (OSError, RuntimeError)  # what the client raises where nobody answers, or refuses


@dataclass(frozen=True, kw_only=True)
class Config:
    """Submits a command to a Ray cluster at the times of a cron line.

    It goes on until it is told to stop (SIGTERM, Ctrl-C).
    """

    cron: str
    """Minute, hour, day of the month, month, day of the week: "0 3 * * *" is every night at 3."""
    command: str
    """What is submitted, as one word: "python -m jobs.embed_pool --config …"."""
    name: str = "reembed"
    """Runs are called <name>-<time in UTC>."""
    timezone: str = "UTC"
    """Of the cron line, such as Europe/Berlin."""
    address: str = ""
    """Of the cluster's dashboard, http://…:8265; empty: RAY_API_SERVER_ADDRESS."""
    working_dir: str = "."
    """Folder whose code a run uses; empty: what the cluster has."""
    catch_up: bool = False
    """At the start, one run at once for all that were missed."""
    poll_s: float = 15.0
    """How often the cluster is looked at."""

    def __post_init__(self) -> None:
        require(croniter.is_valid(self.cron) and len(self.cron.split()) == 5, "cron", self.cron,
                "five fields of cron, such as '0 3 * * *'")  # fmt: skip
        require(bool(shlex.split(self.command)), "command", self.command, "a command")
        require(bool(self.name) and self.name.replace("-", "").replace("_", "").isalnum(), "name",
                self.name, "letters, digits, - and _")  # fmt: skip
        require(self.poll_s > 0, "poll_s", self.poll_s, "above 0")
        try:
            ZoneInfo(self.timezone)
        except (ZoneInfoNotFoundError, ValueError):
            require(False, "timezone", self.timezone, "a zone's name, such as Europe/Berlin")


class Scheduler:
    """Decides, whenever it is asked, what is due, and submits it."""

    def __init__(self, config: Config, client: Any, now: datetime) -> None:
        """Says what has been missed since the last run that the cluster knows of."""
        self.submitted: list[str] = []
        self.missed: list[str] = []
        self._config = config
        self._client = client
        self._waiting: datetime | None = None
        self._problem = ""
        known = max(self._runs(), default="")
        self._watched = known
        self._say(f"the last run is {known}" if known else "the cluster knows of no run yet")
        self._last = max(_time_of(known), now - _MEMORY) if known else now
        due = list(_times(config, self._last, now))
        for time in due:
            self._miss(time, "no scheduler was there")
        if due and config.catch_up:
            self._waiting = due[-1]
        self._last = now

    def step(self, now: datetime) -> None:
        """Submits what is due; what the cluster does not take is tried again until the next is due."""
        for time in _times(self._config, self._last, now):
            if self._waiting:
                self._miss(self._waiting, self._problem or "the next one is due")
            self._waiting, self._problem = time, ""
        self._last = now
        try:
            runs = self._runs()
            self._watch(runs)
            if self._waiting:
                self._submit(self._waiting, runs)
                self._waiting = None
        except _NO_ANSWER as error:
            if not self._problem:
                self._problem = f"the cluster does not answer: {_first_line(error)}"
                self._say(self._problem)

    def next_time(self) -> datetime:
        return next(_times(self._config, self._last, datetime.max.replace(tzinfo=UTC)))

    def _runs(self) -> dict[str, str]:
        """Status of the runs that the cluster knows of."""
        ids = {str(job.submission_id): str(job.status.value) for job in self._client.list_jobs()}
        return {run: status for run, status in ids.items() if self._is_ours(run)}

    def _is_ours(self, run: str) -> bool:
        name, _, stamp = run.rpartition("-")
        return name == self._config.name and len(stamp) == 13 and stamp.replace("T", "").isdecimal()

    def _submit(self, time: datetime, runs: dict[str, str]) -> None:
        run = _id_of(self._config, time)
        going = [other for other, status in runs.items() if status in _GOING]
        if run in runs:
            self._say(f"{run} has been submitted by another scheduler")
        elif going:
            self._miss(time, f"{going[0]} is still going")
        else:
            folder = self._config.working_dir
            self._client.submit_job(
                entrypoint=self._config.command,
                submission_id=run,
                runtime_env={
                    **({"working_dir": folder} if folder else {}),
                    "env_vars": submit.environment(),
                },
                metadata={"schedule": self._config.name},
            )
            self._say(f"{run} is submitted")
            self.submitted.append(run)
            self._watched = run

    def _watch(self, runs: dict[str, str]) -> None:
        """Says how the last run has ended."""
        status = runs.get(self._watched, "gone from the cluster's memory")
        if self._watched and status not in _GOING:
            self._say(f"{self._watched}: {status}")
            self._watched = ""

    def _miss(self, time: datetime, why: str) -> None:
        self.missed.append(_id_of(self._config, time))
        self._say(f"missed {self.missed[-1]}: {why}")

    def _say(self, what: str) -> None:
        print(f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} {self._config.name}: {what}", flush=True)


def run(config: Config) -> program.Summary:
    from ray.job_submission import JobSubmissionClient

    stop = threading.Event()
    with _told_by_signals(stop):
        try:
            client = JobSubmissionClient(config.address or None)
            scheduler = Scheduler(config, client, datetime.now(UTC))
        except _NO_ANSWER as error:
            raise BadInput(
                f"--address {config.address}: no cluster answers ({_first_line(error)})"
            ) from None
        wait = 0.0
        while not stop.wait(wait):
            scheduler.step(datetime.now(UTC))
            left = scheduler.next_time() - datetime.now(UTC)
            wait = min(max(left.total_seconds(), 0), config.poll_s)
    print("stopped; a run that is going goes on", flush=True)
    return {"submitted": scheduler.submitted, "missed": scheduler.missed}


@contextmanager
def _told_by_signals(stop: threading.Event) -> Iterator[None]:
    numbers = (signal.SIGTERM, signal.SIGINT)
    before = [signal.signal(number, lambda *_: stop.set()) for number in numbers]
    try:
        yield
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _times(config: Config, after: datetime, until: datetime) -> Iterator[datetime]:
    """The cron line's times after one moment and up to another, in UTC.

    An hour that comes twice, where clocks are set back, counts once.
    """
    times = croniter(config.cron, after.astimezone(ZoneInfo(config.timezone)))
    while (time := times.get_next(datetime)).astimezone(UTC) <= until:
        if not time.fold:
            yield time.astimezone(UTC)


def _id_of(config: Config, time: datetime) -> str:
    return f"{config.name}-{time:{_STAMP}}"


def _time_of(run: str) -> datetime:
    return datetime.strptime(run.rpartition("-")[2], _STAMP).replace(tzinfo=UTC)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


if __name__ == "__main__":
    program.main(Config, run, "schedule")
