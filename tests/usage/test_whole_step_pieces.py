"""Whole training steps that run in pieces: why, and bit for bit the same; what is refused."""

import pytest
import torch
from torch import nn

import cgpass
from cgpass.runtime import fast, native
from tests.operators import tagged
from tests.usage import programs
from tests.usage.programs import MLP
from tests.usage.test_boundaries import Around
from tests.usage.test_whole_steps import (
    SPARSE,
    STEPS,
    Training,
    compared,
    fused,
    swap_data,
    use,
    with_results,
)


def broken(module):
    def loss_fn(x):
        out = module(x)
        torch._dynamo.graph_break()
        return out.square().mean()

    return loss_fn


def differentiable_twice(module):
    def loss_fn(x):
        module.kept = module(x)
        return module.kept.square().mean()

    return loss_fn


def penalised(take=None):
    """A gradient penalty, as critics have it."""

    def penalty(module, x):
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        return gradient.square().sum()

    take = take(penalty) if take else penalty
    return lambda module: lambda x: module(x).square().mean() + take(module, x)


def half_on_host():
    return Around(tagged)


REASONS = {
    "not one graph": ({"loss_fn": broken}, "the loss is not one graph"),
    "a gradient penalty": (
        {"loss_fn": penalised()},
        "the loss takes gradients with create_graph=True, which torch.compile can't; it runs as in eager",
    ),
    "a gradient penalty that is not compiled": (
        {"loss_fn": penalised(torch.compiler.disable)},
        "the loss is not one graph",
    ),
    "an optimizer that is not fused": (
        {"optimizer": lambda params: torch.optim.SGD(params, lr=0.01)},
        "no graph can hold step() of this SGD; make it with fused=True",
    ),
    "an optimizer that can't be": (
        {"optimizer": lambda params: torch.optim.Rprop(params, lr=0.01)},
        "no graph can hold step() of this Rprop; make it with capturable=True",
    ),
    "an optimizer that Dynamo wraps": (
        {"optimizer": lambda params: torch.optim.SparseAdam(params, lr=0.01), **SPARSE},
        "SparseAdam can't be captured; use AdamW(fused=True) or SGD(fused=True)",
    ),
    "accumulation": ({"accumulate": 2}, "accumulate=2"),
    "two results": (
        {"loss_fn": differentiable_twice},
        "2 results of the loss require grad; detach all but the loss",
    ),
    "a part that can't be captured": (
        {"make": half_on_host, "max_norm": 0.1},
        "not all of the loss can be captured, see cgpass.explain(loss_fn, batch); the optimizer's step is a graph of its own",
    ),
}


@pytest.mark.parametrize("name", REASONS)
def test_pieces_say_why(way, name, caplog):
    settings, why = REASONS[name]
    program = use(**settings)
    compared(way, program)
    assert program.step.whole_calls == 0
    assert why in program.step.explain()
    assert any(why in record.getMessage() for record in caplog.records)
    assert why in cgpass.summary()


NUMBERS, TENSORS = (
    "the loss changes the optimizer's param_groups",
    "the loss writes a tensor of the optimizer",
)
WRITES = {
    "a learning rate": (lambda o, group, x: group.update(lr=0.01 * len(x)), NUMBERS),
    "a weight decay": (lambda o, group, x: group.update(weight_decay=0.1 * len(x)), NUMBERS),
    "through the optimizer": (lambda o, _, x: o.param_groups[0].update(lr=0.01 * len(x)), NUMBERS),
    "a learning rate's tensor": (lambda o, group, x: group["lr"].mul_(0.9), TENSORS),
    "state": (lambda o, group, x: group["kept"][0].mul_(0.5), TENSORS),
}
"""Writes of a loss to an optimizer, and who tells."""


