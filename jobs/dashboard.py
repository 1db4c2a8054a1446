"""A connection to the dashboard of a Ray cluster, which takes jobs and services."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from pipeline.config import BadInput

LOST = (OSError, RuntimeError)
"""Errors of a client whose cluster does not answer, or not as it should; it may again."""


def connect(client_of: Callable[[str], Any], url: str) -> Any:
    """Ray's client for this address. Raises BadInput where no cluster answers, or it refuses the token."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.exceptions import AuthenticationError

    try:
        client = client_of(url)
        client.get_version()
    except AuthenticationError as error:
        raise BadInput(f"--address {url}: {first_line(error)} (RAY_AUTH_TOKEN or ~/.ray/auth_token; "
                       "RAY_AUTH_MODE=disabled for a cluster without tokens)") from None  # fmt: skip
    except (*LOST, ValueError) as error:
        raise BadInput(f"--address {url}: no cluster answers ({first_line(error)})") from None
    return client


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
