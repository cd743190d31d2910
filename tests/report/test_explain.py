"""`cgpass.explain`: its facts, and what it restores."""

import contextlib
import dataclasses
import functools
import gc
import json
import re
import weakref
from typing import NamedTuple

import pytest
import torch
from torch import nn

import cgpass
from cgpass import telemetry
from cgpass.errors import InputError, OptionError
from cgpass.report import watch
from cgpass.report.check import verdict
from cgpass.report.report import Report
from cgpass.report.text import findings
from cgpass.telemetry import reason
from tests.operators import tagged
from tests.report.samples import joined, watched

X = torch.linspace(-1, 1, 32).view(4, 8)

pytestmark = pytest.mark.usefixtures("simulated")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 16)
        self.norm = nn.BatchNorm1d(16)
        self.drop = nn.Dropout(0.5)
        self.second = nn.Linear(16, 2)

    def forward(self, x):
        return self.second(self.drop(self.norm(self.first(x)).relu()))


def split(x):
    return tagged((x * 2).sin().cos().exp()).sin().cos().tanh().exp()


def train(call, optimizer, steps):
    for _ in range(steps):
        call(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- a block


def test_a_block_reports_what_ran_inside_and_nothing_else():
    model = Model()
    call = torch.compile(model, backend="cgpass")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(call, optimizer, 4)
    with cgpass.explain() as report:
        assert str(report) == "the block is still running: its report is ready when it ends"
        train(call, optimizer, 3)
    train(call, optimizer, 5)
    assert [(graph.direction, graph.calls) for graph in report.graphs] == [
        ("forward", 3),
        ("backward", 3),
    ]
    for part in report.partitions:
        assert (part.calls, part.replays, part.recordings) == (3, 3, ())
        assert part.output_bytes > 0
    forward = report.partitions[0]
    assert [(each.name, each.num_bytes) for each in forward.copied_inputs] == [("x", 128)]
    assert "test_explain.py:" in forward.copied_inputs[0].line
    assert forward.static_inputs == 9
    assert report.counters["replays"] == 6
    assert report.counters["recordings"] == report.counters["graphs"] == 0
    assert report.work == (3 * sum(graph.num_ops for graph in report.graphs),) * 2
    assert report.boundaries == report.plain_calls == 0
    assert str(report).startswith("100% of the ")
    assert "test_explain.py:" in report.graphs[0].place
    assert Report.from_dict(report.to_dict()) == report


def test_a_first_block_tells_of_warm_ups_and_recordings():
    report = watched(torch.compile(split, backend="cgpass"), *[X] * 4)
    (graph,) = report.graphs
    assert [part.calls for part in graph.partitions] == [3, 3, 3]
    assert [part.replays for part in graph.partitions] == [3, 0, 3]
    assert [[each.cause for each in part.recordings] for part in graph.partitions] == [
        ["first"], [], ["first"],
    ]  # fmt: skip
    assert report.boundaries == 1
    assert "88.9% of the 27 operators of compiled code ran in graphs, 1 boundary" in str(report)


def test_two_blocks_count_reasons_each():
    call = torch.compile(
        lambda x: x.sin().cos().exp(), backend="cgpass", dynamic=True, options={"max_recordings": 1}
    )
    for times in (3, 2):
        for size in (2, 2, 3):
            call(torch.ones(size))
        report = watched(call, *[torch.ones(3)] * times)
        (reason,) = report.partitions[0].reasons
        assert reason.detail.startswith(f"{times} of {times} calls ran without a graph: ")
        assert report.plain_calls == times
        assert report.work[0] == 0


def test_a_block_that_raises_is_reported_all_the_same():
    call = torch.compile(split, backend="cgpass")
    with pytest.raises(LookupError), cgpass.explain() as report:
        raise LookupError(call(X))
    assert report.graphs[0].calls == 1
    assert "only warm-up calls ran" in str(report)


def test_a_graph_without_operators_has_nothing_to_record():
    strict = {"on_skip": "raise"}  # nothing is lost, so nobody is told
    call = torch.compile(lambda x: (x.sin(), x)[1], backend="cgpass", options=strict)
    report = watched(call, X, X, X)
    assert str(report).startswith("there was nothing to record: what was compiled launches no work")
    assert "FAILED: there was nothing to record" in verdict(report, 0.5)[1]
    (found,) = findings(report)
    assert found.fix == "leave it: nothing is lost"


@pytest.mark.parametrize("fn", [split, torch.sin])
def test_who_listens_is_told_of_each_graph_that_is_compiled(fn):
    """A period that a clock measures ends there, also if nothing of the graph is captured."""
    told = []
    with contextlib.ExitStack() as stack:
        telemetry.listen(told.append, stack)
        told.clear()
        torch.compile(lambda x: fn(x), backend="cgpass")(X)
        assert told == telemetry.graphs()[-1:]


def test_callables_graphed_by_hand_are_told_of():
    by_hand = cgpass.make_graphed_callables(nn.Linear(8, 8), (X,), options={"driver": "simulated"})
    results = []
    report = watched(lambda x: results.append(by_hand(x).detach()), *[X] * 4)
    (told,) = report.others
    assert told.startswith("Linear, graphed by hand: ")
    assert "gradients still referenced were copied 3 times (" in told
    assert "since this report" not in str(report)
    assert report.device.startswith("cpu (simulated graphs")
    (told,) = watched(by_hand, X).others
    assert told.endswith("\n  1 of these calls ran since this report or summary began")
    assert watched(by_hand).others == ()
    (found,) = watched(torch.compile(lambda x: by_hand(x).sin(), backend="cgpass"), X).graph_breaks
    assert found.detail == "graph break: a callable graphed by hand is called"


def test_watching_adds_nothing_to_a_step():
    """No device has a clock here: steps inside a block run by the same code as outside."""
    call = torch.compile(Model(), backend="cgpass")
    call(X).sum().backward()
    executors = watch.live(telemetry.graphs())
    before = [each._steps for each in executors]
    with cgpass.explain():
        assert all(each._steps is steps for each, steps in zip(executors, before, strict=True))
    assert all(each._steps is steps for each, steps in zip(executors, before, strict=True))


def test_views_and_sizes_that_no_graph_makes_are_no_work_that_is_lost():
    log = torch.compiler.disable(lambda x: None)
    call = torch.compile(
        lambda x: (y := x.sin().cos().exp().tanh(), log(y), y.view(y.size(0) * y.size(1)))[2],
        backend="cgpass",
        dynamic=True,
    )
    sizes = torch.compile(lambda x: x.size(0) * x.size(1), backend="cgpass", dynamic=True)
    report = watched(lambda x: (call(x), sizes(x)), X, X, X)
    assert len(report.graphs) == 3
    assert report.work == (2 * 4, 2 * 4)
    assert verdict(report, 1.0)[0]


# ---- calls that explain makes


def test_simulated_graphs_are_no_measure_of_speed():
    report = cgpass.explain(split, X, compare=True, options={"unsafe_ops": ("aten::tanh",)})
    assert [part.name for part in report.partitions] == ["captured_0", "eager_1"]
    assert set(re.findall(r'ms": (.*?)[,}]', json.dumps(report.to_dict()))) == {"null"}
    assert not re.search(r"\d ms\b", str(report))
    assert report.device.startswith("cpu (simulated graphs: ")


def test_calls_are_compared_and_those_without_graphs_not_counted():
    compiled = torch.compile(Model(), backend="cgpass")
    before = telemetry.counters()["graphs"]
    report = cgpass.explain(compiled, X)
    assert report.ms is None
    mine = telemetry.graphs(before)
    with cgpass.expect(plain_calls=0, graphs=0):
        ms = watch.compared(lambda: compiled(X).sum().backward())
    assert min(ms) > 0
    parts = [graph.parts["captured_0"] for graph in mine]
    assert not any(part.reasons.told(dataclasses.asdict(part.stats)) for part in parts)
    with cgpass.expect(plain_calls=0, replays=1):
        compiled(X)


class Output(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


@pytest.mark.parametrize(
    "output",
    [
        lambda out: {"loss": out.sum() * 0, "logits": out},
        lambda out: Output(out.sum() * 0, out),
        lambda out: dataclasses.make_dataclass("Data", ["logits"])(out * 0),
    ],
)
def test_the_loss_of_an_output_is_what_the_backward_begins_with(output):
    found = []
    model = Model()
    model.first.weight.register_hook(lambda grad: found.append(grad.clone()))
    cgpass.explain(torch.compiler.disable(lambda x: output(model(x))), X)
    assert found
    assert not any(grad.any() for grad in found)


def compiled():
    return torch.compile(Model(), backend="cgpass")


def in_place():
    model = Model()
    model.compile(backend="cgpass")
    return model


def its_forward():
    model = Model()
    model.forward = torch.compile(model.forward, backend="cgpass")
    return model


def named():
    inner = compiled()
    return lambda x: inner(x).sin()


def test_an_attribute_is_no_global_of_its_name(monkeypatch):
    monkeypatch.setitem(globals(), "split", torch.compile(split, backend="cgpass"))
    model = Model()
    model.split = model.forward
    assert cgpass.explain(lambda x: model.split(x), X).graphs


@pytest.mark.parametrize("make", [compiled, in_place, its_forward, named])
def test_what_is_compiled_already_runs_as_it_is_and_stays_recorded(make):
    call = make()
    call(X).sum().backward()
    with cgpass.expect(graphs=0):
        report = cgpass.explain(call, X)
    assert [graph.direction for graph in report.graphs] == ["forward", "backward"]
    with cgpass.expect(replays=1, recordings=0):
        call(X)
    with pytest.raises(OptionError, match="a compiled function has its options already"):
        cgpass.explain(call, X, options={"max_recordings": 3})


def test_what_explain_compiled_itself_keeps_nothing():
    model = Model()
    alive, others = weakref.ref(model.first.weight), telemetry.graphs()
    for _ in range(2):  # torch compiles it once
        report = cgpass.explain(model, X)
        mine = [graph for graph in telemetry.graphs() if graph not in others]
        assert not any(each.owner.has_recordings() for each in watch.live(mine))
        assert report.counters["recordings"] == 2
    torch.compiler.reset()
    del model
    gc.collect()
    assert alive() is None
    assert report.graphs


# ---- what is put back


@pytest.mark.parametrize("raises", [False, True])
def test_module_optimizer_gradients_and_random_numbers_are_put_back(raises):
    model, other = Model(), Model()
    model.register_buffer("seen", torch.zeros(2), persistent=False)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model(X).sum().backward()
    optimizer.step()
    gradients = [each.grad for each in model.parameters()]
    bits = [each.clone() for each in gradients]
    before = {name: value.clone() for name, value in model.state_dict().items()}
    places = [each.data_ptr() for each in model.parameters()]
    steps = [state["step"].item() for state in optimizer.state.values()]
    torch.manual_seed(5)
    state = torch.get_rng_state()

    def step(x):
        optimizer.zero_grad()
        model.seen.add_(1)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        model.seen = model.seen + other(x).sum().detach()
        if raises:
            raise LookupError
        return loss.detach()

    with pytest.raises(LookupError) if raises else contextlib.nullcontext():
        assert cgpass.explain(step, X).graphs
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [each.data_ptr() for each in model.parameters()] == places
    assert all(each.grad is grad for each, grad in zip(model.parameters(), gradients, strict=True))
    assert all(map(torch.equal, gradients, bits))
    assert torch.equal(model.seen, torch.zeros(2))
    assert [each["step"].item() for each in optimizer.state.values()] == steps
    assert torch.equal(torch.get_rng_state(), state)
    assert all(each.grad is None for each in other.parameters())


norm = nn.BatchNorm1d(8)


def of_globals(x):
    return sum((lambda z: norm(z).sum())(y) for y in x.chunk(2))


class Task:
    def __init__(self, model):
        self.model = model

    def __call__(self, x):
        return self.model(x).sum()


def decorated(model):
    @functools.wraps(of_globals)
    def wrapper(x):
        return model(x).sum()

    return wrapper


@pytest.mark.parametrize(
    "make",
    [
        lambda model: of_globals,
        lambda model: lambda x, model=model: model(x).sum(),
        lambda model: lambda x, *, model=model: model(x).sum(),
        Task,
        lambda model: Task(model).__call__,
        lambda model: functools.partial(Task(model).__call__),
        lambda model: functools.partial(lambda x, model: model(x).sum(), model=model),
        decorated,
    ],
)
def test_whatever_a_function_names_holds_or_is_given_is_restored(make, monkeypatch):
    model = nn.BatchNorm1d(8)
    monkeypatch.setitem(globals(), "norm", model)
    cgpass.explain(make(model), X)
    assert model.num_batches_tracked == 0


def test_memory_that_parameters_were_put_on_is_left_alone():
    model, vector = nn.Linear(8, 8), torch.ones(72)
    before = [p.detach().clone() for p in model.parameters()]

    @torch.compiler.disable
    def average(x):
        nn.utils.vector_to_parameters(vector, model.parameters())
        return model.requires_grad_(False)(x)

    cgpass.explain(average, X, training=False)
    assert all(map(torch.equal, before, model.parameters()))
    assert torch.equal(vector, torch.ones(72))
    assert all(p.requires_grad for p in model.parameters())


def test_what_gets_a_history_in_a_call_is_restored_all_the_same():
    model, x = nn.BatchNorm1d(8, affine=False), X.clone()
    weight = torch.ones(8, requires_grad=True)

    def written(x):
        x += weight
        return model(x).sum()

    assert cgpass.explain(written, x).graphs
    assert model.num_batches_tracked == 0


def test_state_of_an_optimizer_that_nobody_names_returns_to_the_tensors_that_had_it():
    param = nn.Parameter(torch.ones(8, dtype=torch.bfloat16))
    rate = torch.tensor(0.1)
    optimizer = torch.optim.SGD([param], rate)
    (group,), state = optimizer.param_groups, optimizer.state[param]
    state |= {
        "average": torch.rand(8),
        "history": [torch.zeros(2)],
        "sparse": torch.eye(2).to_sparse(),
    }
    average, history, sparse = (state[name] for name in ("average", "history", "sparse"))
    (oldest,), before = history, average.clone()

    @torch.no_grad()
    def step():
        for each in (average, oldest, rate, param):
            each.add_(1)
        sparse.mul_(2)
        history.append(history.pop(0) + 1)
        state["new"] = torch.ones(1)
        state.pop("average", None)
        group["lr"] = 0.2

    cgpass.explain(torch.compiler.disable(step), optimizer=optimizer)
    assert optimizer.state[param] is state
    assert optimizer.param_groups[0]["lr"] is rate
    assert state["average"] is average
    assert torch.equal(average, before)
    assert [*map(id, history)] == [id(oldest)]
    assert torch.equal(sparse.to_dense(), torch.eye(2))
    assert (oldest.sum(), rate, param.sum()) == (0, torch.tensor(0.1), 8)
    assert "new" not in state


@pytest.mark.parametrize(
    "make", [functools.partial(torch.optim.Adam, lr=torch.tensor(0.1)), torch.optim.NAdam]
)
def test_a_compiled_optimizer_stays_recorded(make):
    model = Model()
    optimizer = make(model.parameters())
    call = torch.compile(model, backend="cgpass")
    update = torch.compile(optimizer.step, backend="cgpass")

    def step(x):
        call(x).square().mean().backward()
        update()
        optimizer.zero_grad()

    for _ in range(3):
        step(X)
    with cgpass.expect(graphs=0, recordings=0, warmups=0, plain_calls=0):
        for _ in range(2):
            assert cgpass.explain(step, X).work[0] > 0
            step(X)


@torch.inference_mode()
def of_inference():
    return torch.zeros(2)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.zeros(1).expand(4),
        of_inference,
        lambda: torch.zeros(2, device="meta"),
        lambda: torch.zeros(4, dtype=torch.complex32),
        lambda: torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8),
    ],
)
def test_values_of_any_kind_and_size_are_restored(make):
    model, buffer = nn.Linear(8, 8), make()
    model.register_buffer("odd", buffer)
    model.register_buffer("grows", torch.zeros(2))
    model(X).sum().backward()
    gradient, before = model.weight.grad, [repr(buffer), model.weight.detach().clone()]

    @torch.compiler.disable
    def changes(x):
        model.grows.resize_(3)
        model.double().weight.detach().add_(1)
        return model(x.double())

    cgpass.explain(changes, X)
    assert model.odd is buffer
    assert repr(buffer) == before[0]
    assert torch.equal(model.weight, before[1])
    assert torch.equal(model.grows, torch.zeros(2))
    assert model.weight.grad is gradient


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: cgpass.train_step(lambda x: x.sum(), optimizer),
        lambda optimizer: functools.partial(cgpass.train_step(torch.sum, optimizer), X),
        lambda optimizer: optimizer.step,
        lambda optimizer: torch.compile(optimizer.step, backend="cgpass"),
    ],
)
def test_what_trains_by_itself_is_refused(make):
    optimizer = torch.optim.SGD(Model().parameters(), 0.1)
    told = r"trains. Watch steps of your own: with cgpass.explain\(\)"
    with pytest.raises(InputError, match=told):
        cgpass.explain(make(optimizer), X)


