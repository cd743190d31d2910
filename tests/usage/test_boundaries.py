"""What can't be captured runs beside what can, whether it is known before or found by a capture; errors come through."""

import gc
import logging

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cgpass
from cgpass import telemetry, torch_private
from cgpass.runtime import owner as owners
from tests.operators import doubling, is_recording, with_effect
from tests.usage import programs
from tests.usage.programs import (
    ATEN,
    MLP,
    USUAL,
    FindsRows,
    ReadsValue,
    Ways,
    assert_replays,
    assert_steady,
    counted,
    learn,
)


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_a_number_read_in_the_middle_splits_forward_and_backward(setting, compiler):
    program = programs.trained(ReadsValue, programs.rows(4, 8))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        counters = setting.compare(program, on_skip="silent", compiler=compiler)
    assert_steady(counters, captured=4, eager=2)  # the backward reads the number again


class Narrows(nn.Module):
    """As long as data says, which the backward is compiled for."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x):
        x = self.first(x).relu().tanh().sigmoid()
        columns = x.detach()[:, :, 0].long().max().item() + 3
        return self.second(x[:, :columns]).sigmoid().exp().mean(1)


def test_strides_that_depend_on_data(setting):
    program = programs.trained(Narrows, programs.rows(4, 9, 8))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        setting.compare(program, on_skip="silent")


def test_a_size_that_depends_on_data_splits_the_forward(setting):
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        counters = setting.compare(programs.trained(FindsRows), on_skip="silent")
    assert counters["partitions_eager"] >= 1
    assert_replays(counters)


NOTED = []


@torch.library.custom_op("effects_tests::note", mutates_args=())
def note(x: torch.Tensor) -> torch.Tensor:
    NOTED.append(x.sum().item())
    return x * 2


note.register_fake(torch.empty_like)
with_effect(note)


def twice(session):
    def fn(x):
        return note((note((x * 2).sin()) * x).sin().cos()).exp() * 2

    call = session.compile(fn)
    NOTED.clear()
    results = [call(x) for x in session.batches(4, count=4)]
    return [*results, torch.tensor(NOTED)]


def backward_that_checks(session):
    """The backward of `eigvals` checks for errors of the solver, which torch orders as an effect."""
    call = session.compile(lambda x: (torch.linalg.eigvals((x * 2).sin()).real.sum() * x).sin())
    for x in session.batches(4, 4, count=4):
        x.requires_grad_()
        call(x).sum().backward()
        yield [x.grad]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation for complex")
@pytest.mark.parametrize("program", [twice, backward_that_checks])
def test_effects_happen_at_every_call_between_graphs(slow_way, program, caplog):
    before = telemetry.counters()["graphs"]
    slow_way.compare(program, min_partition_ops=1, on_skip="warn")
    graph = [g.summary for g in telemetry.graphs(before) if g.summary.partitions][-1]
    assert any(part.captured for part in graph.partitions), str(graph)
    if program is twice:
        assert "with_effects(effects_tests.note.default) at" in str(graph)
        assert "with_effects(effects_tests.note.default) at" in caplog.text
    assert "token" not in caplog.text


class Whitened(torch.nn.Module):
    """Checks for errors of a solver between parameters, with the batch first or last among what it reads."""

    def __init__(self):
        super().__init__()
        self.first = torch.nn.Linear(8, 6)
        self.last = torch.nn.Parameter(torch.randn(6, 16))

    def forward(self, x):
        z = self.first(x)
        factor = torch.linalg.cholesky(z.T @ z / len(z) + torch.eye(6, device=x.device))
        z = ((z @ factor) @ self.last).sin()
        return z.square().mean(), z


@pytest.mark.parametrize("check", ["rerecord", "off"])
def test_effects_in_a_forward_with_parameters(way, check):
    def program(session):
        module, call = session.compiled(Whitened)
        for x in session.batches(9, 8, count=8):
            loss, z = call(x)
            yield [z.detach(), *learn(module, loss)]

    counters = way.compare(program, static_input_check=check)
    assert counters["warmups"] == counters["partitions_captured"]
    assert counters["replays"] == counters["calls"] - counters["warmups"] > 0


LIB = torch.library.Library("unsafe_ops_tests", "FRAGMENT")
LIB.define("composite(Tensor x) -> Tensor")
LIB.impl("composite", lambda x: (x * 2).sin(), "CompositeImplicitAutograd")
ops = torch.ops.unsafe_ops_tests

CALLS = {
    "aten::gelu": F.gelu,
    "aten::native_layer_norm": lambda x: F.layer_norm(x, (8,)),
    "aten::linear": lambda x: F.linear(x, x),
    "aten::dropout": F.dropout,
    "aten::add_": lambda x: x.sin().add_(1),
    "aten::scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(
        *(x.view(1, 8, 8),) * 3
    ),
    "unsafe_ops_tests::composite": ops.composite,
    "unsafe_ops_tests::composite.default": ops.composite.default,
}


def before_and_after(op):
    """A training step of `op` between operators that are captured."""

    def program(session):
        def fn(x):
            return (op((x.sin() + 1).cos()) + 1).exp().tanh()

        call = session.compile(fn)
        for x in session.batches(8, 8, count=4):
            x.requires_grad_()
            call(x).sum().backward()
            yield [x.grad, call(x.detach())]

    return program


@pytest.mark.parametrize("name", CALLS)
def test_what_a_named_operator_is_traced_as_runs_between_graphs(way, name):
    before = telemetry.counters()["graphs"]
    way.compare(before_and_after(CALLS[name]), unsafe_ops=(name,), min_partition_ops=1)
    graphs = [g.summary for g in telemetry.graphs(before)]
    graphs = [g for g in graphs if g.partitions and g.direction != "backward"]
    assert graphs
    for graph in graphs:
        eager = [p for p in graph.partitions if not p.captured]
        assert eager, str(graph)
        assert all(name in str(reason) for p in eager for reason in p.reasons), str(graph)


SOME = {"replays": "some"}
PLAINLY = "can't be captured and runs without a graph from now on: tests.fails_as_cuda_does"


syncs, waits = (doubling(name, reads=True) for name in ("syncs", "reads_in_both"))
fails = doubling("fails_as_cuda_does", in_captures=False)


@torch.library.custom_op("failures::fails_oddly", mutates_args=())
def fails_oddly(x: torch.Tensor) -> torch.Tensor:
    """Fails in captures with an error that nobody would know for one of a capture."""
    if is_recording(x.device):
        raise ValueError("odd")
    return x * 2


@torch.library.custom_op("failures::counts", mutates_args=("count",))
def counts(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes an input and fails while it is captured, having written."""
    count.add_(1)
    if is_recording(x.device):
        raise RuntimeError("counts: not while the stream is capturing")
    return x + count


