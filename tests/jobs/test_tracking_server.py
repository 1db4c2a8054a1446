"""A tracking server that is away, slow, or refuses ends a job before its work, in one line."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import mlflow
import pytest

from jobs import promote
from pipeline import registry
from pipeline.config import BadInput
from tests.helpers import Finished, free_port


@pytest.fixture
def use_server(tracking_uri: str, monkeypatch) -> Iterator[Callable[[str], str]]:
    """`use_server(address)`: jobs of this process log to it, and wait for a second."""

    def use(address: str) -> str:
        monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
        mlflow.set_tracking_uri(address)
        return address

    yield use
    mlflow.set_tracking_uri(tracking_uri)


@pytest.fixture
def answering() -> Iterator[Callable[..., str]]:
    """`answering(status, text)`: the address of a server that answers so, whatever it is asked; with a pause
    before each byte."""
    servers = list[ThreadingHTTPServer]()

    def start(status: int, text: str, pause_s: float = 0.0) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.send_header("Retry-After", "100")
                self.end_headers()
                for byte in text if pause_s else [text]:
                    time.sleep(pause_s)
                    self.wfile.write(byte.encode())

            do_POST = do_GET

            def log_message(self, *_: object) -> None:
                pass

        servers.append(ThreadingHTTPServer(("127.0.0.1", 0), Handler))
        threading.Thread(target=servers[-1].serve_forever, daemon=True).start()
        return f"http://127.0.0.1:{servers[-1].server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def prepare(run_job_here, tmp_path) -> Callable[[], Finished]:
    """Prepares a small corpus at `tmp_path / "corpus"`."""
    (tmp_path / "a.csv").write_text("context,response\nhow are you,fine\nwhere is it,over there\n")
    options = ("--format", "pairs", "--input", tmp_path / "a.csv", "--output", tmp_path / "corpus")
    return lambda: run_job_here("prepare_corpus", *options)


def assert_one_line(done: Finished, code: int, *parts: str) -> None:
    assert done.code == code, done.stderr
    (line,) = done.stderr.splitlines()
    assert all(part in line for part in parts), line
    assert len(line) < 400


def test_a_server_that_is_away_ends_a_job_at_once(prepare, use_server, tracking_uri, tmp_path):
    address = use_server(f"http://127.0.0.1:{free_port()}")
    line_parts = (f"MLFLOW_TRACKING_URI {address}: ", "Connection refused")
    assert_one_line(prepare(), 1, *line_parts)
    assert not (tmp_path / "corpus").exists()
    mlflow.set_tracking_uri(tracking_uri)  # the same command, with another server
    assert prepare().summary["counts"]["examples"] == 2


def test_an_address_without_its_scheme_is_refused(prepare, use_server, tmp_path, monkeypatch):
    """MLflow takes it as the name of a folder."""
    monkeypatch.chdir(tmp_path)
    use_server("127.0.0.1:5000")
    said = "MLFLOW_TRACKING_URI: '127.0.0.1:5000' is not allowed; allowed: http://127.0.0.1:5000"
    assert_one_line(prepare(), 2, said)
    for address, parts in (
        ("ftp://server", ["got unsupported URI 'ftp://server'; allowed: http://, https://"]),
        ("mlruns", ["is in maintenance mode; name a server, or a data base as sqlite:///FILE"]),
    ):
        use_server(address)
        assert_one_line(prepare(), 2, f"MLFLOW_TRACKING_URI {address}: ", *parts)


def test_https_to_a_server_of_http_is_named(prepare, use_server, answering):
    use_server(answering(200, "{}").replace("http:", "https:"))
    assert_one_line(prepare(), 1, "[SSL: ", "; the server may speak http in place of https")


def test_a_server_that_takes_requests_and_is_silent_ends_a_job(prepare, use_server):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        use_server(f"http://127.0.0.1:{silent.getsockname()[1]}")
        assert_one_line(prepare(), 1, "Read timed out")


def test_a_server_that_sends_byte_by_byte_ends_a_job(prepare, use_server, answering, monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    use_server(answering(200, " " * 10, pause_s=0.5))
    assert_one_line(prepare(), 1, "MLFLOW_TRACKING_URI http://", "no whole answer within 4 s")


def test_a_registry_beside_a_database_of_runs_that_sends_byte_by_byte_ends_a_job(
    run_job_here, tracking_uri, answering, monkeypatch
):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    address = answering(200, " " * 10, pause_s=0.5)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", address)
    done = run_job_here("promote", "--model", "a")
    assert_one_line(done, 1, f"MLFLOW_REGISTRY_URI {address}: no whole answer within 4 s")


@pytest.mark.parametrize(("status", "text", "code", "parts"), [
    (401, "You are not authenticated.", 2, ["401", "MLFLOW_TRACKING_USERNAME"]),
    (403, "Invalid Host header", 2, ["403", "--allowed-hosts"]),
    (503, "<html>", 1, ["too many 503"]),
    (404, "<html>", 2, ["404"]),
    (200, "<html>a dashboard", 1, ["a dashboard"]),
])  # fmt: skip
def test_a_refusing_server_ends_a_job(prepare, use_server, answering, status, text, code, parts):
    address = use_server(answering(status, text).replace("http://", "http://me:secret@"))
    done = prepare()
    assert_one_line(done, code, "MLFLOW_TRACKING_URI http://127.0.0.1:", *parts)
    assert "secret" not in done.stderr and "secret" in address


def test_a_database_that_is_away_ends_a_job(prepare, use_server):
    use_server(f"postgresql://me:secret@127.0.0.1:{free_port()}/mlflow")
    done = prepare()
    assert_one_line(done, 1, "MLFLOW_TRACKING_URI postgresql://127.0.0.1:", "refused")
    assert "secret" not in done.stderr


@pytest.mark.parametrize("address", [
    "http://127.0.0.1:99999", "http://127.0.0.1:port", "http://[::1", " http://127.0.0.1:1", "http://",
])  # fmt: skip
def test_an_address_that_names_no_server_is_refused(prepare, use_server, address):
    said = f"MLFLOW_TRACKING_URI: {address!r} is not allowed; allowed: such as http://host:5000"
    use_server(address)
    assert_one_line(prepare(), 2, said)


def test_a_token_with_a_line_end_is_not_shown(prepare, use_server, answering, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_TOKEN", "secret\n")
    use_server(answering(200, "{}"))
    done = prepare()
    assert_one_line(done, 1, "return character(s) in header value; no line ends", "_TRACKING_TOKEN")
    assert "secret" not in done.stderr


def test_a_server_of_something_else_is_named(prepare, use_server, answering):
    use_server(answering(200, '{"hello": 1}'))
    assert_one_line(prepare(), 2, "deleted experiment ''", "; the server may not be MLflow's")


@pytest.mark.parametrize(("verb", "options"), [
    ("search", ("--model", "models:/a@champion", "--pool", "pools/p", "--context", "hello")),
    ("promote", ("--model", "a")),
    ("evaluate", ("--model", "models:/a@champion", "--corpus", "CORPUS")),
    ("evaluate", ("--model", "MODEL", "--corpus", "CORPUS")),
])  # fmt: skip
def test_jobs_that_ask_the_registry_say_that_it_is_away(
    run_job_here, use_server, tiny_ranker, convai2_corpus, verb, options
):
    address = use_server(f"http://127.0.0.1:{free_port()}")
    uris = {"MODEL": tiny_ranker("bi").uri, "CORPUS": convai2_corpus.uri}
    done = run_job_here(verb, *(uris.get(option, option) for option in options))
    assert_one_line(done, 1, f"MLFLOW_TRACKING_URI {address}: ")


@pytest.mark.parametrize("verb", ["finetune", "promote"])
def test_names_that_the_registry_refuses_are_refused_at_the_start(run_job_here, verb):
    missing = ("--corpus", "none", "--encoder", "none", "--output", "none", "--register-as", "a/b")
    done = run_job_here(verb, *(missing if verb == "finetune" else ("--model", "a/b")))
    field = "register_as" if verb == "finetune" else "registered_model"
    assert f"{field}: 'a/b' is not allowed; allowed: 1 to 255 characters" in done.refusal
    assert not Path("none.partial").exists()


@pytest.mark.parametrize("name", ["support/replies", "a:b", "a@b", "it's", " a", "..", "x" * 256])
def test_names_that_the_registry_would_refuse_are_not_allowed(name):
    with pytest.raises(BadInput, match=r"^name: .* is not allowed; allowed: 1 to 255 characters"):
        registry.require_name("name", name)


@pytest.mark.parametrize("name", ["Support replies", "a.b-c_d", "ответы", "x" * 255])
def test_names_that_are_allowed_are_names_of_the_registry(name):
    registry.require_name("register_as", name)
    assert mlflow.MlflowClient().create_registered_model(name).name == name


@pytest.mark.parametrize("alias", ["a/b", "latest", "v3", "", "x" * 241])
def test_aliases_that_the_registry_refuses_are_refused_at_the_start(alias):
    with pytest.raises(BadInput, match=r"^alias: .* is not allowed; allowed: 1 to 240 letters"):
        promote.Config(registered_model="a", alias=alias)
