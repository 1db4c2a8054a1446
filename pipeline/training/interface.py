"""The network over which the workers of a training on CPUs talk to each other.

Apart from launch.py, which loads the networks' libraries: Ray Train's controller imports this module, in a
process of its own that trains nothing, and starts 4 seconds of CPU sooner without them.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from contextlib import suppress
from typing import Any

import ray
from ray.train.torch import TorchConfig

_TorchBackend: Any = TorchConfig().backend_cls
_VARIABLE = "GLOO_SOCKET_IFNAME"
_SIOCGIFADDR = 0x8915  # Linux's request for the IPv4 address of an interface


class OverRaysNetwork(TorchConfig):  # type: ignore[misc]
    """Process groups whose workers listen at the address by which Ray's other nodes reach their node.

    gloo alone takes the address of the host's own name. In /etc/hosts of Ubuntu and Debian that is 127.0.1.1,
    at which no other node finds a worker. On a host with two networks it may be the wrong one.
    """

    @property
    def backend_cls(self) -> type[Any]:
        return _Backend


class _Backend(_TorchBackend):  # type: ignore[misc]
    def on_start(self, worker_group: Any, backend_config: TorchConfig) -> None:
        worker_group.execute(choose_interface)
        super().on_start(worker_group, backend_config)


def choose_interface() -> None:
    """Names the interface of Ray's address to gloo, unless the environment names one."""
    if name := _interface_of(ray.util.get_node_ip_address()):
        os.environ.setdefault(_VARIABLE, name)


def _interface_of(address: str) -> str:
    """The interface that has this IPv4 address; "": none has it."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # such as of an interface without an address
                request = struct.pack("256s", name.encode())
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
                if socket.inet_ntoa(answer[20:24]) == address:
                    return name
    return ""