@torch.library.custom_op("failures::adds_one", mutates_args=("count",))
def adds_one(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """Writes an input, as a capture allows."""
    return x + count.add_(1)


fails_oddly.register_fake(torch.empty_like)
for op in (syncs, fails, fails_oddly):
    op.register_autograd(lambda ctx, grad: grad * 2)
waits.register_autograd(lambda ctx, grad: waits(grad))
for op in (counts, adds_one):
    op.register_fake(lambda x, count: torch.empty_like(x))


class Around(nn.Module):
    """A custom operator between two parts worth capturing."""

    def __init__(self, op, width=8):
        super().__init__()
        self.first = MLP(width)
        self.second = MLP(width)
        self.op = op

    def forward(self, x):
        return self.second(self.op(self.first(x)))


def inference(*ops, steps=6):
    def program(session):
        _, call = session.compiled(lambda: nn.Sequential(*map(Around, ops)))
        with torch.no_grad():
            return [call(x).clone() for x in session.batches(4, 8, count=steps)]

    return program


def warned(caplog):
    ours = (r for r in caplog.records if r.name.startswith("cgpass"))
    return [r.getMessage() for r in ours if r.levelno == logging.WARNING]


def close(setting, program, **options):
    """As `Setting.compare`, for programs whose split changes what Inductor fuses."""
    with counted() as counters:
        ours = setting.run(program, **options)
    plain = setting.run(program, **options | {"driver": "none"})
    torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-5)
    return counters


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
@pytest.mark.parametrize("op", [syncs, fails, fails_oddly], ids=lambda op: op._name)
def test_the_guilty_operator_runs_between_graphs(setting, caplog, op, compiler):
    if (setting.device.type, compiler) == ("cpu", "inductor") and op is not syncs:
        pytest.skip("Inductor is slow on CPU: one operator is enough there")
    counters = close(setting, inference(op), compiler=compiler)
    assert (counters["partitions_captured"], counters["partitions_eager"]) == (2, 1)
    assert counters["recordings"] == 2
    assert counters["replays"] >= 2 * 3
    (message,) = warned(caplog)
    assert message.startswith("inference captured_0 of test_boundaries.py:")
    assert "can't be captured as a whole; the next call compiles the function again" in message
    assert f"{op._namespace}.{op._name}.default at test_boundaries.py:" in message
    assert "in forward: return self.second(self.op(self.first(x)))" in message
    assert "name it in unsafe_ops" in message
    ours = str(telemetry.graphs()[-2].summary)
    assert ": 2 partitions captured (" in ours.splitlines()[0]
    assert f"eager_1: {op._namespace}.{op._name}.default at test_boundaries.py:" in ours


