"""Lifting of CPU scalars and constants, on fake CUDA tensors."""

import pytest
import torch
from expecttest import assert_expected_inline

from cgpass.compile.facts.capturability import why_not_capturable
from cgpass.compile.passes import lift_cpu_scalars
from cgpass.compile.passes.base import PassContext, graph_text
from cgpass.compile.passes.lift_cpu_scalars import LiftCpuScalars, move_constant
from tests.graphs import CUDA, Spec, calls, cpu, fake_cuda, inference_graph, ints

aten = torch.ops.aten
CONTEXT = PassContext(device=CUDA, stage="partition", direction="forward")


@pytest.fixture(autouse=True)
def fake_move(monkeypatch):
    def move(constant, device):
        with fake_cuda():
            return torch.empty(constant.shape, dtype=constant.dtype, device=device)

    monkeypatch.setattr(lift_cpu_scalars, "move_constant", move)


def lift(gm, **settings):
    """Lift, and tell if that changed anything."""
    lifting = LiftCpuScalars(**settings)
    before = graph_text(gm)
    lifting.run(gm, CONTEXT)
    once = graph_text(gm)
    lifting.run(gm, CONTEXT)
    assert graph_text(gm) == once
    gm.graph.lint()
    return once != before


def boundaries(gm):
    found = ((n.name, why_not_capturable(n, CUDA)) for n in gm.graph.nodes)
    return {name: reason.code for name, reason in found if reason}


def test_a_scalar_input_is_copied_once_for_all_readers():
    gm = inference_graph(lambda x, s: (x * s).sin() + s, (3,), cpu())
    assert boundaries(gm) == {"mul": "cpu_scalar", "add": "cpu_scalar"}
    assert lift(gm)
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: float32[3]@cuda = placeholder
arg1_1: float32[]@cpu = placeholder
_to_copy_default: float32[]@cuda = aten._to_copy.default(arg1_1, device=cuda:0, non_blocking=True)
mul: float32[3]@cuda = aten.mul.Tensor(arg0_1, _to_copy_default)
sin: float32[3]@cuda = aten.sin.default(mul)
add: float32[3]@cuda = aten.add.Tensor(sin, _to_copy_default)
return (add,)""",
    )
    assert boundaries(gm) == {}


def test_filled_tensors_are_made_on_the_device():
    def fn(x):
        return x * torch.full((), 2.0), x + torch.ones(3).to("cuda:0")

    gm = inference_graph(fn, (3,))
    assert lift(gm)
    assert_expected_inline(
        graph_text(gm),
        """\
