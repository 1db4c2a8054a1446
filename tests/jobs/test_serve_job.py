"""What jobs.serve refuses before Ray starts; test_end_to_end.py has its service."""

from __future__ import annotations

import functools
import socket
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from jobs import serve as serve_job
from serve.http.bearer_tokens import FILE, HASHES
from tests.helpers import Finished, free_port


@pytest.fixture
def serve_here(run_job_here, tiny_ranker) -> Callable[..., Finished]:
    """`serve_here("--port", 1)`: the job with a small ranker."""
    return functools.partial(run_job_here, "serve", "--model", tiny_ranker("bi").uri)


@pytest.mark.parametrize(("arguments", "message"), [
    (("--arguments", "pool=x"), "arguments: pool is unknown; did you mean pools?"),
    (("--arguments", "shards=0"), "arguments: shards: '0' is not allowed; "),
    (("--arguments", "precision"), "arguments: 'precision' is not allowed; allowed: name=value"),
    (("--pools", "nowhere/pools/p"), "nowhere/pools/p"),
    (("--port", 0), "port: 0 is not allowed; allowed: 1 to 65535"),
    (("--host", "192.0.2.1"), "--port 8000: 192.0.2.1: Cannot assign requested address"),
])  # fmt: skip
def test_what_cannot_be_served_is_one_line(serve_here, arguments, message):
    assert message in serve_here(*arguments).refusal


def test_the_copy_of_a_submitted_jobs_code_is_polyranks_own(tmp_path, monkeypatch):
    """Ray unpacks it below working_dir_files; the job works in a copy of that (jobs.program)."""
    (tmp_path / "pipeline").mkdir()
    (tmp_path / "pipeline" / "__init__.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(serve_job.cluster.BadInput):
        serve_job.cluster.require_visible_packages()
    unpacked = Path("/tmp/ray/session/runtime_resources/working_dir_files/_ray_pkg_1")
    monkeypatch.setattr(serve_job.cluster, "_ROOT", unpacked)
    serve_job.cluster.require_visible_packages()


def test_a_model_that_is_none_is_refused(run_job_here, convai2_corpus):
    refusal = run_job_here("serve", "--model", convai2_corpus.uri, "--port", free_port()).refusal
    assert "kind is 'corpus'; needed here: ranker" in refusal


@pytest.mark.parametrize(("host", "family"), [
    ("127.0.0.1", socket.AF_INET), ("::1", socket.AF_INET6),
])  # fmt: skip
def test_a_taken_port_is_refused(serve_here, host, family):
    try:
        taken = socket.create_server((host, 0), family=family)
    except OSError:
        pytest.skip("no IPv6")
    with closing(taken):
        port = taken.getsockname()[1]
        refusal = serve_here("--host", host, "--port", port).refusal
    assert f"--port {port}: in use; choose another" in refusal


@pytest.mark.parametrize(
    ("host", "shown"), [("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("localhost", "localhost")]
)
def test_the_address_of_a_service_is_one_that_a_browser_takes(serve_here, monkeypatch, host, shown):
    from ray import serve

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(serve_job.cluster, "session", nullcontext)
    monkeypatch.setattr(serve_job.cluster, "require_free", lambda *_: None)
    monkeypatch.setattr(serve_job.signal, "pause", ctrl_c)
    for name in ("start", "run", "delete"):
        monkeypatch.setattr(serve, name, lambda *_, **options: None)
    assert serve_here("--host", host).summary["served"] == f"http://{shown}:8000"


@pytest.mark.parametrize("name", [HASHES, FILE])
def test_wrong_tokens_are_one_line(serve_here, monkeypatch, name):
    monkeypatch.setenv(name, "sesame")
    assert f"{name}: " in serve_here("--port", free_port()).refusal


def test_a_replica_that_does_not_start_says_why_in_one_line(serve_here, monkeypatch):
    """As on a full disk: Serve itself says only that it has failed."""
    from ray import serve

    def fail(app: object) -> None:
        raise RuntimeError("Deploying application default failed")

    reason = "OSError: [Errno 28] No space left: '/cache/model'"
    trace = f"Retrying\nTraceback (most recent call last):\n  File x\n{reason}\n"
    ranker = SimpleNamespace(message=trace)
    status = SimpleNamespace(
        applications={"default": SimpleNamespace(deployments={"ranker": ranker})}
    )
    monkeypatch.setattr(serve_job.cluster, "session", nullcontext)
    monkeypatch.setattr(serve, "start", lambda **_: None)
    monkeypatch.setattr(serve, "run", fail)
    monkeypatch.setattr(serve, "status", lambda: status)
    done = serve_here("--port", free_port())
    assert done.code == 1
    assert done.stderr.endswith(f"the service did not start: {reason}\n")
    assert "Traceback" not in done.stderr
