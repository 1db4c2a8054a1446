"""Over which network the workers of a training on CPUs talk."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest
import ray
from ray.train.torch import TorchConfig

from pipeline.training.interface import OverRaysNetwork

NAME = "GLOO_SOCKET_IFNAME"


@pytest.mark.parametrize(("address", "chosen", "expected"), [
    ("127.0.0.1", None, "lo"),
    ("127.0.0.1", "eth7", "eth7"),  # in ray.env
    ("192.0.2.1", None, None),  # of no interface
])  # fmt: skip
def test_gloo_listens_at_the_address_by_which_ray_knows_the_node(
    monkeypatch, address, chosen, expected
):
    monkeypatch.setenv(NAME, "")  # restored at the end
    monkeypatch.delenv(NAME) if chosen is None else monkeypatch.setenv(NAME, chosen)
    monkeypatch.setattr(ray.util, "get_node_ip_address", lambda: address)
    at_start = []
    backend = TorchConfig().backend_cls
    monkeypatch.setattr(backend, "on_start", lambda *_: at_start.append(os.environ.get(NAME)))
    workers = SimpleNamespace(execute=lambda work: work())
    OverRaysNetwork().backend_cls().on_start(workers, OverRaysNetwork())
    assert at_start == [expected]
