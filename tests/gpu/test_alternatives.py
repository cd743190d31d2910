"""README's table of alternatives: each cell is what torch does on this machine."""

import copy
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from tests.gpu import harness

pytestmark = harness.MARKS
ROOT = Path(__file__).parents[2]


def by_hand(fn, *sample, backward=False):
    """The recipe of torch's documentation: static inputs, a warm-up on a side stream, a capture."""
    x = sample[0].detach().clone()
    graph = torch.cuda.CUDAGraph()

    def run():
        y = fn(x)
        if backward:
            y.sum().backward()
        return y

    harness.on_side_stream(run)
    for parameter in getattr(fn, "parameters", list)():
        parameter.grad = None
    with torch.cuda.graph(graph):
        y = run()

    def call(value):
        x.copy_(value)
        graph.replay()
        return y

    return call


WAYS = {
    "reduce-overhead": lambda fn, *_, **__: torch.compile(fn, mode="reduce-overhead"),
    '`"cudagraphs"`': lambda fn, *_, **__: torch.compile(fn, backend="cudagraphs"),
    "`make_graphed_callables`": lambda fn, *x, **__: torch.cuda.make_graphed_callables(fn, x),
    "by hand": by_hand,
}


def data(rows=8, **more):
    return torch.randn(rows, 8, device="cuda", **more)


def net():
    layers = torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8)
    return torch.nn.Sequential(*layers).cuda()


def close(a, b):
    return all(torch.allclose(x, y, atol=1e-2, rtol=1e-2) for x, y in zip(a, b, strict=True))


def plainly(fn, x):
    """Call a module without the forward that `make_graphed_callables` gives it."""
    return type(fn).forward(fn, x) if isinstance(fn, torch.nn.Module) else fn(x)


def follows(make, fn, sizes=(8,) * 6, change=lambda: None):
    """Tell whether a call without gradients gives what the function does, and what replays graphs."""
    found, replay = [], torch.cuda.CUDAGraph.replay
    torch.cuda.CUDAGraph.replay = lambda graph: (found.append(graph), replay(graph))[1]
    with torch.no_grad():
        call = make(fn, data())
        for x in map(data, sizes):
            change()
            if not close([call(x).clone()], [plainly(fn, x)]):
                return False
    return bool(found)


def trains(make, step, backward=False):
    """Tell whether gradients are those of the function after each of some steps."""
    fn = net()
    plain = copy.deepcopy(fn)
    call = make(fn, data(), backward=backward)
    for _ in range(6):
        xs = [data() for _ in range(3)]
        for each in (fn, plain):
            each.zero_grad()
            step(call if each is fn else plain, xs)
        if not close([p.grad for p in fn.parameters()], [p.grad for p in plain.parameters()]):
            return False
    return True


def results_are_left_alone(make):
    fn = net()
    with torch.no_grad():
        call, xs = make(fn, data()), [data() for _ in range(6)]
        held = [call(x) for x in xs]
        try:
            return close(held, [plainly(fn, x) for x in xs])
        except RuntimeError as error:
            return "error" if "overwritten" in str(error) else False


def accumulates(make):
    def step(call, xs):
        for x in xs:
            y = call(x)
            if not backward or isinstance(call, torch.nn.Module):
                y.sum().backward()

    backward = make is by_hand
    return trains(make, step, backward)


def sums_after(call, xs):
    for y in [call(x) for x in xs]:
        y.sum().backward()


def sums_that_read_after(call, xs):
    for y in [call(x) for x in xs]:
        y.square().sum().backward()


def steps_in_between(call, xs):
    y = call(xs[0])
    call(xs[1]).sum().backward()
    y.sum().backward()


def moves(make):
    fn = net()

    def change():
        for parameter in fn.parameters():
            parameter.data = parameter.data * 0.9

    return follows(make, fn, change=change)


def around_a_sync(x):
    y = x.sin().cos()
    return (y * float(y.sum().item())).sin().cos()


def dropout_in_a_checkpoint(make):
    def inner(x):
        return torch.nn.functional.dropout(x.exp(), 0.5)

    call = make(lambda x: checkpoint(inner, x, use_reentrant=False), data(requires_grad=True))
    for _ in range(6):
        x = data(requires_grad=True)
        y = call(x)
        y.sum().backward()
        if not torch.equal(x.grad != 0, y != 0):
            return False
    return True


def a_failed_capture(make):
    @torch.library.custom_op("alternatives::syncs", mutates_args=())
    def syncs(x: torch.Tensor) -> torch.Tensor:
        return x * float(x.sum().cpu())

    syncs.register_fake(torch.empty_like)
    return follows(make, lambda x: syncs(x.sin()).cos())


def whole_step(make):
    fn = net()
    optimizer = torch.optim.AdamW(fn.parameters(), fused=True, capturable=True)

    def step(x):
        loss = fn(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    call, found, replay = make(step, data()), [], torch.cuda.CUDAGraph.replay
    for _ in range(6):
        call(data())
    torch.cuda.CUDAGraph.replay = lambda graph: (found.append(graph), replay(graph))[1]
    call(data())
    return len(found) == 1


# in this order: the last ones leave captures behind that failed
ROWS = {
    "works without sample inputs": [lambda make: make(net())(data()) is not None],
    "later calls leave your results alone": [results_are_left_alone],
    "accumulates gradients as in eager": [accumulates],
    "runs several forwards before their backwards": [
        lambda make: trains(make, sums_after),
        lambda make: trains(make, sums_that_read_after),
        lambda make: trains(make, steps_in_between),
    ],
    "notices parameters that move": [moves],
    "takes several shapes": [lambda make: follows(make, net(), (8, 5, 3) * 3)],
    "puts a whole step into one graph": [whole_step],
    "repeats dropout in a checkpoint's backward": [dropout_in_a_checkpoint],
    "captures what is before and after `.item()`": [lambda make: follows(make, around_a_sync)],
    "continues after a failed capture": [a_failed_capture],
}


def cell(programs, make):
    """What README says of programs: yes if all do, or what one says itself."""
    found = []
    for program in programs:
        try:
            found.append(program(make))
        except Exception as error:  # whatever it is, it does not do that
            sys.stderr.write(f"{type(error).__name__}: {error}\n"[:400])
            found.append(False)
        torch.compiler.reset()
    return found[0] if isinstance(found[0], str) else "yes" if all(found) else "no"


@pytest.mark.parametrize("way", WAYS)
def test_cells_of_an_alternative(way):
    command = [sys.executable, "-m", "tests.gpu.test_alternatives", way]
    run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert run.returncode == 0, run.stderr[-3000:]
    table = re.findall(r"^\|(.*)\|$", (ROOT / "README.md").read_text(), re.MULTILINE)
    rows = [[each.strip() for each in line.split("|")] for line in table[:14]]
    column = rows[0].index(way)
    cells = {row[0]: row[column] for row in rows}
    expected = {name: cells[name] for name in ROWS if cells[name] != "-"}
    found = json.loads(run.stdout.splitlines()[-1])
    assert {name: found[name] for name in expected} == expected, run.stderr[-3000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    made = WAYS[sys.argv[1]]
    sys.stdout.write(json.dumps({name: cell(each, made) for name, each in ROWS.items()}) + "\n")