def test_gradients_of_what_nobody_names_are_left_alone():
    model = nn.Linear(8, 1)
    model.weight.grad = given = torch.ones_like(model.weight)
    box = [{"hidden": lambda: model}]
    report = cgpass.explain(torch.compiler.disable(lambda x: box[0]["hidden"]()(x)), X)
    assert report.work == (0, 0)
    assert model.weight.grad is given
    assert torch.equal(given, torch.ones_like(given))


def test_an_argument_with_a_history_is_passed_as_it_is():
    made_by = nn.Linear(8, 8)
    head = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(8, 1))
    assert len(cgpass.explain(head, made_by(X)).graphs) == 2
    x = made_by(X)
    x.retain_grad()
    x.sum().backward(retain_graph=True)
    grad, made_by.weight.grad = x.grad.clone(), None
    same = torch.compile(lambda a, b: a.sin().cos() * (2 if a is b else 3), backend="cgpass")
    assert cgpass.explain(same, x, x).recompilations == ()
    assert torch.equal(x.grad, grad)
    assert made_by.weight.grad is None
    x.sum().backward()
    assert made_by.weight.grad is not None


def test_gradients_that_are_there_are_no_backward():
    model = nn.Linear(8, 1)
    model(X).sum().backward()

    def zeroes(x):
        model.zero_grad()
        return model(x).sum()

    report = cgpass.explain(zeroes, X)
    assert [(graph.direction, graph.calls) for graph in report.graphs][-1] == ("backward", 9)


