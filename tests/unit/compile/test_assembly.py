"""Python's and NumPy's numbers in graphs on fake CUDA tensors: arguments, no reasons to leave anything out."""

import numpy as np
import pytest
import torch

import cgpass
from cgpass import telemetry, torch_private
from cgpass.compile import assembly
from cgpass.compile.passes.base import graph_text
from tests.graphs import CUDA, fake_cuda

aten = torch.ops.aten


@pytest.fixture
def compiled_graphs(monkeypatch):
    """Graphs that Inductor gets; they run as they are."""
    graphs = []

    def inner(gm, _inputs, **_settings):
        graphs.append(gm)

        def run(args):
            inputs = list(args)
            args.clear()
            return list(gm(*inputs))

        return run

    monkeypatch.setattr(torch_private, "inductor_inner", inner)
    return graphs


@pytest.fixture
def plans(monkeypatch):
    """Steps of each plan that is made."""
    found = []
    build = assembly.build_plan

    def noting(*args):
        plan = build(*args)
        found.append([step.name for step in plan.steps])
        return plan

    monkeypatch.setattr(assembly, "build_plan", noting)
    return found


def few(x, k):
    return torch.sin(x * k) + k


def call(fn, numbers, **options):
    torch._dynamo.reset()
    options = {"driver": "none", "compiler": "eager", **options}
    made = torch.compile(fn, backend=cgpass.cgpass, options=options)
    with fake_cuda():
        return [made(torch.ones(3, device=CUDA), number) for number in numbers]


@pytest.mark.parametrize("compiler", ["inductor", "eager"])
@pytest.mark.parametrize("make", [float, np.float64, np.float32], ids=["float", "f64", "f32"])
def test_a_number_that_changes_is_an_argument(plans, compiled_graphs, make, compiler):
    results = call(few, map(make, (0.1, 0.2, 0.3)), compiler=compiler, min_partition_ops=1)
    assert {result.device for result in results} == {CUDA}
    assert plans[-1] == ["_to_copy_default", "captured_0"]
    if compiler == "inductor":
        (argument,) = [
            node.meta["val"]
            for node in compiled_graphs[-1].graph.find_nodes(op="placeholder")
            if not node.meta["val"].dim()
        ]
        wanted = torch.float32 if make is np.float32 else torch.float64
        assert (argument.device, argument.dtype) == (CUDA, wanted)


def test_inductor_gets_a_graph_of_which_nothing_is_captured_as_it_came(compiled_graphs):
    unsafe = ("aten::sin", "aten::mul.Tensor", "aten::add.Tensor")
    call(few, (0.1, 0.2, 0.3), compiler="inductor", unsafe_ops=unsafe, on_skip="silent")
    graph = compiled_graphs[-1]
    assert "float64[]@cpu = placeholder" in graph_text(graph)
    # Inductor decomposed it before, and has no lowering for it.
    assert not graph.graph.find_nodes(op="call_function", target=aten._to_copy.default)
    assert telemetry.graphs()[-1].tally.calls == 2


def test_a_number_that_is_handed_out_too_is_computed_on_the_host_and_nobody_is_told(plans):
    """As one that is saved for a backward is."""

    def fn(x, k):
        return torch.exp(x * k) * torch.sin(x * k), k + 1

    call(fn, map(torch.tensor, (0.1, 0.2)), min_partition_ops=1, on_skip="raise")
    assert plans == [["_to_copy_default", "captured_0", "eager_1"]]
