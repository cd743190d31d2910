"""Custom operators whose formula can't be traced are hidden; everything else is left alone."""

import gc

import pytest
import torch

import cgpass
from cgpass import telemetry
from cgpass.compile import formulas
from tests.usage.programs import Setting, differences


def segments(offs):
    ends = offs.tolist()
    rows = zip([0, *ends], ends, strict=False)
    return [(i, start, end) for i, (start, end) in enumerate(rows) if start != end]


@torch.library.custom_op("cgpass_tests::scale_rows", mutates_args=())
def scale_rows(
    x: torch.Tensor,
    w: torch.Tensor,
    offs: torch.Tensor,
    bias: torch.Tensor | None,
    factor: float = 2.0,
) -> torch.Tensor:
    out = torch.zeros_like(x)
    for i, start, end in segments(offs):
        out[start:end] = x[start:end] * w[i] * factor
    return out if bias is None else out + bias


@scale_rows.register_fake
def _(x, w, offs, bias, factor=2.0):
    return torch.empty_like(x)


def scale_rows_setup(ctx, inputs, output):
    x, w, offs, bias, ctx.factor = inputs
    ctx.save_for_backward(x, w)
    ctx.offs, ctx.has_bias = offs, bias is not None


def scale_rows_backward(ctx, grad):
    x, w = ctx.saved_tensors
    grad_x, grad_w = torch.zeros_like(x), torch.zeros_like(w)
    for i, start, end in segments(ctx.offs):
        grad_x[start:end] = grad[start:end] * w[i] * ctx.factor
        grad_w[i] = (grad[start:end] * x[start:end]).sum(0) * ctx.factor
    # the bias gets the incoming gradient itself, whole: autograd sums it to the bias's shape
    return grad_x, grad_w, None, grad if ctx.has_bias else None, None


scale_rows.register_autograd(scale_rows_backward, setup_context=scale_rows_setup)


@torch.library.custom_op("cgpass_tests::both", mutates_args=())
def both(x: torch.Tensor, power: int = 2) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return x**power, x * 3.0, x.argsort()


@both.register_fake
def _(x, power=2):
    return torch.empty_like(x), torch.empty_like(x), torch.empty_like(x, dtype=torch.int64)


def both_setup(ctx, inputs, output):
    x, ctx.power = inputs
    ctx.save_for_backward(x)
    ctx.set_materialize_grads(False)


def both_backward(ctx, grad_power, grad_triple, _):
    (x,) = ctx.saved_tensors
    assert ctx.needs_input_grad[0]
    assert x.sum().isfinite()
    grad = torch.zeros_like(x)
    if grad_power is not None:
        with torch.enable_grad():  # a formula that computes by autograd itself
            again = x.detach().requires_grad_()
            grad += torch.autograd.grad(again**ctx.power, again, grad_power)[0]
    if grad_triple is not None:
        grad += grad_triple * 3.0
    return grad, None


both.register_autograd(both_backward, setup_context=both_setup)


def custom(name, schema, fn, backward=None, setup=None):
    op = torch.library.custom_op(f"cgpass_tests::{name}", fn, mutates_args=(), schema=schema)
    op.register_fake(fn)
    if backward is not None:
        op.register_autograd(backward, setup_context=setup)
    return op


def reads(grad):
    return grad if grad.sum() > 0 else -grad


marked = custom(
    "marked",
    "(Tensor x) -> (Tensor, Tensor)",
    lambda x: (x * 2.0, x * 3.0),
    lambda ctx, grad, _: reads(grad),
    lambda ctx, inputs, output: ctx.mark_non_differentiable(output[1]),
)
by_keyword = custom(
    "by_keyword",
    "(Tensor x, *, int power=2) -> Tensor",
    lambda x, power=2: x**power,
    lambda ctx, grad: reads(grad),
)
of_list = custom(
    "of_list",
    "(Tensor[] xs) -> Tensor",
    lambda xs: xs[0] + xs[1],
    lambda ctx, grad: [reads(grad)] * 2,
)
traceable = custom(
    "traceable",
    "(Tensor x) -> Tensor",
    lambda x: x.sin(),
    lambda ctx, grad: grad * ctx.saved_tensors[0].cos(),
    lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)

pytestmark = pytest.mark.usefixtures("nothing_compiled_stays")
OPTIONS = {"on_skip": "silent", "min_partition_ops": 1}
OFFS = torch.tensor([1, 1, 4])


