"""Sends a service to a Ray cluster, and waits until it runs."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from typing import Any

from jobs import dashboard, packages, program
from pipeline import storage
from pipeline.config import BadInput, Stopped, require

_ADDRESS = "RAY_DASHBOARD_ADDRESS"
_DECIDED = ("RUNNING", "DEPLOY_FAILED")  # what is unhealthy may recover
_LOOK_EVERY_S = 2.0


@dataclass(frozen=True, kw_only=True)
class Config:
    """Deploys the applications of a file of Ray Serve, and waits until all of them run. Those of an earlier
    file that this one does not name are removed.

    `serve deploy` sends the same file, and succeeds before the first replica starts. A `working_dir` that
    ends in / is a folder: this checkout's packages are written there as an archive, which replicas unpack.
    """

    POSITIONAL = "file"

    file: str
    """YAML with `applications`, such as serve/config.cluster.yaml."""
    address: str = ""
    """The cluster's dashboard, http://…:8265; empty: RAY_DASHBOARD_ADDRESS, or this machine's."""
    timeout_s: float = 1800.0
    """Fail if an application does not run after this many seconds. Nodes may have to start first."""

    def __post_init__(self) -> None:
        require(self.timeout_s > 0, "timeout_s", self.timeout_s, "> 0")


def run(config: Config) -> program.Summary:
    settings = _read_settings(config.file)
    names = sorted(application["name"] for application in settings["applications"])
    address = config.address or os.environ.get(_ADDRESS, "") or "http://127.0.0.1:8265"

    dashboard.connect(dashboard.applications, address)
    _send_code(settings)
    try:
        dashboard.applications(address, settings)
    except dashboard.LOST as error:
        raise BadInput(f"--address {address}: not taken ({_last_line(str(error))})") from None
    problems = _wait_for(address, names, config.timeout_s)
    if problems:
        raise Stopped("; ".join(f"{name}: {problem}" for name, problem in problems.items()))
    return {"applications": names, "address": address}


def _read_settings(file: str) -> dict[str, Any]:
    """The file's settings. Raises BadInput where it has no applications with names."""
    import yaml

    try:
        settings = yaml.safe_load(storage.read_bytes(file))
    except OSError as error:  # not there, or a folder
        raise BadInput(f"{file}: cannot be read: {' '.join(str(error).split())}") from None
    except yaml.YAMLError as error:
        raise BadInput(f"{file}: {' '.join(str(error).split())}") from None
    applications = settings.get("applications") if isinstance(settings, dict) else None
    is_complete = isinstance(applications, list) and all(
        isinstance(application, dict) and application.get("name") for application in applications
    )
    if not applications or not is_complete:
        raise BadInput(f"{file}: no `applications` with names; serve/config.cluster.yaml has one")
    return dict(settings)


def _send_code(settings: dict[str, Any]) -> None:
    """Puts the archive's URI in place of each folder that is to have it. Its name depends on its bytes: Ray
    reads an archive once, and takes another one of the same name for the one that it has."""
    archive = packages.archive()
    name = f"polyrank-{hashlib.sha256(archive).hexdigest()[:16]}.zip"
    for application in settings["applications"]:
        environment = application.get("runtime_env") or {}
        folder = str(environment.get("working_dir", ""))
        if folder.endswith("/"):
            environment["working_dir"] = uri = f"{folder}{name}"
            if not storage.exists(uri):
                storage.write_bytes(uri, archive)
            print(f"{application['name']}: its code is {uri}", flush=True)


def _wait_for(address: str, names: list[str], timeout_s: float) -> dict[str, str]:
    """Waits until each application runs or has failed; returns the problem of each one that does not run."""
    end, statuses = time.monotonic() + timeout_s, dict[str, str]()
    while True:
        try:
            applications = dashboard.applications(address)
        except dashboard.LOST as error:  # such as of a head that restarts
            unreachable = {"status": "UNREACHABLE", "message": str(error)}
            applications = {name: unreachable for name in names}
        problems = dict[str, str]()
        for name in names:
            application = applications.get(name, {"status": "NOT_STARTED"})
            status, message = application["status"], application.get("message", "")
            if statuses.get(name) != status:
                print(f"{name}: {status}", flush=True)
            statuses[name] = status
            if status != "RUNNING":
                problems[name] = ": ".join(filter(None, [status, _last_line(message)]))
        if {*statuses.values()} <= {*_DECIDED} or time.monotonic() > end:
            return problems
        time.sleep(_LOOK_EVERY_S)


def _last_line(message: str) -> str:
    """Where a message of Ray says what is wrong, after a traceback."""
    return (message.strip().splitlines() or [""])[-1].strip()


if __name__ == "__main__":
    program.main(Config, run, "deploy")
