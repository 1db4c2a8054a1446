"""Requests made up from openapi.json: no answer is a 500, and every answer fits what is written there.

The long form has 10,000 requests: pytest -m long tests/serve/test_openapi.py
"""

from __future__ import annotations

import os
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from serve.http import api

from .conftest import INTERFACE

OPERATIONS = [
    (path, method) for path, methods in INTERFACE["paths"].items() for method in sorted(methods)
]
CASES = int(os.environ.get("POLYRANK_CASES", "10000"))
CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_schema_conformance,
]


@pytest.fixture(scope="module")
def schema(tiny_ranker, tiny_pool, tiny_classifier, asking) -> Any:
    """Of a service with all there is: what it says of itself is the committed file (test_api)."""
    model = tiny_ranker("poly")
    served = asking(model, tiny_pool(model), classifier=tiny_classifier(model))
    return schemathesis.openapi.from_asgi("/openapi.json", api.create_app(served.service))


def ask(schema: Any, path: str, method: str, count: int) -> None:
    """Sends so many requests: allowed ones, and where there is a body as many that are not."""
    modes = list(GenerationMode) if method == "post" else [GenerationMode.POSITIVE]
    for mode in modes:

        @settings(max_examples=-(-count // len(modes)), suppress_health_check=list(HealthCheck))
        @given(case=schema[path][method].as_strategy(generation_mode=mode))
        def send(case: Any) -> None:
            case.call_and_validate(checks=CHECKS)

        send()


@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_every_answer_is_as_it_is_written(schema, path, method):
    ask(schema, path, method, count=6 if method == "post" else 1)


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("path", "method"), OPERATIONS)
def test_ten_thousand_answers_are_as_they_are_written(schema, path, method):
    posts = sum(name == "post" for _, name in OPERATIONS)
    ask(schema, path, method, count=-(-CASES // posts) if method == "post" else 20)
