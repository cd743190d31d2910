"""Quantised values are told by what made them: their fake tensors are plain ones."""

import pytest
import torch
from torch import fx

from cgpass.compile.facts.capturability import why_not_capturable
from cgpass.compile.facts.quantised import quantised_nodes

aten = torch.ops.aten
CPU = torch.device("cpu")


def graph_of(*calls):
    """A graph of calls one after the other, each on the one before; `(target, dtype of its value, *args)`."""
    graph = fx.Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty(2, 3)
    for target, dtype, *args in calls:
        node = graph.call_function(target, (node, *args))
        node.meta["val"] = torch.empty(2, 3, dtype=dtype)
    graph.output((node,))
    return fx.GraphModule(torch.nn.Module(), graph)


QUANTISE = (aten.quantize_per_tensor.default, torch.float32, 0.1, 0, torch.qint8)
RELU = (aten.relu.default, torch.float32)
COS = (aten.cos.default, torch.float32)
DEQUANTISE = (aten.dequantize.self, torch.float32)


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([COS, RELU], []),
        ([COS, QUANTISE, DEQUANTISE, RELU], ["quantize_per_tensor_default"]),
        ([QUANTISE, RELU, COS], ["cos_default", "quantize_per_tensor_default", "relu_default"]),
        ([QUANTISE, (aten.int_repr.default, torch.int8), RELU], ["quantize_per_tensor_default"]),
        ([QUANTISE, (aten.ne.Scalar, torch.bool, 0), RELU], ["quantize_per_tensor_default"]),
    ],
    ids=["none", "taken back", "handed on", "integers", "a comparison"],
)
def test_what_is_quantised(calls, expected):
    assert sorted(node.name for node in quantised_nodes(graph_of(*calls).graph)) == expected


def test_what_makes_and_what_reads_them_is_not_captured():
    gm = graph_of(COS, QUANTISE, DEQUANTISE, RELU)
    found = {n.name: why_not_capturable(n, CPU) for n in gm.graph.nodes if n.op == "call_function"}
    details = {name: reason and (reason.code, reason.detail) for name, reason in found.items()}
    assert details == {
        "cos_default": None,
        "quantize_per_tensor_default": ("layout", "it makes a quantised tensor"),
        "dequantize_self": ("layout", "it reads a quantised tensor"),
        "relu_default": None,
    }
