"""A single-context ConveRT as ONNX, for services without torch.

    model.onnx         "ids" int64 [B, T], padded with the pad id → "context" and "candidate" float32 [B, E],
                       encodings of length 1, and "sentence" float32 [B, R], which other tasks take
    vocabulary.json    what makes the ids (reference 5.1); a text without a token is one pad id
    ranker.json        the settings

The graph is the formulas of pipeline/models/convert/encoder.py. Its weights are what the model's own file
holds: the tables' levels in 8 bits, all others in 16, computed with in float32. Of blocks of 8 bits
(`Ranker.quantise`) only the weights have 8 bits here. Inputs that are rounded as well, as in
pipeline/models/convert/int8.py, make ONNX Runtime slower, and differ between runtimes where a level is
nearly the next one.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pipeline.config import BadInput
from pipeline.models.convert import ConvertNetwork
from pipeline.models.convert.encoder import NORM_EPSILON, Block, FeedForward2, Norm
from pipeline.models.convert.int8 import Int8Linear
from pipeline.models.convert.quantisation import LEVELS, Table
from pipeline.models.ranker import Ranker
from pipeline.models.settings import SETTINGS

MODEL = "model.onnx"
_OPSET, _IR = 18, 9
_MASKED, _LEAST_SQUARE = -1e9, 1e-12


def export(ranker: Ranker, folder: Path) -> None:
    """Writes the directory, which is there and empty.

    Raises BadInput for another architecture, for a multi-context model, and where the package onnx is
    missing.
    """
    network = ranker.network
    is_supported = isinstance(network, ConvertNetwork) and not (
        network.config.earlier_turns or network.config.context_codes
    )
    if not is_supported:
        raise BadInput(f"architecture: {ranker.config.architecture!r} is not allowed; allowed: 'convert' "
                       "with ranker.earlier_turns 0 and ranker.context_codes 0, for --to onnx")  # fmt: skip
    assert isinstance(network, ConvertNetwork)
    try:
        import onnx
    except ImportError:
        raise BadInput("--to onnx: needs the package onnx; pip install -e '.[onnx]'") from None
    graph = _Graph(onnx.helper)
    with torch.no_grad():
        _build(graph, network)
    onnx.save(graph.model(network), str(folder / MODEL))
    ranker.tokenizer.save(folder)
    (folder / SETTINGS).write_text(json.dumps(asdict(ranker.config), indent=1) + "\n")


class _Graph:
    """Nodes and weights of an ONNX graph; a value is its name."""

    def __init__(self, helper: Any) -> None:
        self._helper = helper
        self._nodes: list[Any] = []
        self._weights: list[Any] = []
        self._names: Iterator[str] = (f"v{number}" for number in range(1_000_000))

    def __call__(self, kind: str, *inputs: str, name: str = "", **attributes: Any) -> str:
        """Adds an operator and returns its output."""
        output = name or next(self._names)
        self._nodes.append(self._helper.make_node(kind, inputs, [output], **attributes))
        return output

    def constant(self, value: Any) -> str:
        """A weight: floats are stored in 16 bits where that loses nothing of them."""
        array = np.asarray(value.numpy() if isinstance(value, Tensor) else value)
        if array.dtype == np.float64:
            array = array.astype(np.float32)
        half = array.astype(np.float16) if array.dtype == np.float32 and array.size > 64 else array
        stored = half if np.array_equal(half, array) else array
        name = next(self._names)
        kind = self._helper.np_dtype_to_tensor_dtype(stored.dtype)
        tensor = self._helper.make_tensor(name, kind, stored.shape, stored.tobytes(), raw=True)
        self._weights.append(tensor)
        return self("Cast", name, to=1) if stored.dtype == np.float16 else name  # 1: float32

    def normalise(self, value: str, norm: Norm) -> str:
        gamma, beta = self.constant(norm.gamma), self.constant(norm.beta)
        return self("LayerNormalization", value, gamma, beta, axis=-1, epsilon=NORM_EPSILON)

    def linear(self, value: str, layer: torch.nn.Module) -> str:
        product = self("MatMul", value, *self.weights(layer))
        bias = layer.bias
        assert bias is None or isinstance(bias, Tensor)
        return product if bias is None else self("Add", product, self.constant(bias))

    def weights(self, layer: torch.nn.Module, parts: int = 1) -> list[str]:
        """The weights [I, O] of a linear layer, in so many parts of its outputs.

        ONNX Runtime computes constants when it loads a model, so 8-bit weights cost no time in a run.
        """
        if not isinstance(layer, Int8Linear):
            assert isinstance(layer, torch.nn.Linear)
            return [self.constant(part.t().contiguous()) for part in layer.weight.chunk(parts)]
        levels = [part.t().contiguous() for part in layer.levels_OI.chunk(parts)]
        scales = [part.t().contiguous() for part in layer.scale_O1.chunk(parts)]
        return [
            self("Mul", self("Cast", self.constant(levels_IO), to=1), self.constant(scale_1O))
            for levels_IO, scale_1O in zip(levels, scales, strict=True)
        ]

    def activate(self, value: str, name: str) -> str:
        if name == "relu":
            return self("Relu", value)
        return self("Mul", value, self("Sigmoid", self("Mul", value, self.constant(1.702))))

    def model(self, network: ConvertNetwork) -> Any:
        """With the outputs that `_build` has named."""
        helper, config = self._helper, network.config
        widths = {"context": config.encoding_width, "candidate": config.encoding_width,
                  "sentence": config.reduction_heads * config.width}  # fmt: skip
        ids = helper.make_tensor_value_info("ids", 7, ["B", "T"])  # 7: int64
        outputs = [helper.make_tensor_value_info(n, 1, ["B", width]) for n, width in widths.items()]
        graph = helper.make_graph(self._nodes, "ConveRT", [ids], outputs, self._weights)
        opset = [helper.make_opsetid("", _OPSET)]
        return helper.make_model(graph, opset_imports=opset, ir_version=_IR)


def _build(graph: _Graph, network: ConvertNetwork) -> None:
    config = network.config
    length = graph("Gather", graph("Shape", "ids"), graph.constant(np.int64(1)))
    zero, one = graph.constant(np.int64(0)), graph.constant(np.int64(1))
    place_T = graph("Range", zero, length, one)
    is_token = graph("Not", graph("Equal", "ids", graph.constant(np.int64(network.pad))))
    mask_BT = graph("Cast", is_token, to=1)

    rows = _look_up(graph, network.tokens.subwords, "ids")
    hidden = graph("Mul", rows, graph.constant(math.sqrt(config.width)))
    for table in network.tokens.positions:
        assert isinstance(table, Table)
        place = graph("Mod", place_T, graph.constant(np.int64(table.rows)))
        hidden = graph("Add", hidden, _look_up(graph, table, place))
    hidden = graph.normalise(hidden, network.tokens.norm)

    axes = graph.constant(np.array([1], np.int64))
    column_T1 = graph("Unsqueeze", place_T, axes)
    distance_TT = graph("Sub", place_T, column_T1)
    hidden_mask = graph("Unsqueeze", mask_BT, axes)  # [B, 1, T]
    penalty = graph("Mul", graph("Sub", graph.constant(1.0), hidden_mask), graph.constant(_MASKED))
    for block in network.blocks.layers:
        assert isinstance(block, Block)
        hidden = _block(graph, block, hidden, penalty, distance_TT)

    sums = [
        _reduce_head(graph, query, key, hidden, mask_BT, penalty)
        for query, key in zip(network.reduction.queries, network.reduction.keys, strict=True)
    ]
    r = graph("Concat", *sums, axis=-1, name="sentence")
    for name in ("context", "candidate"):
        _feed_forward_2(graph, getattr(network, name), network.skip.weight, r, name)


def _look_up(graph: _Graph, table: Table, ids: str) -> str:
    if table.levels is None:
        assert table.weight is not None
        return graph("Gather", graph.constant(table.weight), ids)
    levels, low, high = table.to_levels()
    rows = graph("Cast", graph("Gather", graph.constant(levels), ids), to=1)
    scaled = graph("Mul", rows, graph.constant((high - low) / LEVELS))
    return graph("Add", scaled, graph.constant(low))


def _block(graph: _Graph, block: Block, hidden: str, penalty: str, distance_TT: str) -> str:
    attention = block.attention
    q, k, v = (graph("MatMul", hidden, part) for part in graph.weights(attention.qkv, parts=3))
    logits = graph("MatMul", q, graph("Transpose", k, perm=[0, 2, 1]))
    logits = graph("Div", logits, graph.constant(math.sqrt(attention.projection)))
    place = graph("Add", distance_TT, graph.constant(np.int64(attention.longest)))
    logits = graph("Add", logits, graph("Gather", graph.constant(attention.bias), place))
    outside = graph(
        "Greater", graph("Abs", distance_TT), graph.constant(np.int64(attention.window))
    )
    logits = graph("Where", outside, graph.constant(_MASKED), logits)
    weights = graph("Softmax", graph("Add", logits, penalty), axis=-1)
    hidden = graph("Add", hidden, graph.linear(graph("MatMul", weights, v), attention.out))
    hidden = graph.normalise(hidden, block.norm_1)
    wide = graph.activate(graph.linear(hidden, block.feed_forward.wide), "fast_gelu")
    return graph.normalise(
        graph("Add", hidden, graph.linear(wide, block.feed_forward.narrow)), block.norm_2
    )


def _reduce_head(
    graph: _Graph, query: Tensor, key: Tensor, hidden: str, mask_BT: str, penalty: str
) -> str:
    """[B, D]: the weighted sum of the tokens by one head of the reduction."""
    axes = graph.constant(np.array([1], np.int64))
    q, k = (graph("MatMul", hidden, graph.constant(part)) for part in (query, key))
    logits = graph("MatMul", q, graph("Transpose", k, perm=[0, 2, 1]))
    attention = graph("Softmax", graph("Add", logits, penalty), axis=-1)
    # Pads give nothing: their row of the mask is 0.
    weights_B1T = graph("MatMul", graph("Unsqueeze", mask_BT, axes), attention)
    count = graph("ReduceSum", mask_BT, axes, keepdims=1)
    root = graph("Sqrt", graph("Max", count, graph.constant(1.0)))
    summed = graph("Squeeze", graph("MatMul", weights_B1T, hidden), axes)
    return graph("Div", summed, root)


def _feed_forward_2(graph: _Graph, side: FeedForward2, skip: Tensor, r: str, name: str) -> None:
    hidden = graph.normalise(r, side.norm_in)
    weights, number = dict(side.named_parameters()), 1
    while f"hidden_{number}.weight" in weights:
        product = graph("MatMul", hidden, graph.constant(weights[f"hidden_{number}.weight"]))
        hidden = graph.activate(product, side.activation)
        hidden = graph.normalise(hidden, getattr(side, f"norm_{number}"))
        number += 1
    out = graph("MatMul", hidden, graph.constant(weights["out.weight"]))
    summed = graph("Add", out, graph("MatMul", r, graph.constant(skip)))
    summed = graph.normalise(summed, side.norm_out)
    axes = graph.constant(np.array([1], np.int64))
    square = graph("ReduceSum", graph("Mul", summed, summed), axes, keepdims=1)
    length = graph("Sqrt", graph("Max", square, graph.constant(_LEAST_SQUARE)))
    graph("Div", summed, length, name=name)
