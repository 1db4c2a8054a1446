"""A connection to the dashboard of a Ray cluster, which takes jobs and services."""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipeline.config import BadInput, Stopped

LOST = (OSError, RuntimeError)
"""Errors of a client whose cluster does not answer, or not as it should; it may again."""
_ANSWER_S = 300.0  # the first deployment starts the controller and proxies of Serve
_CONNECT_S = 10.0  # without it a client waits for minutes for a machine that is not there
_CAUSE = re.compile(r"\[Errno -?\d+\] [\w ]+|timed out|Failed to resolve '[^']*'")
"""The part of a long message of `requests` that tells a person something."""


def connect(client_of: Callable[[str], Any], url: str) -> Any:
    """`client_of(url)`, which asks the cluster.

    Raises Stopped if none answers, which may pass, and BadInput for an address that is none, or if the
    cluster refuses the token.
    """
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from ray.exceptions import AuthenticationError

    try:
        return client_of(url)
    except AuthenticationError as error:
        raise BadInput(f"--address {url}: {first_line(error)} (RAY_AUTH_TOKEN or ~/.ray/auth_token; "
                       "RAY_AUTH_MODE=disabled for a cluster without tokens)") from None  # fmt: skip
    except LOST as error:
        raise Stopped(f"--address {url}: no cluster answers ({first_line(error)})") from None
    except ValueError as error:
        raise BadInput(f"--address {url}: {first_line(error)}") from None


def require_listener(name: str, address: str) -> None:
    """Raises Stopped where nobody listens at HOST:PORT, or a URL of both; addresses such as auto pass. Ray's
    own client looks for a minute, and then ends with a traceback. `name`: of the variable."""
    parts = urlsplit(address if "://" in address else f"//{address}")
    try:
        if parts.port:
            socket.create_connection((parts.hostname or "", parts.port), _CONNECT_S).close()
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise Stopped(f"{name} {address}: no cluster answers ({reason})") from None


def applications(url: str, settings: dict[str, Any] | None = None) -> Any:
    """Serve's REST interface: the state of its applications, or, with settings, deploys those.

    Raises AuthenticationError, ValueError for an address that is none, and OSError for everything else that
    goes wrong.
    """
    answer = _ask(url, "serve/applications/", settings)
    return {} if settings else answer["applications"]


def job(url: str, job_id: str) -> tuple[dict[str, Any], str]:
    """Ray's facts about a submitted job, and its output so far; raises as `applications`."""
    # In this order, so that the output of a job that has ended is whole.
    facts = _ask(url, f"jobs/{job_id}")
    return facts, str(_ask(url, f"jobs/{job_id}/logs")["logs"])


def ray_version(url: str) -> str:
    """The version of Ray that the cluster runs; raises as `applications`."""
    return str(_ask(url, "version")["ray_version"])


def _ask(url: str, path: str, settings: dict[str, Any] | None = None) -> Any:
    import requests
    from ray.exceptions import AuthenticationError

    try:
        answer = requests.request(
            "PUT" if settings else "GET",
            f"{url.rstrip('/')}/api/{path}",
            json=settings,
            headers=_token_header(),
            timeout=(_CONNECT_S, _ANSWER_S),
        )
    except requests.RequestException as error:
        if isinstance(error, ValueError):  # no address of a server
            raise ValueError(str(error)) from None
        raise OSError(cause[0] if (cause := _CAUSE.search(str(error))) else str(error)) from None
    if answer.status_code in (401, 403):
        raise AuthenticationError(answer.text)
    if not answer.ok:
        raise OSError(answer.text or f"{answer.status_code} {answer.reason}")
    return {} if settings else answer.json()


def _token_header() -> dict[str, str]:
    """The token that Ray's own clients send."""
    token = os.environ.get("RAY_AUTH_TOKEN", "")
    file = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray" / "auth_token")
    if not token and file.is_file():
        token = file.read_text().strip()
    is_sent = token and os.environ.get("RAY_AUTH_MODE") == "token"
    return {"authorization": f"Bearer {token}"} if is_sent else {}


def first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:200]