arg0_1: float32[3]@cuda = placeholder
full_default: float32[]@cuda = aten.full.default([], 2.0, dtype=torch.float32, layout=torch.strided, device=cuda:0)
mul: float32[3]@cuda = aten.mul.Tensor(arg0_1, full_default)
full_default_1: float32[3]@cuda = aten.full.default([3], 1, dtype=torch.float32, layout=torch.strided, device=cuda:0)
_to_copy: float32[3]@cuda = aten._to_copy.default(full_default_1, dtype=torch.float32, layout=torch.strided, device=cuda:0)
add: float32[3]@cuda = aten.add.Tensor(arg0_1, _to_copy)
return (mul, add)""",
    )
    assert boundaries(gm) == {}


@pytest.mark.parametrize(
    ("fn", "specs", "aten_kernels", "left"),
    [
        (lambda x: x + torch.tensor([1.0, 2.0, 3.0]).to("cuda:0"), [(3,)], False, {}),
        (lambda x, s: x * (s + 1), [(3,), cpu()], True, {}),
        (lambda x, s: x * (s / 3.0), [(3,), cpu()], False, {}),
        (lambda x, s: s / x, [(64,), cpu(dtype=torch.float64)], True, {}),
        (lambda x, s: s**x, [(64,), cpu(dtype=torch.float64)], True, {}),
        (lambda x, s: x.long() // s, [(64,), cpu(dtype=torch.int64)], True, {}),
        (
            lambda x, s: x * (s / 3.0),
            [(3,), cpu()],
            True,
            {"div": "cpu_number", "_to_copy_default": "lifted"},
        ),
        (
            lambda x, s: x * s.sum(),
            [(3,), cpu(3)],
            False,
            {"sum_1": "cpu_tensor", "_to_copy_default": "lifted"},
        ),
    ],
)
def test_what_is_left_on_the_host(fn, specs, aten_kernels, left):
    gm = inference_graph(fn, *specs)
    assert lift(gm, aten_kernels=aten_kernels)
    assert boundaries(gm) == left


@pytest.mark.parametrize("put", [None, torch.ops.prims.device_put.default])
def test_a_constant_that_is_handed_out_or_without_values_is_copied_every_call(put):
    gm = inference_graph(lambda x: (x, torch.tensor([1.0, 2.0]).to("cuda:0")), (3,))
    (copy,) = calls(gm, aten._to_copy.default)
    if (
        put is not None
    ):  # as Inductor decomposes it, which makes no copy where the device is the same
        copy.target, copy.args, copy.kwargs = put, (copy.args[0], CUDA), {}
    assert lift(gm)
    assert copy.target is (aten._to_copy.default if put is None else aten.clone.default)
    assert copy in gm.graph.output_node().all_input_nodes
    assert boundaries(gm) == {}
    gm = inference_graph(lambda x: x * torch.tensor(2.0), (3,))
    with fake_cuda():
        gm._tensor_constant0 = torch.empty(())
    assert lift(gm)
    assert list(boundaries(gm).values()) == ["cpu_number", "lifted"]


def written_before(fn):
    """A graph whose scalar is written before its only reader."""
    gm = inference_graph(fn, (3,), cpu())
    scalar = next(n for n in gm.graph.nodes if not n.meta["val"].dim())
    (reader,) = scalar.users
    with gm.graph.inserting_before(reader):
        write = gm.graph.call_function(aten.fill_.Scalar, (scalar, 2.0))
    write.meta["val"] = scalar.meta["val"]
    return gm, reader, scalar


def test_a_scalar_that_is_written_before_its_reader_stays_on_the_host():
    gm, _, _ = written_before(lambda x, s: x * (s + 1))
    assert lift(gm)
    assert boundaries(gm)["add"] == "cpu_number"
    gm, mul, scalar = written_before(lambda x, s: x * s)
    assert not lift(gm)
    assert mul.args[1] is scalar


@pytest.mark.parametrize("aten_kernels", [False, True])
@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda x, s: x * s, torch.float16),
        (lambda x, s: s - x, torch.bfloat16),
        (lambda x, s: torch.add(x, s, alpha=3), torch.bfloat16),
        (torch.rsub, torch.float16),
        (lambda x, s: x / s, torch.float32),
        (lambda x, s: x // s, torch.float32),
        (lambda x, s: torch.div(x, s, rounding_mode="trunc"), torch.float32),
        (torch.pow, torch.float32),
    ],
    ids=["mul", "sub", "alpha", "rsub", "div", "floor", "trunc", "pow"],
)
def test_aten_s_kernels_get_scalars_on_the_host_where_the_bits_differ(fn, dtype, aten_kernels):
    gm = inference_graph(fn, Spec((64,), dtype), cpu(dtype=torch.float64))
    assert lift(gm, aten_kernels=aten_kernels) is not aten_kernels
    assert list(boundaries(gm).values()) == ["cpu_scalar"] * aten_kernels


def test_a_scalar_that_is_computed_on_the_cpu_by_name_is_computed_on_the_device():
    gm = inference_graph(lambda x, s: x * s.to("cpu", torch.float64), (3,), cpu())
    assert lift(gm)
    assert {node.kwargs["device"] for node in calls(gm, aten._to_copy.default)} == {CUDA}


@pytest.mark.parametrize(
    ("fn", "specs"),
    [
        (lambda x, y: x.sin() * y, [(3,), (3,)]),
        (lambda x, s: (x.sin(), s + 1), [(3,), cpu()]),
        (lambda x, y: x + y.to("cuda:0"), [(3,), cpu(3)]),
        (lambda x, i: x[i], [(3,), cpu(2, dtype=torch.int64)]),
        (lambda x, i: x[i], [(3,), ints(2)]),
    ],
    ids=["no scalar", "no device reader", "copied by the user", "CPU index", "device index"],
)
@pytest.mark.parametrize("aten_kernels", [False, True])
def test_what_is_no_needless_boundary_is_left_alone(fn, specs, aten_kernels):
    gm = inference_graph(fn, *specs)
    before = graph_text(gm)
    assert not lift(gm, aten_kernels=aten_kernels)
    assert graph_text(gm) == before


def test_a_scalar_that_is_written_after_its_readers_is_lifted():
    def fn(x, s):
        y = x * s
        s.add_(1)
        return y

    gm = inference_graph(fn, (3,), cpu())
    assert lift(gm)
    assert "mul" not in boundaries(gm)


def test_constants_move_as_real_tensors_while_tracing():
    constant = torch.nn.Parameter(torch.ones(2))
    with fake_cuda():
        moved = move_constant(constant, torch.device("cpu"))
    assert type(moved) is torch.Tensor
    assert moved.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_a_number_that_is_made_a_tensor_is_no_copy_of_one(device):
    gm = inference_graph(lambda x: x * 2.0, (3,))
    (mul,) = calls(gm, aten.mul.Tensor)
    with gm.graph.inserting_before(mul):
        made = gm.graph.call_function(aten._to_copy.default, (2,), {"dtype": torch.float32})
    with fake_cuda():
        made.meta["val"] = torch.empty((), device=device)
    mul.args = (mul.args[0], made)
    LiftCpuScalars().run(gm, PassContext(CUDA, "graph", "inference"))
    gm.graph.eliminate_dead_code()
    on_device = [made] if device == CUDA else []
    assert calls(gm, aten._to_copy.default) == on_device
    assert len(calls(gm, aten.full.default)) == (not on_device)
    assert all(why_not_capturable(node, CUDA) is None for node in gm.graph.nodes)
