"""A single-context ConveRT as ONNX, for services without torch.

    model.onnx         "ids" int64 [B, T], padded with the pad id, T no longer than the settings' texts →
                       "context" and "candidate" float32 [B, E], encodings of length 1, and "sentence"
                       float32 [B, R], which other tasks take
    vocabulary.json    what makes the ids (reference 5.1); a text without a token is one pad id
    ranker.json        the settings

torch.onnx.export makes the graph of the model's own modules. Its weights are what the model's own file
holds: the tables' levels in 8 bits, all others in 16, computed with in float32. Of blocks of 8 bits
(`Ranker.quantise`) only the weights have 8 bits here. Inputs that are rounded as well, as by `Int8Linear`,
make ONNX Runtime slower, and differ between runtimes where a level is nearly the next one.
"""

from __future__ import annotations

import copy
import json
import logging
import warnings
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pipeline.config import BadInput
from pipeline.models.convert_rt import ConvertNetwork
from pipeline.models.convert_rt.encoder import Places
from pipeline.models.int8 import Int8Linear, linear_layers
from pipeline.models.ranker import Ranker
from pipeline.models.settings import SETTINGS

MODEL = "model.onnx"
_OPSET = 18
_OUTPUTS = ("context", "candidate", "sentence")


def export(ranker: Ranker, folder: Path) -> None:
    """Writes the directory, which is there and empty. The paper's size takes 10 s.

    Raises BadInput for another architecture, for a multi-context model, and where the package onnxscript
    is missing.
    """
    network = ranker.network
    is_supported = isinstance(network, ConvertNetwork) and not (
        network.config.earlier_turns or network.config.context_codes
    )
    if not is_supported:
        raise BadInput(f"architecture: {ranker.config.architecture!r} is not allowed; allowed: 'convert' "
                       "with ranker.earlier_turns 0 and ranker.context_codes 0, for --to onnx")  # fmt: skip
    assert isinstance(network, ConvertNetwork)
    if not find_spec("onnxscript"):
        raise BadInput("--to onnx: needs the package onnxscript; pip install -e '.[onnx]'")
    network = copy.deepcopy(network).requires_grad_(False)
    for name, layer in linear_layers(network.blocks).items():
        if isinstance(layer, Int8Linear):
            network.blocks.set_submodule(name, _Int8Weights(layer))
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)  # it warns that there is no torchvision
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # of torch's own code
        program = torch.onnx.export(
            _HalfWeights(_Encodings(network)).eval(),
            (torch.zeros(2, 3, dtype=torch.long),),
            input_names=["ids"],
            output_names=_OUTPUTS,
            dynamic_shapes=({0: torch.export.Dim("B"), 1: torch.export.Dim("T")},),
            opset_version=_OPSET,
            verbose=False,
        )
    assert program is not None
    model = program.model_proto
    # With the shapes of all values ONNX Runtime 1.32 fuses each sum and the norm behind it into an operator
    # that takes ten times as long on a CPU: a batch took 0.28 s, without them 0.25.
    del model.graph.value_info[:]
    (folder / MODEL).write_bytes(model.SerializeToString())
    ranker.tokenizer.save(folder)
    (folder / SETTINGS).write_text(json.dumps(asdict(ranker.config), indent=1) + "\n")


class _Padded(Places):
    """Places that leave the pads in: the shapes of a graph cannot depend on their number."""

    def __init__(self, mask_BT: Tensor) -> None:
        self.mask_BT = mask_BT

    def pack(self, padded: Tensor) -> Tensor:
        return padded

    def unpack(self, packed: Tensor) -> Tensor:
        return packed


class _Encodings(nn.Module):
    """Ids to the outputs of the graph."""

    def __init__(self, network: ConvertNetwork) -> None:
        super().__init__()
        self.network = network

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        network, mask_BT = self.network, ids_BT != self.network.pad
        hidden_BTD = network.tokens(ids_BT)
        for layer in network.blocks.layers:
            hidden_BTD = layer(hidden_BTD, _Padded(mask_BT))
        r = network.reduction(hidden_BTD, mask_BT)
        return network.context(r), network.candidate(r), r


class _Int8Weights(nn.Module):
    """A linear layer of 8-bit weights; ONNX Runtime computes the float ones when it loads a model."""

    levels_OI: Tensor
    scale_O1: Tensor
    bias: Tensor | None

    def __init__(self, layer: Int8Linear) -> None:
        super().__init__()
        self.register_buffer("levels_OI", layer.levels_OI)
        self.register_buffer("scale_O1", layer.scale_O1)
        self.register_buffer("bias", layer.bias)

    def forward(self, inputs: Tensor) -> Tensor:
        return F.linear(inputs, self.levels_OI.float() * self.scale_O1, self.bias)


class _HalfWeights(nn.Module):
    """A module whose weights are stored in 16 bits where that loses nothing of them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        halves = {name: value.half() for name, value in module.named_parameters()
                  if torch.equal(value.half().float(), value)}  # fmt: skip
        self._names = list(halves)
        self._halves = nn.ParameterList(halves.values()).requires_grad_(False)

    def forward(self, ids_BT: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights = {
            name: value.float() for name, value in zip(self._names, self._halves, strict=True)
        }
        outputs: tuple[Tensor, Tensor, Tensor] = torch.func.functional_call(
            self._module, weights, (ids_BT,)
        )
        return outputs
