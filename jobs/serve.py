"""A service on this machine, until Ctrl-C."""

from __future__ import annotations

import difflib
import os
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from jobs import cluster, program
from pipeline.config import BadInput, Stopped, require


@dataclass(frozen=True, kw_only=True)
class Config:
    """Serves a ranker and its pools over HTTP on this machine, until Ctrl-C or SIGTERM.

    What cannot be served is refused in one line, before Ray starts. On a cluster: jobs.deploy with
    serve/config.cluster.yaml.
    """

    model: str
    """A ranker (of jobs.finetune), or models:/name@alias of MLflow's registry."""
    pools: tuple[str, ...] = ()
    """Pools that this model embedded: <pools>/<name> each."""
    port: int = 8000
    """Port of the service."""
    host: str = os.environ.get("POLYRANK_HOST", "127.0.0.1")
    """The address that the service listens on; the default is POLYRANK_HOST, if that is set. With 0.0.0.0,
    all addresses of this machine (:: with those of IPv6), everybody may ask unless tokens are set
    (serve/README.md)."""
    arguments: tuple[str, ...] = ()
    """More arguments of the service, name=value, such as precision=fp32 or second_stage=CROSS
    (serve/REFERENCE.md)."""

    def __post_init__(self) -> None:
        require(1 <= self.port <= 65535, "port", self.port, "1 to 65535")
        for argument in self.arguments:
            require("=" in argument[1:], "arguments", argument, "name=value")


def run(config: Config) -> program.Summary:
    began = time.monotonic()
    # As Ctrl-C, also for process 1 of a container, which SIGTERM would not end otherwise.
    signal.signal(signal.SIGTERM, signal.default_int_handler)

    def say(what: str) -> None:
        print(f"{time.monotonic() - began:5.1f} s  {what}", flush=True)

    pools = f" and {', '.join(config.pools)}" if config.pools else ""
    say(f"reads {config.model}{pools}")
    cluster.require_free(config.host, config.port)
    cluster.require_visible_packages()

    from serve.app import build

    arguments = _arguments(config)
    app = build(arguments)

    from ray import serve

    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.host, config.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{config.port}"
    say("starts Ray")
    with cluster.session():
        with suppress(KeyboardInterrupt):
            say("starts the proxy")
            serve.start(http_options={"host": config.host, "port": config.port})
            say("starts a replica, which loads the model and opens the pools")
            try:
                serve.run(app)
            except RuntimeError:  # of Serve, which says no more than that it has failed
                raise Stopped(f"the service did not start: {_why_not(serve.status())}") from None
            say("answers")
            print(f"the playground:  {url}/\nthe interface:   {url}/openapi.json\n"
                  f"what is served:  {url}/info\nCtrl-C ends it.", flush=True)  # fmt: skip
            signal.pause()
        serve.delete("default")
    return {"served": url}


def _why_not(status: Any) -> str:
    """The reason of the first replica that failed: the last line of its traceback."""
    deployments = (d for a in status.applications.values() for d in a.deployments.values())
    lines = [line.strip() for d in deployments for line in str(d.message).splitlines()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|BadInput|Stopped)\b", line)]
    return errors[-1] if errors else "Ray's logs say why (/tmp/ray/session_latest/logs/serve)"


def _arguments(config: Config) -> Any:
    """The arguments of `serve.app:build`. Raises BadInput for unknown and invalid ones."""
    from pydantic import ValidationError

    from serve.app import Args

    options = dict(argument.split("=", 1) for argument in config.arguments)
    values: dict[str, Any] = {**options, "model": config.model, "pools": list(config.pools)}
    try:
        return Args.model_validate(values)
    except ValidationError as error:
        problem = error.errors()[0]
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "extra_forbidden":
            hint = f"allowed: {', '.join(Args.model_fields)}"
            if nearest := difflib.get_close_matches(name, Args.model_fields, n=1):
                hint = f"did you mean {nearest[0]}?"
            raise BadInput(f"arguments: {name} is unknown; {hint}") from None
        value = f"{problem['input']!r} is not allowed"
        raise BadInput(f"arguments: {name}: {value}; {problem['msg']}") from None


if __name__ == "__main__":
    program.main(Config, run, "serve")
