"""Only what Ray documents is used: its other names change with every release, some at import."""

from __future__ import annotations

import ast
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from jobs import submit
from pipeline.config import BadInput

ROOT = Path(__file__).parents[1]


def private_names(code: str) -> Iterator[str]:
    """The names of Ray with an underscore before a part that a module imports, or names in a text to load."""
    for node in ast.walk(ast.parse(code)):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Attribute):
            names = [ast.unparse(node)]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            names = [node.value]
        for name in names:
            parts = name.split(".")
            is_dotted = all(part.isidentifier() for part in parts)
            if is_dotted and parts[0] == "ray" and any(map(_is_private, parts)):
                yield ".".join(parts[: 1 + max(map(parts.index, filter(_is_private, parts)))])


def _is_private(part: str) -> bool:
    return part.startswith("_") and not part.startswith("__")


@pytest.mark.parametrize(
    ("code", "found"),
    [
        ("from ray.train.v2._internal.constants import A", "ray.train.v2._internal"),
        ("import ray._raylet", "ray._raylet"),
        ("from ray.serve import _private", "ray.serve._private"),
        ("import ray\nray._private.worker.x()", "ray._private"),
        ("load('ray.serve._private.api')", "ray.serve._private"),
        ("import ray\nray.__version__; from ray.util import state", None),
    ],
)
def test_private_names_are_found(code, found):
    assert found in {*private_names(code), None}
    assert bool(found) == bool(list(private_names(code)))


def test_no_module_uses_a_private_name_of_ray():
    found = set()
    for folder in ("pipeline", "jobs", "serve"):
        for file in (ROOT / folder).rglob("*.py"):
            place = file.relative_to(ROOT).as_posix()
            found |= {f"{place}: {name}" for name in private_names(file.read_text())}
    assert found == set()


def test_another_version_of_ray_on_the_cluster_is_refused(monkeypatch):
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = json.dumps({"version": "4", "ray_version": "9.9.9"}).encode()
            self.send_response(200 if self.path == "/api/version" else 404)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    monkeypatch.setattr(submit, "_job_client", lambda url: None)
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            with pytest.raises(BadInput, match=f"--address {url}: the cluster runs Ray 9.9.9"):
                submit._connect(url)
        finally:
            server.shutdown()
            thread.join()