def test_gradients_of_the_call_before_are_nobodys():
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    compiled = torch.compile(model, backend="cgpass")
    optimizer = torch.optim.SGD(model.parameters())

    def step(x):
        optimizer.zero_grad()
        loss = compiled(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    assert cgpass.explain(step, X).counters["rescues"] == 0
    for _ in range(3):
        compiled(X).square().sum().backward()
    assert cgpass.explain(compiled, X).counters["rescues"] == 0, "its own calls hold no result"


def trial(times):
    model = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = cgpass.train_step(lambda x: model(x).square().mean(), optimizer)
    for _ in range(times):
        step(X)
    return weakref.ref(model.weight)


def test_training_steps_that_end_are_told_of_and_no_block_keeps_their_model():
    with cgpass.explain() as outer:
        with cgpass.explain() as inner:
            weight = trial(6)
        gc.collect()
        assert weight() is None
    assert (inner.whole_steps, inner.steps) == (outer.whole_steps, outer.steps) == (4, 4)
    assert outer.others[0].startswith("train_step of ")
    assert "  one graph, recorded 1 time and replayed 4 times: reads " in outer.others[0]
    assert "6 calls, 5 as a whole" in cgpass.summary()
    cgpass.reset()
    assert "train_step" not in cgpass.summary()
    with cgpass.explain() as report:
        trial(2)
    assert (report.whole_steps, report.steps) == (0, 0), "nothing was recorded"


def test_a_parameter_that_moves_in_each_whole_step_is_to_be_written_in_place():
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    step = cgpass.train_step(lambda x: model(x).square().mean(), optimizer)
    with cgpass.explain() as report:
        for _ in range(8):
            step(X)
            model.weight.data = model.weight.data.clamp(-1, 1)
    assert "an optimizer writes them [new_tensor]; write into it in place" in joined(report)


def test_gradients_that_move_are_to_be_kept_in_place():
    model = nn.Linear(8, 1)
    clip = torch.compile(
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0), backend="cgpass"
    )
    with cgpass.explain() as report:
        for _ in range(12):
            model(X).sum().backward()
            clip()
            model.zero_grad()
    fixes = {each.fix for each in findings(report) if each.code == "moved"}
    assert fixes == {reason.KEEP_GRADIENTS}