@pytest.mark.parametrize("name", WRITES)
def test_a_loss_that_writes_what_the_update_reads(way, name):
    write, why = WRITES[name]

    def program(session):
        rate = torch.tensor(0.01, device=session.device) if name.endswith("tensor") else 0.01

        def loss_fn(x):
            write(training.optimizer, group, x)
            return training.module(x).square().mean()

        def made(params):
            return torch.optim.AdamW(params, lr=rate, fused=True)

        training = Training(session, optimizer=made, loss_fn=lambda module: loss_fn)
        group = training.optimizer.param_groups[0]
        if name == "state":  # which is there after a step
            training.module(torch.ones(4, 8, device=session.device)).square().mean().backward()
            training.optimizer.step()
            training.optimizer.zero_grad()
            group = {"kept": [training.optimizer.state[group["params"][0]]["exp_avg"]]}
        for size in (4, 4, 4, 6, 6, 6, 5, 4):
            (batch,) = session.batches(size, 8, count=1)
            training.run(batch)
        program.step = training.step
        return [*training.found(), training.optimizer.param_groups[0]["lr"]]

    compared(way, program)
    assert program.step.whole_calls == 0
    assert why in program.step.explain()


@pytest.mark.parametrize(
    ("scale", "outputs"), [(None, "shared"), (2.0**8, "shared"), (None, "owned")]
)
def test_parts_that_cannot_be_captured_run_in_turn(way, scale, outputs):
    def change(training, number):
        if number == 4:
            training.optimizer.param_groups[0]["weight_decay"] = 0.5
        if number == 7:
            swap_data(training)

    def program(session):
        settings = {"loss_fn": with_results, "scale": scale, "max_norm": 0.1}
        made = use(make=half_on_host, every=change, **settings)
        values = made(session)
        if session.options["driver"] != "none":
            text = made.step.explain()
            assert f"{STEPS - 2} in pieces: not all of the loss can be captured" in text
            assert "a graph of the update, recorded 3 times and replayed 5 times" in text
        return values

    compared(way, program, outputs=outputs)


def test_accumulation_adds_up(way):
    def program(session):
        training = Training(session, accumulate=3)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=8)):
            training.run(batch)
            grads = programs.gradients(training.module)
            assert bool(grads) == ((number + 1) % 3 != 0)
            values += grads
            if number == 3:  # they are the user's until the update
                for parameter in training.module.parameters():
                    parameter.grad.mul_(0.5)
        assert training.step.flush()
        assert not training.step.flush()
        assert not programs.gradients(training.module)
        return values + training.found()

    compared(way, program)


def test_variants_go_on_past_the_limit_of_dynamo(way):
    def program(session):
        training = Training(session, loss_fn=lambda m: lambda x: m(x).square().mean() + len(m.tag))
        for number, batch in enumerate(session.batches(4, 8, count=18)):
            training.module.tag = [0] * (number % 6)
            training.run(batch)
        if session.options["driver"] != "none":
            assert training.step.whole_calls == 8
            assert "compiled torch._dynamo.config.recompile_limit times" in training.step.explain()
        return training.found()

    with torch._dynamo.config.patch(recompile_limit=4):
        compared(way, program)


def test_a_capture_that_fails_leaves_the_scaler_as_it_was(way, monkeypatch):
    clip = nn.utils.clip_grad_norm_

    def fails_in_captures(*args):
        if torch._C._len_torch_dispatch_stack() or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        ):
            raise RuntimeError("not while capturing")
        return clip(*args)

    monkeypatch.setattr(nn.utils, "clip_grad_norm_", fails_in_captures)

    def program(session):
        training = Training(session, scale=2.0**10, max_norm=1.0)
        for batch in session.batches(4, 8, count=STEPS):
            training.run(batch)
        if session.options["driver"] != "none":
            assert "capturing it failed: RuntimeError: not while" in training.step.explain()
        return training.found()

    compared(way, program)


@pytest.mark.parametrize("make", [MLP, half_on_host], ids=["whole", "in turn"])
def test_one_step_called_by_several_threads(way, make):
    def program(session):
        training = Training(session, make=make)
        batch = session.randn(4, 8)
        programs.in_threads(*[lambda: [training.run(batch) for _ in range(STEPS)]] * 3)
        training.values.sort(key=float)  # in which order threads came is not known
        return training.found()

    compared(way, program)