def compare(fn, make_args, compiler="eager"):
    """The graphs compiled; the bits are those without graphs and near those of eager."""

    def program(session):
        call = session.compile(fn, fullgraph=True)
        for _ in range(4):
            args = make_args()
            outs = call(*args)
            outs = outs if isinstance(outs, tuple) else (outs,)
            sum(out.square().sum() for out in outs if out.requires_grad).backward()
            yield [out.detach() for out in outs]
            yield [a.grad for a in args if isinstance(a, torch.Tensor) and a.requires_grad]

    setting = Setting(torch.device("cpu"), "simulated", compiler)
    before = telemetry.counters()["graphs"]
    recorded = setting.run(program, **OPTIONS)
    graphs = [graph.summary for graph in telemetry.graphs(before)]
    assert not differences(recorded, setting.run(program, driver="none", **OPTIONS))
    torch.testing.assert_close(recorded, setting.run_eagerly(program))
    return graphs


def kinds(graph):
    return ["captured" if part.captured else "eager" for part in graph.partitions]


def leaf(*shape):
    return torch.randn(*shape, requires_grad=True)


def layered(x, w, offs, bias):
    return torch.tanh(scale_rows(torch.sin(x), w, offs, bias, 0.5))


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("with_bias", [True, False])
def test_training_is_one_graph_with_eager_parts(compiler, with_bias):
    def make():
        return leaf(4, 3), leaf(3, 3), OFFS, leaf(3) if with_bias else None

    forward, backward = compare(layered, make, compiler)
    assert (forward.direction, backward.direction) == ("forward", "backward")
    assert kinds(forward) == ["captured", "eager", "captured"]
    assert kinds(backward) == ["captured", "eager", "captured"]
    (reason,) = map(str, forward.partitions[1].reasons)
    assert reason.startswith("cgpass_tests.scale_rows.default at test_formulas.py:")
    assert "its autograd formula can't be traced" in reason
    assert [part.num_ops for part in backward.partitions if not part.captured] == [1]
    assert str(backward.partitions[1].reasons[0]).startswith(
        "backward of cgpass_tests.scale_rows.default"
    )


def test_gradients_keep_the_strides_of_transposed_inputs():
    def fn(x, w, offs):
        return scale_rows(x.t() * 1.0, w.t(), offs, None).cos()

    graphs = compare(fn, lambda: (leaf(3, 4), leaf(3, 3), OFFS), "inductor")
    assert [graph.direction for graph in graphs] == ["forward", "backward"]


def test_missing_gradients_and_named_arguments():
    def fn(x):
        _, triple, order = both(x.sin(), power=3)
        return triple.cos(), order

    forward, backward = compare(fn, lambda: (leaf(5),))
    assert kinds(forward) == kinds(backward) == ["captured", "eager", "captured"]


@pytest.mark.parametrize(
    ("call", "hidden"),
    [
        (traceable, False),
        (lambda x: marked(x)[0], True),
        (lambda x: by_keyword(x, power=3), True),
    ],
)
def test_a_formula_is_an_operator_of_its_own_only_if_it_reads_data(call, hidden):
    for graph in compare(lambda x: call(x.sin()).cos(), lambda: (leaf(3),)):
        assert kinds(graph) == (["captured", "eager", "captured"] if hidden else ["captured"])


@pytest.mark.parametrize(
    ("driver", "compiler"), [("simulated", "eager"), ("simulated", "inductor"), ("none", "eager")]
)
def test_traced_calls_of_formulas_live_as_long_as_who_may_call_them(compiler, driver):
    """A backward may be due when its function is forgotten."""
    options = {"driver": driver, "compiler": compiler, **OPTIONS}
    gc.collect()
    before = len(formulas._calls)
    fn = torch.compile(layered, backend=cgpass.cgpass, options=options, dynamic=True)
    for rows in (4, 6, 4, 6, None):
        args = leaf(rows or 4, 3), leaf(3, 3), OFFS, None
        out = fn(*args)
        if rows is None:
            del fn
            torch.compiler.reset()
            gc.collect()
        assert len(formulas._calls) == before + 1
        found = torch.autograd.grad(out.sum(), args[:2])
        torch.testing.assert_close(found, torch.autograd.grad(layered(*args).sum(), args[:2]))
    del out
    gc.collect()
    assert len(formulas._calls) == before


def test_operators_of_lists_break_the_graph():
    options = {"driver": "simulated", "compiler": "eager", **OPTIONS}
    call = torch.compile(lambda x: of_list([x.sin(), x]), backend=cgpass.cgpass, options=options)
    x = leaf(3)
    call(x).sum().backward()
    assert torch.equal(x.grad, x.cos().detach() + 1)
