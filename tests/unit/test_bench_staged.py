"""Stages of a call: of graphs that are replayed once each, and of steps of many pieces."""

import pytest
import torch
from benchlib import marks, report, staged
from torch import nn

import cgpass
from cgpass.runtime.executor import Executor

OPTIONS = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
CPU = torch.device("cpu")


@torch.library.custom_op("staged::host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@host.register_fake
def _(x):
    return torch.empty_like(x)


host.register_autograd(lambda ctx, grad: host(grad))


class Pieces(nn.Module):
    """Two graphs each way, with an operator that can't be captured between them."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x):
        return self.second(host(self.first(x).relu())).relu()


class Layer(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def step_of(call, shapes):
    batches = iter(shapes)

    def step():
        call(torch.randn(next(batches), 4)).square().mean().backward()

    return step


def compiled(module):
    return torch.compile(module, backend=cgpass.cgpass, options=OPTIONS)


def endless(*sizes):
    while True:
        yield from sizes


def stages_of(step):
    for _ in range(4):
        step()
    return staged.stages(step, CPU)


def test_stages_of_a_training_step():
    step = step_of(compiled(nn.Sequential(nn.Linear(4, 4), nn.GELU())), endless(2))
    found = stages_of(step)
    around = ["wrappers", "signature and copies", "replay", "outputs"]
    assert list(found["forward"]) == ["until called", *around, "after the last graph"]
    assert [part for part in found["backward"] if part != "wrappers"] == [
        "autograd's walk",
        *around[1:],
        "gradients",
    ]
    parts = sum(sum(found[graph].values()) for graph in report.GRAPHS)
    assert 0.5 * found["until_done"] < parts < 1.5 * found["until_done"]
    assert found["replays"] == 2
    assert staged.guards(step, CPU, until_done=found["until_done"]) >= 0


def test_stages_of_a_call_without_gradients():
    call = compiled(nn.Sequential(nn.Linear(4, 4), nn.GELU()))

    def step():
        with torch.no_grad():
            call(torch.ones(2, 4))

    found = stages_of(step)
    assert "backward" not in found
    assert list(found["forward"]) == [
        "until called",
        "wrappers",
        "signature and copies",
        "replay",
        "outputs",
        "after the last graph",
    ]


def test_operators_between_graphs_are_a_part_of_their_own():
    found = stages_of(step_of(compiled(Pieces()), endless(2)))
    assert found["replays"] == 4
    for graph in report.GRAPHS:
        assert found[graph]["eager operators"] > 0
        assert found[graph]["replay"] > 0


@pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor"
)  # Dynamo, of what one gives another
def test_modules_that_are_compiled_one_by_one():
    module = nn.Sequential(*[Layer(4, 4) for _ in range(3)])
    for each in module:
        each.compile(backend=cgpass.cgpass, options=OPTIONS)
    found = stages_of(step_of(module, endless(2)))
    assert found["replays"] == 6
    assert not any("eager operators" in found[graph] for graph in report.GRAPHS)
    assert found["forward"]["until called"] > 0


def test_all_of_a_step_is_in_one_part_or_another():
    places = [
        (marks.CALL, 1.0),
        (marks.ENTER, 3.0),
        (marks.STEP, 3.5),
        (marks.REPLAY, 7.0),
        (marks.LAUNCHED, 15.0),
        (marks.STEPPED, 31.0),
        (marks.STEP, 31.5),
        (marks.STEPPED, 63.0),
        (marks.LEAVE, 64.0),
        (marks.RETURN, 128.0),
        (marks.BACKWARD, 256.0),
        (marks.ENTER, 512.0),  # by autograd's own function
        (marks.LEAVE, 513.0),
        (marks.END, 1024.0),
    ]
    found = {key: seconds for key, seconds in staged.sums(0.0, places).items() if seconds}
    assert found == {
        ("forward", "until called"): 1.0,
        ("forward", "wrappers"): 2.0 + 64.0,
        ("forward", "signature and copies"): 0.5 + 3.5,
        ("forward", "replay"): 8.0,
        ("forward", "outputs"): 16.0 + 0.5 + 1.0,
        ("forward", "eager operators"): 31.5,
        ("forward", "after the last graph"): 128.0,
        ("backward", "autograd's walk"): 256.0,
        ("backward", "signature and copies"): 1.0,
        ("backward", "gradients"): 511.0,
    }


def test_everything_is_put_back():
    step = step_of(call := compiled(nn.Linear(4, 4)), endless(2))
    before = Executor.__call__, torch.Tensor.backward
    held = {(id(names), name): names[name] for names, name in marks.compiled_functions()}
    stages_of(step)
    after = {(id(names), name): names[name] for names, name in marks.compiled_functions()}
    assert (Executor.__call__, torch.Tensor.backward) == before
    assert {key: after[key] for key in held} == held
    with marks.taken() as taken:
        step()
    assert taken
    taken.clear()
    call(torch.ones(2, 4)).sum().backward()
    assert not taken


def test_calls_that_are_no_replays_have_no_stages():
    step = step_of(compiled(nn.Linear(4, 4)), iter(range(2, 10**6)))
    with pytest.raises(RuntimeError, match="of 100 steps replayed all that is captured"):
        staged.stages(step, CPU)