class Everything(nn.Module):
    """Buffers and inputs that are written, random numbers, and a guilty operator that writes, all in one graph."""

    def __init__(self):
        super().__init__()
        self.first = MLP()
        self.second = MLP()
        self.register_buffer("seen", torch.zeros(8))
        self.register_buffer("count", torch.zeros(8))

    def forward(self, x, state):
        x = nn.functional.dropout(self.first(x), 0.5)
        self.seen.add_(x.mean(0))
        x = counts(x, self.count)
        state.mul_(0.5).add_(x.sum())
        x = adds_one(self.second(x), self.count)
        return nn.functional.dropout(x, 0.5) + self.seen, x


def test_a_failed_capture_leaves_inputs_and_random_numbers_alone(setting):
    def program(session):
        module, call = session.compiled(Everything)
        states = [session.randn(4, 8) for _ in range(2)]
        with torch.no_grad():
            for number, x in enumerate(session.batches(4, 8, count=10)):
                yield call(x, states[number % 2])
                yield [s.clone() for s in (*states, module.seen, module.count)]

    counters = setting.compare(program)
    assert (counters["partitions_captured"], counters["partitions_eager"]) == (2, 1)
    assert counters["replays"] > 0


def test_silent_says_nothing(setting, caplog):
    setting.compare(inference(fails), on_skip="silent")
    assert warned(caplog) == []


def stance():
    return torch.compiler.set_stance("fail_on_recompile")


def limit():
    return torch._dynamo.config.patch(recompile_limit=1)


@pytest.mark.parametrize("forbids", [stance, limit])
def test_where_torch_may_compile_no_more_it_runs_plainly(setting, caplog, forbids):
    def program(session):
        _, call = session.compiled(lambda: Around(fails))
        x = session.randn(4, 8)
        with torch.no_grad():
            yield [call(x).clone()]
            with forbids():
                yield [call(x).clone() for _ in range(3)]
            yield [call(x).clone()]

    counters = setting.compare(program)
    assert (counters["graphs"], counters["recordings"], counters["plain_calls"]) == (1, 0, 4)
    (message,) = warned(caplog)
    assert PLAINLY in message


def test_without_dynamo_it_runs_plainly(setting, caplog):
    session = setting.session()
    module = fx.symbolic_trace(
        lambda x: (torch.ops.tests.fails_as_cuda_does(x.sin().cos()).exp().tanh(),)
    )
    x = session.randn(4)
    with torch.no_grad():
        call = cgpass.cgpass(module, [x], options=session.options)
        for _ in range(4):
            assert torch.equal(call(x)[0], fails(x.sin().cos()).exp().tanh())
    (message,) = warned(caplog)
    assert PLAINLY in message


