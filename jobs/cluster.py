"""The one place that starts or joins a Ray cluster; jobs and tests use it."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from jobs import dashboard
from pipeline.config import BadInput, Stopped, require
from pipeline.engine import executors

_ROOT = Path(__file__).parents[1]
_STARTS_TOO_SLOWLY = "timed out during startup"
"""What Ray says when its own processes have not started after 30 s, which no setting changes."""


@contextmanager
def session(
    cpus: int | None = None,
    dashboard: bool = False,
    for_tasks: bool = False,
    outlives_sigterm: bool = False,
) -> Iterator[str]:
    """A connection to Ray: the one there is, the cluster at RAY_ADDRESS, or one of our own.

    Yields the dashboard's address, "" where there is none.

    `cpus`: logical CPUs of a cluster of our own; by default as many as the machine has. Ray gives
    each task and actor as many threads (OMP_NUM_THREADS) as CPUs, so nothing is oversubscribed.
    `for_tasks`: only tasks, actors and trainings will use it, so that nothing is started while those run
    in this process (`pipeline.engine.executors`).
    `outlives_sigterm`: the processes of a cluster of our own get no SIGTERM, so that a training can save its
    step. The cluster then ends in 5 s instead of 1: Ray sends SIGTERM to each, and SIGKILL a second later.

    `ray job submit` sets RAY_ADDRESS, so a submitted job runs on the cluster it was sent to.
    """
    if for_tasks and executors.current():
        yield ""
        return
    require_visible_packages()

    import ray

    if ray.is_initialized():
        yield ""
        return
    options: dict[str, Any] = {"logging_level": logging.ERROR, "log_to_driver": False}
    address = os.environ.get("RAY_ADDRESS")
    if not address:
        options |= {"num_cpus": cpus or os.cpu_count(), "include_dashboard": dashboard}
    with _without_line_of_log_level(), _sigterm_is_the_jobs(outlives_sigterm):
        context = _start_ray(address or "local", options)
    silence_ray()
    try:
        yield f"http://{context.dashboard_url}" if context.dashboard_url else ""
    finally:
        ray.shutdown()


def require_visible_packages() -> None:
    """Raises BadInput for a module in the working directory that has the name of a package of ours: Ray's
    processes look there first."""
    if "working_dir_files" in _ROOT.parts:  # of a submitted job, which works in a copy of its code
        return
    for name in ("pipeline", "jobs", "serve"):
        for file in (Path(f"{name}.py"), Path(name, "__init__.py")):
            if file.exists() and not ((_ROOT / file).exists() and file.samefile(_ROOT / file)):
                raise BadInput(f"{file}: in the working directory hides polyrank's package {name} from Ray's "
                               "processes; rename it, or type the command in another folder")  # fmt: skip


def _start_ray(address: str, options: dict[str, Any]) -> Any:
    """Tries twice: 30 s are short where other work has the cores."""
    import ray

    dashboard.require_listener("RAY_ADDRESS", address)
    for _ in range(2):
        try:
            return ray.init(address, **options)
        except ConnectionError as error:
            if address == "local":
                raise
            raise Stopped(f"RAY_ADDRESS {address}: {dashboard.first_line(error)}") from None
        except Exception as error:
            if _STARTS_TOO_SLOWLY not in str(error):
                raise
            ray.shutdown()
    raise Stopped(
        "Ray did not start within 30 s, twice: other work has the cores of this machine, or Ray's own "
        "processes fail (/tmp/ray/session_latest/logs says why); the same command tries again"
    )


@contextmanager
def _sigterm_is_the_jobs(alone: bool) -> Iterator[None]:
    """Keeps this process's handler of SIGTERM: Ray's own one ends a job with exit code 15 and no word.

    `alone`: processes that are started meanwhile, and all that these start, get no SIGTERM. systemd, Slurm,
    `timeout` and `kill -- -PGID` send it to them, too. Ray blocks SIGINT in the same way, so that Ctrl-C is
    the job's alone. If the job dies, the kernel ends them.
    """
    handler = signal.getsignal(signal.SIGTERM)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM} if alone else ())
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


@contextmanager
def _without_line_of_log_level() -> Iterator[None]:
    """Holds back standard error, and then prints it without the line in which Ray's C++ code says that it has
    read RAY_BACKEND_LOG_LEVEL, which cannot be turned off."""
    sys.stderr.flush()
    terminal = os.dup(2)
    with tempfile.TemporaryFile() as captured:
        os.dup2(captured.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(terminal, 2)
            os.close(terminal)
            captured.seek(0)
            for line in captured:
                if b"Set ray log level from environment variable" not in line:
                    os.write(2, line)


def require_free(host: str, port: int) -> None:
    """Raises BadInput where no server can listen, and for a port in use: Serve would listen too, and either
    of the two would answer."""
    require(1 <= port <= 65535, "port", port, "1 to 65535")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        socket.create_server((host, port), family=family).close()
    except OSError as error:
        is_used = error.errno == errno.EADDRINUSE
        reason = "in use; choose another" if is_used else f"{host}: {error.strerror}"
        raise BadInput(f"--port {port}: {reason}") from None


def is_open(address: str, port: int) -> bool:
    """Whether a server listens there."""
    with socket.socket() as probe:
        return probe.connect_ex((address, port)) == 0


def answers(url: str) -> bool:
    """Whether a server answers 200 there."""
    with suppress(OSError), urllib.request.urlopen(url, timeout=5) as response:
        return bool(response.status == 200)
    return False


def silence_ray() -> None:
    """Leaves the terminal to the jobs' own progress bars.

    What workers print is in Ray's log files and dashboard; what they raise reaches the driver.
    """
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    for name in ("ray.data", "ray.train", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
