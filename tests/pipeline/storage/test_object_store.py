"""The credentials of a request that makes a file which only one can make."""

from __future__ import annotations

import json
import os
import re
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pipeline.storage import object_store


@pytest.fixture
def keys(monkeypatch, tmp_path) -> Iterator[list[str]]:
    """The access keys of the requests that a store on this machine has got."""
    found: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            found.extend(re.findall("Credential=([A-Z]+)/", self.headers["Authorization"]))
            self.send_response(200)
            self.send_header("ETag", '"1"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    object_store._store.cache_clear()
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{server.server_port}")
        yield found
        server.shutdown()
        thread.join()
    object_store._store.cache_clear()


@pytest.mark.parametrize("kind", ["environment", "keys", "process"])
def test_a_lock_takes_the_credentials_of_every_kind_of_profile(keys, monkeypatch, tmp_path, kind):
    secret = {"Version": 1, "AccessKeyId": "PROCESS", "SecretAccessKey": "secret"}
    (tmp_path / "secret.py").write_text(f"print({json.dumps(secret)!r})")
    if kind == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    elif kind == "keys":
        text = "[mine]\naws_access_key_id = KEYS\naws_secret_access_key = secret\n"
        (tmp_path / "credentials").write_text(text)
        monkeypatch.setenv("AWS_PROFILE", "mine")
    else:
        command = f"{sys.executable} {tmp_path / 'secret.py'}"
        (tmp_path / "config").write_text(f"[profile mine]\ncredential_process = {command}\n")
        monkeypatch.setenv("AWS_PROFILE", "mine")
    assert object_store.create("s3://bucket", "pools/lock", b"x", "eu-central-1")
    assert keys == [kind.upper()]


def test_no_credentials_are_one_line(keys):
    with pytest.raises(
        OSError, match=r"no credentials for S3 .*; allowed: those that boto3 finds$"
    ):
        object_store.create("s3://bucket", "pools/lock", b"x", "eu-central-1")


def test_the_endpoint_of_a_uri_counts(keys, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "ENVIRONMENT")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    host = os.environ["AWS_ENDPOINT_URL"].removeprefix("http://")
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    query = f"?scheme=http&endpoint_override={host}"
    assert object_store.create("s3://bucket", "lock", b"x", "eu-central-1", query)
    assert keys == ["ENVIRONMENT"]
