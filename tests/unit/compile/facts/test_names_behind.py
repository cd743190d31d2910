"""By which names a node may be listed in `unsafe_ops`."""

import operator

import pytest
import torch
from torch.nn import functional as F

import cgpass
from cgpass.compile.facts.capturability import names_behind, why_not_capturable
from tests.graphs import CUDA
from tests.unit.compile.facts.test_capturability import by_hand

aten = torch.ops.aten


def behind(target, *args, **meta):
    node = by_hand(target, *args, "x")
    node.meta.update(meta)
    return sorted(names_behind(node))


MM = ["aten::mm", "aten::mm.default"]
WRAP = torch.ops.higher_order.graphsafe_run_with_rng_state


def test_a_node_is_the_operator_that_it_calls_or_wraps_or_was_decomposed_from():
    assert behind(aten.mm.default) == MM
    assert behind(torch.ops.higher_order.cond) == ["higher_order::cond"]
    assert set(MM) < {*behind(WRAP, aten.mm.default)}
    found = behind(aten.mm.default, original_aten=aten.add.Tensor)
    assert found == ["aten::add", "aten::add.Tensor", *MM]
    forwards = behind(aten.mm.default, fwd_source_fn_stack=[("f", F.linear)])
    assert forwards == MM, "of a backward's nodes"


@pytest.mark.parametrize(
    ("target", "names"),
    [
        (F.linear, {"aten::linear"}),
        (F.layer_norm, {"aten::layer_norm"}),
        ("softmax", {"aten::softmax"}),
        ("add_", {"aten::add_"}),
        (operator.add, {"aten::add"}),
        (operator.matmul, {"aten::matmul"}),
        (operator.iadd, {"aten::add_"}),
        (operator.itruediv, {"aten::div_"}),
        (operator.getitem, set()),
        (aten.linear.default, {"aten::linear", "aten::linear.default"}),
        (aten.linear, {"aten::linear"}),
        (aten.gelu_backward, {"aten::gelu_backward"}),
        (sorted, set()),
        (len, set()),
    ],
    ids=lambda value: "" if isinstance(value, set) else getattr(value, "__name__", str(value)),
)
def test_the_call_in_the_users_code_is_named(target, names):
    found = set(behind(aten.mm.default, source_fn_stack=[("f", target)])) - {*MM}
    assert {name for name in found if name.count(".") == 0} == {n for n in names if "." not in n}
    assert names <= found


@pytest.mark.parametrize("name", ["aten::linear", "aten::linear.default"])
@pytest.mark.parametrize("make", [lambda: torch.nn.Linear(4, 4), lambda: call_linear])
def test_what_a_module_of_torchs_calls_is_named(name, make):
    module = torch.nn.Linear(4, 4)
    options = {"driver": "simulated", "compiler": "eager", "unsafe_ops": [name]}
    body = make()
    inner = body if body is not call_linear else lambda x: call_linear(x, module.weight)

    def fn(x):
        return inner(x).sin().cos().exp().tanh()

    torch.compile(fn, backend="cgpass", options=options)(torch.ones(4))
    assert f"it is a part of {name}, which is listed in unsafe_ops" in cgpass.summary()


def call_linear(x, weight):
    return F.linear(x, weight)


@pytest.mark.parametrize(
    ("listed", "detail"),
    [
        ("aten::mm", "aten::mm is listed in unsafe_ops"),
        ("aten::linear", "it is a part of aten::linear, which is listed in unsafe_ops"),
    ],
)
def test_a_reason_says_by_which_name_a_node_is_listed(listed, detail):
    node = by_hand(aten.mm.default, "x")
    node.meta["source_fn_stack"] = [("f", F.linear)]
    reason = why_not_capturable(node, CUDA, unsafe_ops=frozenset([listed]))
    assert (reason.code, reason.detail) == ("unsafe_ops", detail)
