"""`jobs.deploy` and `jobs.submit` where no cluster answers as it should. Against a real head:
tests/cluster/test_submit.py."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from jobs import cluster as ray_cluster
from jobs import deploy, submit
from pipeline.config import BadInput, Stopped
from tests.helpers import free_port


class Refusing(BaseHTTPRequestHandler):
    """A dashboard that does not know the token."""

    def do_GET(self) -> None:
        self.send_error(401)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def dashboard() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("verb", ["deploy", "submit"])
def test_a_token_that_a_cluster_does_not_know_is_one_line(run_job_here, dashboard, tmp_path, verb):
    file = tmp_path / "service.yaml"
    file.write_text("applications: [{name: dialogue, import_path: serve.app:build}]")
    what, sent = ([file], []) if verb == "deploy" else ([], ["--", "inspect", "--corpus", "s3://b"])
    refusal = run_job_here(verb, *what, "--address", dashboard, *sent).refusal
    assert f"--address {dashboard}: " in refusal and "RAY_AUTH_TOKEN" in refusal


@pytest.fixture
def cluster(monkeypatch) -> Any:
    """`cluster(…)`: Serve's interface answers in turn, the last answer again and again."""

    def answering(*answers: str | Exception) -> None:
        left = list(answers)

        def applications(address: str) -> Any:
            assert address == "http://cluster:8265"
            answer = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(answer, Exception):
                raise answer
            return {"dialogue": {"status": answer, "message": ""}}

        monkeypatch.setattr(deploy.dashboard, "applications", applications)

    return answering


@pytest.fixture
def clock(monkeypatch) -> Any:
    class Clock:
        now = 0.0

        def monotonic(self) -> float:
            return self.now

        def sleep(self, seconds: float) -> None:
            self.now += seconds

    clock = Clock()
    monkeypatch.setattr(deploy, "time", clock)
    return clock


@pytest.mark.parametrize("error", [ConnectionError("reset"), RuntimeError("status code 500: …")])
def test_a_lost_connection_does_not_end_the_wait(clock, cluster, error):
    cluster("DEPLOYING", error, error, "RUNNING")
    assert deploy._wait_for("http://cluster:8265", ["dialogue"], 60.0) == {}


def test_a_cluster_that_does_not_answer_any_more_is_given_up(clock, cluster):
    cluster("DEPLOYING", ConnectionError("no route to host"))
    problems = deploy._wait_for("http://cluster:8265", ["dialogue"], 60.0)
    assert problems == {"dialogue": "UNREACHABLE: no route to host"}
    assert 60 < clock.now < 65


@pytest.mark.parametrize("address", ["127.0.0.1:{}", "ray://127.0.0.1:{}", "http://127.0.0.1:{}"])
def test_where_no_cluster_listens_it_is_one_line_and_no_wait(address):
    address = address.format(free_port())
    told = rf"^RAY_ADDRESS {address}: no cluster answers \(Connection refused\)$"
    with pytest.raises(Stopped, match=told):  # which may pass: exit code 1
        ray_cluster._start_ray(address, {})
    url = f"http://127.0.0.1:{free_port()}"
    told = rf"^--address {url}: no cluster answers \(\[Errno 111\] Connection refused\)$"
    with pytest.raises(Stopped, match=told):
        submit._connect(url)
    with pytest.raises(BadInput, match=r"^--address head:8265: "):  # no scheme
        submit._connect("head:8265")
