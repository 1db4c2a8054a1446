"""Clusters that start from a head without cores, as cluster.yaml makes them, on this machine."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

import psutil
import pytest
from ray.cluster_utils import Cluster

from tests.cluster.stores import Azure, Store, gcs_application, s3_application
from tests.helpers import free_port
from tests.serve.conftest import tiny_classifier, tiny_pool  # noqa: F401, fixtures

ROOT = Path(__file__).parents[2]
# Ray's fake provider starts raylets instead of machines. Its autoscaler is the real one (version 2).
_PROVIDER = "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider"
_STORE = {"object_store_memory": 80 << 20, "include_log_monitor": False}
_HEAD_ID = "f" * 51 + "00000"
_NOTHING = ("initialization_commands", "setup_commands", "head_setup_commands",
            "worker_setup_commands", "head_start_ray_commands", "worker_start_ray_commands",
            "cluster_synced_files", "rsync_exclude", "rsync_filter")  # fmt: skip


@contextmanager
def head(
    node_types: dict[str, Any] | None = None,
    jobs_port: int = 0,
    cpus: int = 2,
    gpus: int = 0,
    resources: Mapping[str, float] = MappingProxyType({}),
    **environment: str,
) -> Iterator[str]:
    """The address of a head without cores, which starts nodes of these types for tasks that wait.

    `jobs_port`: where its dashboard takes submitted jobs; 0: it has none. Without `node_types` the head
    itself has `cpus`, `gpus` and `resources`.
    """
    folder = Path(tempfile.mkdtemp(prefix="prc", dir="/tmp"))  # paths of sockets are short
    port, agent_port = free_port(), free_port()
    address = f"127.0.0.1:{port}"
    command = [
        *(sys.executable, "-m", "ray.scripts.scripts", "start", "--head", f"--port={port}"),
        f"--dashboard-agent-listen-port={agent_port}",  # the default is one for all Rays of a machine
        *(f"--num-gpus={gpus}", "--node-ip-address=127.0.0.1", f"--temp-dir={folder}"),
        *(f"--num-cpus={0 if node_types else cpus}", f"--object-store-memory={100 << 20}"),
        f"--resources={json.dumps(dict(resources))}",
        "--include-log-monitor=false",  # nobody reads here what it sends to drivers
    ]
    more = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_USAGE_STATS_ENABLED": "0",
            # Jobs run `python`, which on a node is that of its environment.
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}  # fmt: skip
    if node_types:
        config = folder / "autoscaling.json"
        config.write_text(json.dumps(_autoscaling(address, node_types)))
        command.append(f"--autoscaling-config={config}")
        more |= {"RAY_FAKE_CLUSTER": "1", "AUTOSCALER_UPDATE_INTERVAL_S": "1",
                 "RAY_enable_autoscaler_v2": "1", "RAY_CLOUD_INSTANCE_ID": _HEAD_ID,
                 "RAY_NODE_TYPE_NAME": "ray.head.default",
                 "RAY_OVERRIDE_NODE_ID_FOR_TESTING": _HEAD_ID}  # fmt: skip
    if jobs_port:
        command += ["--dashboard-host=127.0.0.1", f"--dashboard-port={jobs_port}"]
    else:
        command.append("--include-dashboard=false")
    try:
        subprocess.run(
            command, env={**os.environ, **more, **environment}, check=True, capture_output=True
        )
        yield address
    finally:
        end_processes_of(folder)
        shutil.rmtree(folder, ignore_errors=True)


def _autoscaling(address: str, node_types: dict[str, Any]) -> dict[str, Any]:
    types = {
        name: {"node_config": {}, **about, "resources": {
            "object_store_memory": 100 << 20, **about["resources"]}}
        for name, about in node_types.items()
    }  # fmt: skip
    types["ray.head.default"] = {"resources": {"CPU": 0}, "node_config": {}, "max_workers": 0}
    return {
        "cluster_name": "fake", "max_workers": 4, "upscaling_speed": 10.0,
        "idle_timeout_minutes": 5, "auth": {}, "file_mounts": {},
        "provider": {"type": "external", "module": _PROVIDER, "gcs_address": address,
                     "use_node_id_as_ip": True, "disable_node_updaters": True,
                     "disable_launch_config_check": True, "launch_multiple": True,
                     "head_node_id": _HEAD_ID},
        "available_node_types": types, "head_node_type": "ray.head.default",
        "file_mounts_sync_continuously": False,
        **{name: [] for name in _NOTHING},
    }  # fmt: skip


def end_processes_of(folder: Path) -> None:
    """Ray's own `ray stop` would end every Ray of the machine."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        found = [process for process in psutil.process_iter(["cmdline"])
                 if any(str(folder) in word for word in process.info["cmdline"] or ())]  # fmt: skip
        if not found:
            return
        for process in found:
            with suppress(psutil.NoSuchProcess):
                process.send_signal(signal.SIGKILL)
        psutil.wait_procs(found, timeout=2)