# torch 2.11 looks there for what it put there, and has no use for it
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_what_was_compiled_before_is_freed(setting, tmp_path):
    source = "def fn(x): return fails(x.sin().cos().tanh().exp()).sin().cos()"
    path = tmp_path / "model.py"  # functions without a file stay with torch 2.11 for good
    path.write_text(source)
    gc.collect()
    before, session = set(owners._owners), setting.session()
    namespace = {"fails": fails}
    exec(compile(source, str(path), "exec"), namespace)
    call, x = session.compile(namespace.pop("fn")), session.randn(4).requires_grad_()
    held = [call(x) for _ in range(5)]
    for out in held:
        out.sum().backward()
    del held, out
    x.grad = None
    gc.collect()
    assert len(set(owners._owners) - before) == 1
    del call
    namespace.clear()  # torch keeps what it compiled there
    gc.collect()
    assert set(owners._owners) <= before


ways = Ways(*ATEN)


def split(captured, eager):
    return {"partitions_captured": captured, "partitions_eager": eager, "recordings": captured}


ways.add({"every use is found at once": inference(fails, fails, fails)}, **SOME, counts=split(4, 3))
ways.add(
    {"all that waits is found before anything is captured": inference(syncs, syncs)},
    **SOME,
    counts=split(3, 2) | {"plain_calls": 1},
)
ways.add(
    {"a named operator is never tried": inference(fails)},
    **SOME,
    counts=split(2, 1) | {"plain_calls": 0},
    unsafe_ops=("tests::fails_as_cuda_does",),
    on_skip="silent",
)


@ways(**SOME, counts={"partitions_eager": 1})
def a_checkpoint_recomputes_with_what_was_compiled_since(session):
    module, call = session.compiled(lambda: Around(fails))
    for x in session.batches(4, 8, count=8):
        yield learn(module, checkpoint(call, x, use_reentrant=False).square().mean())


class Saving(Around):
    """The backward reads what the operator made."""

    def forward(self, x):
        return self.second(self.op(self.first(x)).sin())


def settles(op, settled_in):
    """A backward learns soon what its forward makes outside of graphs."""

    def program(session):
        module, call = session.compiled(lambda: nn.Sequential(MLP(), Saving(op)))
        for number, x in enumerate(session.batches(4, 8, count=settled_in + 4)):
            with counted() as counters:
                yield learn(module, call(x).square().mean())
            changes = [counters[name] for name in ("warmups", "recordings", "plain_calls")]
            assert number < settled_in or not any(changes), (number, changes)

    return program


ways.add(
    {"syncs settles": settles(syncs, 4), "waits settles": settles(waits, 7)},
    **SOME,
    on_skip="silent",
)