@pytest.mark.parametrize("driver", ["none", "auto"])
def test_pieces_say_that_nothing_records_before_native_code_is_loaded(driver, monkeypatch):
    monkeypatch.setattr(fast, "is_loaded", False)
    monkeypatch.setattr(native, "loader", native.Loader())
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), fused=True)
    options = {"driver": driver, "compiler": "eager"}
    step = cgpass.train_step(lambda x: model(x).mean(), optimizer, options=options)
    for _ in range(3):
        step(torch.ones(2, 4))
    if driver == "none":
        assert step.in_pieces == {'driver="none" turns graphs off': 3}
    else:
        assert step.in_pieces["nothing is recorded; cgpass.summary() says why"] == 2
        assert "it uses no CUDA device" in cgpass.summary()


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"max_norm": -1.0}, "max_norm=-1.0"),
        ({"max_norm": "x"}, "max_norm='x': must be a positive number"),
        ({"scaler": 3}, "scaler is a int"),
        ({"options": {"compilr": "eager"}}, "compiler"),
        ({"loss_fn": None}, "loss_fn is a NoneType"),
        ({"optimizer": None}, "optimizer is a NoneType"),
        ({"optimizer": [[]]}, "optimizer is a list"),
        ({"optimizer": []}, "empty"),
        ({"optimizer": torch.optim.LBFGS}, r"LBFGS.step\(\) calls the loss itself"),
    ],
)
def test_bad_arguments(settings, error):
    module = MLP()
    given = {"loss_fn": module, "optimizer": fused(torch.optim.AdamW), **settings}
    if callable(given["optimizer"]):
        given["optimizer"] = given["optimizer"](module.parameters())
    with pytest.raises(cgpass.errors.CGPassError, match=error):
        cgpass.train_step(**given)


@pytest.mark.parametrize(
    ("returned", "kind"),
    [([1], "list"), ((1, 2, 3), "tuple"), ({"loss": 1}, "dict"), ((1, 2), "int")],
)
def test_a_loss_is_needed(way, returned, kind):
    optimizer = fused(torch.optim.AdamW)(MLP().parameters())
    step = cgpass.train_step(lambda: returned, optimizer, options=way.session().options)
    told = f"loss_fn returned a {kind}: return the loss"
    with pytest.raises(cgpass.errors.InputError, match=told):
        step()


def step_of(loss_of):
    module = MLP()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01, fused=True)
    settings = {"driver": "simulated", "compiler": "eager"}
    return cgpass.train_step(
        lambda x: loss_of(module(x).square().mean(), x), optimizer, options=settings
    )


@torch._dynamo.config.patch(recompile_limit=2)
@pytest.mark.parametrize("shares", [False, True])
def test_past_the_limit_of_dynamo_a_loss_that_fits_no_variant_runs_in_pieces(shares):
    known = []

    def with_more(loss, x):
        known.append(loss.detach())  # each length is compiled once more
        return (loss, x) if shares else loss * len(known)

    step = step_of(with_more)
    for _ in range(6):
        step(torch.ones(4, 8))
    why = "it was compiled torch._dynamo.config.recompile_limit times"
    assert f"4 in pieces: {why}" in step.explain()


@pytest.mark.parametrize("name", ["TORCHDYNAMO_DISABLE", None])
def test_a_step_runs_in_pieces_while_torch_compile_is_turned_off(name, monkeypatch):
    if name is not None:
        monkeypatch.setenv(name, "1")
    step = step_of(lambda loss, x: loss)
    with torch._dynamo.config.patch(disable=name is None):
        step(torch.ones(4, 8))
    assert "turns torch.compile off" in step.explain()


def test_a_step_inside_compiled_code_is_whole():
    step = step_of(lambda loss, x: loss)
    settings = {"driver": "simulated", "compiler": "eager"}
    call = torch.compile(lambda x: step(x.sin()), backend="cgpass", options=settings)
    with cgpass.explain() as report:
        for _ in range(4):
            call(torch.ones(4, 8))
    assert step.graph_calls == 2
    (left,) = report.graph_breaks
    assert left.detail == "graph break: a training step is called"
