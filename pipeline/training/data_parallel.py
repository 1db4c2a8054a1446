"""Wraps a model for several ranks: its weights are whole on every rank, or sharded over the ranks."""

from __future__ import annotations

import ray.train.torch
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def distribute(module: nn.Module, device: torch.device, shard: bool) -> nn.Module:
    """Moves the module and wraps it for its ranks.

    Whole: DistributedDataParallel, where there are several ranks. Sharded: FSDP2, which makes new parameters
    of the module's own. It moves and shards one layer after the other, so the device never holds the whole
    module.
    """
    if not dist.is_initialized():
        return module.to(device)
    if not shard:
        wrapped: nn.Module = ray.train.torch.prepare_model(module, move_to_device=device)
        return wrapped
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for part in list(module.modules()):
        if isinstance(part, nn.ModuleList):  # the Transformer's layers
            for layer in part:
                fully_shard(layer, mesh=mesh)
    fully_shard(module, mesh=mesh)
    return module