@pytest.fixture(scope="module")
def from_zero() -> Iterator[str]:
    """A cluster that starts up to 2 nodes of 2 cores, and none with a GPU."""
    types = {"cpu": {"resources": {"CPU": 2}, "min_workers": 0, "max_workers": 2}}
    with head(types, jobs_port=free_port()) as address:
        yield address


@pytest.fixture(scope="session")
def drive() -> Callable[..., subprocess.CompletedProcess[str]]:
    """`drive(address, source)`: runs a driver of a cluster in a process of its own."""

    def run(address: str, source: str) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "RAY_ADDRESS": address, "PYTHONPATH": str(ROOT),
                       "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_AUTH_MODE": "token"}  # fmt: skip
        return subprocess.run(
            [sys.executable, "-c", source], env=environment, cwd=ROOT,
            capture_output=True, text=True, timeout=200,
        )  # fmt: skip

    return run


@dataclass
class Nodes:
    """A head without cores, and nodes of one core."""

    cluster: Cluster
    workers: list[Any] = field(default_factory=list)

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def add(self) -> None:
        self.workers.append(self.cluster.add_node(num_cpus=1, include_dashboard=False, **_STORE))

    def kill(self, number: int) -> None:
        """As when a machine is taken away: nothing on it says good-bye."""
        self.cluster.remove_node(self.workers.pop(number), allow_graceful=False)


@contextmanager
def nodes_of_one_core(count: int) -> Iterator[Nodes]:
    """So many of them, each a raylet of its own on this machine."""
    # A dead node is missed after 5 s, not 15: five checks, and a live one has 10 s to answer each.
    settings = {"health_check_period_ms": 1000}
    options = {"num_cpus": 0, "include_dashboard": False, "_system_config": settings, **_STORE}
    cluster = Cluster(initialize_head=True, head_node_args=options)
    made = Nodes(cluster)
    try:
        for _ in range(count):
            made.add()
        yield made
    finally:
        cluster.shutdown()


def _served(store: Store, **variables: str) -> Iterator[Store]:
    """`variables` of the environment, in which {} stands for the address of the store."""
    with store.served(), pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value.format(store.endpoint))
        yield store


@pytest.fixture(scope="session")
def s3() -> Iterator[Store]:
    yield from _served(
        Store("s3", s3_application()), AWS_ENDPOINT_URL="{}", AWS_ACCESS_KEY_ID="key",
        AWS_SECRET_ACCESS_KEY="secret", AWS_DEFAULT_REGION="us-east-1", AWS_EC2_METADATA_DISABLED="true",
    )  # fmt: skip


@pytest.fixture(scope="session")
def gs() -> Iterator[Store]:
    store = Store("gs", gcs_application())
    yield from _served(store, GOOGLE_BASE_URL="{}", GOOGLE_BEARER_TOKEN="token")


@pytest.fixture(scope="session")
def az() -> Iterator[Store]:
    variables = {"AZURITE_BLOB_STORAGE_URL": "{}", "AZURE_STORAGE_USE_EMULATOR": "true"}
    yield from _served(Store("az", Azure()), **variables)


@pytest.fixture(params=["s3", "gs", "az"])
def store(request) -> Store:
    """Each kind of store that obstore knows."""
    made: Store = request.getfixturevalue(request.param)
    return made