def test_a_backward_that_waits_finds_parameters_as_they_were():
    model, x = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1)), torch.ones(2, 8)
    loss = model(x.requires_grad_()).sum()
    cgpass.explain(model, torch.ones(2, 8), training=False)
    loss.backward()
    assert x.grad is not None


def test_what_is_wrapped_by_hand_is_listed_with_its_causes():
    wrapped = cgpass.CUDAGraphWrapper(lambda x: x.sin() * 2, options={"max_recordings": 1})
    with torch.no_grad(), cgpass.explain() as report:
        for n in (4, 4, 4, 5, 5, 5):
            wrapped(torch.ones(n))
    assert report.plain_calls > 0
    assert f"boundaries, {report.plain_calls} call" in str(report).splitlines()[0]
    assert any("without a graph: max_recordings" in each for each in report.others), report.others
    report = cgpass.explain(wrapped, X, training=False)
    assert any("graphed by hand" in each for each in report.others)
    assert "wrapper.py" not in str(report)
    inputs = torch.ones(1), *[torch.ones(2)] * 3
    once, reads = "  1 recorded: the first call", "(at test_explain.py:"
    for fn, told in ((lambda x: x * 2, once), (lambda x: x * x.sum().item(), reads)):
        with torch.no_grad():
            assert told in str(watched(cgpass.CUDAGraphWrapper(fn), *inputs))