FORWARD = (
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        q = (x @ self.weight).view(2, 6, 2, 8).transpose(1, 2).sin()
        mixed = nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        return x + mixed.transpose(1, 2).reshape(2, 6, 16).cos()


for half, unsafe in (("forward", FORWARD), ("backward", [f"{op}_backward" for op in FORWARD])):
    attended = programs.trained(Attention, programs.rows(2, 6, 16))
    ways.add(
        {f"attention whose {half} is eager": attended},
        replays="some",
        settings=USUAL,
        unsafe_ops=unsafe,
        on_skip="silent",
        min_partition_ops=1,
    )


@ways.everywhere
def test_around_what_fails(way, program):
    program.check(way)


def of_sizes(*sizes):
    def program(session):
        _, call = session.compiled(lambda: Around(fails), dynamic=True)
        with torch.no_grad():
            return [call(session.randn(size, 8)).clone() for size in sizes]

    return program


def test_sizes_that_kernels_were_not_compiled_for(setting, monkeypatch):
    """Assumptions of kernels on sizes are guarded, early or late."""
    assumed = []

    def choosy(gm, example_inputs, inner=torch_private.inductor_inner, **settings):
        sizes = [size for size in example_inputs if isinstance(size, torch.SymInt)]
        assumed.append(all(size < 6 for size in sizes))
        return inner(gm, example_inputs, **settings)

    program = of_sizes(3, 5, 3, 7, 5, 7, 3, 7, 8, 3, 7)
    monkeypatch.setattr(torch_private, "inductor_inner", choosy)
    counters = close(setting, program, compiler="inductor", on_skip="silent")
    assert {True, False} <= {*assumed}
    assert counters["partitions_captured"] == 2 * 2
    assert counters["replays"] > 0


DUE = []
"""Errors that `raises` raises while here."""
ONCE = []
"""Errors that `raises` raises once, if captured."""


class UsersError(Exception):
    pass


@torch.library.custom_op("failures::raises", mutates_args=())
def raises(x: torch.Tensor) -> torch.Tensor:
    if DUE:
        raise DUE[0]
    if ONCE and is_recording(x.device):
        raise ONCE.pop()
    return x * 2


raises.register_fake(torch.empty_like)
raises.register_autograd(lambda ctx, grad: grad * 2)


@pytest.fixture(autouse=True)
def nothing_due():
    DUE.clear()
    ONCE.clear()
    yield
    DUE.clear()
    ONCE.clear()


class Model(Everything):
    """Draws and writes a buffer before what raises."""

    def forward(self, x):
        x = nn.functional.dropout(self.first(x), 0.5)
        self.seen.add_(x.detach().mean(0))
        return self.second(raises(x))


def fails_in_call(number, steps=8):
    """A program whose call `number` raises the user's error."""

    def program(session):
        module, call = session.compiled(Model)
        for step, x in enumerate(session.batches(4, 8, count=steps)):
            if step == number:
                error = UsersError("mine")
                DUE.append(error)
                with pytest.raises(UsersError, match=r"^mine$") as raised:
                    call(x)
                assert raised.value is error
                DUE.clear()
            else:
                out = call(x)
                yield [out.detach().clone(), *learn(module, out.sum())]
            yield [module.seen.clone()]

    return program


EAGER = {"unsafe_ops": ("failures::raises",), "on_skip": "silent"}
WHERE = {
    "in the warm-up": (0, {}),
    "in the call that records": (1, {}),
    "between graphs, first call": (0, EAGER),
    "between graphs, in the call that records": (1, EAGER),
    "between graphs, fifth call": (4, EAGER),
}


@pytest.mark.parametrize("where", WHERE)
def test_the_users_error_comes_through_unchanged(setting, caplog, where):
    number, options = WHERE[where]
    counters = setting.compare(fails_in_call(number), **options)
    assert counters["replays"] > 0
    assert counters["plain_calls"] == 0
    assert warned(caplog) == []


def out_of_memory(times, *, reset_before=None):
    """A program whose second call finds no memory to record, so many times."""

    def program(session):
        _, call = session.compiled(Model)
        for number, x in enumerate(session.batches(4, 8)):
            if number == 1 and session.options["driver"] != "none":
                text = "CUDA out of memory. Tried to allocate 1 GiB"
                ONCE.extend(torch.OutOfMemoryError(text) for _ in range(times))
            if number == reset_before:
                cgpass.reset()
            yield [call(x).clone()]

    return program


COUNTED = ("recordings", "plain_calls", "replays", "skips", "partitions_captured")
OUT_OF_MEMORY = {
    "once: freed and recorded": ({"times": 1}, (1, 0, 7, 0, 1)),
    "twice: plain": ({"times": 2}, (0, 7, 0, 0, 1)),
    "twice, and then reset": ({"times": 2, "reset_before": 3}, (1, 2, 4, 0, 1)),
}


@pytest.mark.parametrize("how", OUT_OF_MEMORY)
def test_memory_that_runs_out(setting, caplog, how):
    settings, expected = OUT_OF_MEMORY[how]
    with torch.no_grad():
        counters = setting.compare(out_of_memory(**settings))
    assert tuple(counters[name] for name in COUNTED) == expected
    said = warned(caplog)
    assert len(said) == settings["times"] - 1
    for message in said:
        assert "OutOfMemoryError: CUDA out of memory" in message
        assert "unsafe_ops" not in message
        assert "after cgpass.reset() the next calls try again" in message
