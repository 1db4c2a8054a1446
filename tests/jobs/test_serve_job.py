"""jobs.serve: a service on this machine, and what it refuses before Ray starts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import urllib.request
from contextlib import closing, suppress

import pytest

from jobs import serve as serve_job
from tests.helpers import free_port, job_command


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_it_answers_until_ctrl_c(tiny_ranker):
    # A shell's background job ignores SIGINT, and so would what it starts.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    port = free_port()
    arguments = ("--model", tiny_ranker("bi").uri, "--port", port, "--arguments", "precision=fp32")
    process = subprocess.Popen(
        job_command("serve", *arguments), start_new_session=True, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        lines = iter(process.stdout.readline, "")
        assert any(f"http://127.0.0.1:{port}/info" in line for line in lines)
        asked = json.dumps({"context": ["w1"], "candidates": ["w2", "w1 w3"]}).encode()
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/rank", asked, {"content-type": "application/json"}
        )
        with closing(urllib.request.urlopen(request)) as answer:
            assert len(json.loads(answer.read())["results"]) == 2
        process.send_signal(signal.SIGINT)
        rest = process.stdout.read().splitlines()
        assert process.wait(timeout=60) == 0
        assert json.loads(rest[-1]) == {"job": "serve", "served": f"http://127.0.0.1:{port}"}
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--arguments", "pool=x"), "arguments: pool is unknown; did you mean pools?"),
        (("--arguments", "shards=0"), "arguments: shards: '0' is not allowed; "),
        (
            ("--arguments", "precision"),
            "arguments: 'precision' is not allowed; allowed: name=value",
        ),
        (("--pools", "nowhere/pools/p"), "nowhere/pools/p"),
        (("--port", 0), "port: 0 is not allowed; allowed: 1 to 65535"),
    ],
)
def test_what_cannot_be_served_is_one_line(run_job_here, tiny_ranker, arguments, message):
    refusal = run_job_here("serve", "--model", tiny_ranker("bi").uri, *arguments).refusal
    assert message in refusal


def test_a_port_that_is_taken_and_a_model_that_is_none_are_refused(
    run_job_here, tiny_ranker, convai2_corpus
):
    with closing(serve_job.cluster.socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        refusal = run_job_here("serve", "--model", tiny_ranker("bi").uri, "--port", port).refusal
        assert f"--port {port}: in use; choose another" in refusal
    refusal = run_job_here("serve", "--model", convai2_corpus.uri, "--port", free_port()).refusal
    assert "kind is 'corpus'; needed here: ranker" in refusal