def test_lazy_modules_are_initialised():
    model = nn.Sequential(nn.LazyLinear(4), nn.GELU())
    cgpass.explain(torch.compiler.disable(model), X)
    assert model[0].weight.shape == (4, 8)


# ---- batches and options


def takes(x, scale=1.0, *, bias=0.0):
    return x.sin().cos() * scale + bias


@pytest.mark.parametrize(
    ("fn", "args"),
    [
        (takes, ({"x": X, "bias": X},)),
        (takes, ((X, X),)),
        (takes, ([X],)),
        (takes, (X, X)),
        (lambda batch: takes(batch["x"]), ([{"x": X}],)),
        (lambda batch: takes(batch[0]), (((X, X),),)),
    ],
)
def test_a_batch_by_itself_is_spread_out(fn, args):
    assert cgpass.explain(fn, *args).work[0] > 0


def test_arguments_without_a_function_are_refused():
    with pytest.raises(InputError, match="need a function first"):
        cgpass.explain(None, X)
    with pytest.raises(InputError, match="need a function first"):
        cgpass.explain(model=Model(), x=X)
    for setting in ({"compare": True}, {"training": False}, {"options": {"driver": "none"}}):
        with pytest.raises(InputError, match="need a function first"):
            cgpass.explain(**setting)
    with pytest.raises(InputError, match="optimizer= takes an optimizer, got 3"):
        cgpass.explain(Model(), X, optimizer=3)
    for kind, wrong in (("Tensor", X), ("type", Model), ("type", int)):
        with pytest.raises(InputError, match=f"takes a module or function, got a {kind}"):
            cgpass.explain(wrong, X)
    with pytest.raises(OptionError):
        cgpass.explain(split, X, options={"no_such": 1})


def test_a_backward_names_what_its_forward_lacks():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    compiled = torch.compile(model, backend="cgpass", options={"max_recordings": 2})
    with cgpass.explain() as report:
        for _ in range(3):
            for n in range(2, 12):
                compiled(torch.ones(n, 8)).sum().backward()
    codes = {each.code for each in findings(report)}
    assert {"max_recordings", "not_in_the_pool"} <= codes
    assert "new_tensor" not in codes
