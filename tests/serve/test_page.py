"""serve/README.md: its requests are asked as they stand, and its table of errors is the code's."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import shlex
from pathlib import Path

import pytest
from fastapi.testclient import TestClient

from serve import api, metrics
from serve.bearer_tokens import BearerTokens
from serve.errors import CODES
from serve.service import Service

from .live import serving

PAGE = Path(api.__file__).with_name("README.md").read_text()
CURLS = [
    "\n".join(line.strip() for line in block.splitlines())
    for block in re.findall(r"(?m)^    curl(?:.*\n)(?:    .*\n)*", PAGE)
]


@pytest.fixture(scope="module")
def service(tiny_ranker, tiny_pool, tiny_classifier, asking) -> Service:
    model = tiny_ranker("poly")
    return asking(model, tiny_pool(model), classifier=tiny_classifier(model)).service


def test_there_are_requests_to_try():
    assert len(CURLS) >= 3


@pytest.mark.parametrize("command", CURLS)
def test_a_request_of_the_page_is_answered(service, command):
    words = shlex.split(command.replace("$TOKEN", "open sesame"))
    path = next(word for word in words if word.startswith("localhost:8000"))
    body = words[words.index("-d") + 1]
    values = [value for option, value in itertools.pairwise(words) if option == "-H"]
    headers = dict(value.split(": ", 1) for value in values)
    tokens = [hashlib.sha256(b"open sesame").hexdigest()] if "authorization" in headers else []
    client = TestClient(api.create_app(service, tokens=BearerTokens(tokens)))
    answer = client.post(path.removeprefix("localhost:8000"), content=body, headers=headers)
    assert answer.status_code == 200, answer.text
    assert json.loads(answer.content)


def test_the_program_of_the_page_runs(service, capsys):
    (program,) = re.findall(r"(?s)```python\n(.*?)```", PAGE)
    with serving(api.create_app(service)) as url:
        exec(program.replace("http://localhost:8000", url), {})
    reply, intents = capsys.readouterr().out.splitlines()
    assert "[CLS]" in reply and "probability=" in intents


def test_the_table_of_errors_is_the_codes():
    rows = re.findall(r"(?m)^\| `(\w+)` \| (\d{3}) \| (.*) \|$", PAGE)
    assert rows == [(code, str(meaning.status), meaning.text) for code, meaning in CODES.items()]


def test_every_metric_is_on_the_page():
    names = re.findall(r'"(polyrank_\w+)"', Path(metrics.__file__).read_text())
    assert len(names) >= 9
    assert sorted(re.findall(r"(?m)^\| `ray_(\w+)` \|", PAGE)) == sorted(names)


def test_every_route_of_the_interface_is_on_the_page():
    for path in api.create_app(None).openapi()["paths"]:
        assert f"{path}`" in PAGE, path
