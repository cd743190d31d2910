"""From the parts of graphs to plans: slots, order, drops, constants."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cgpass.compile.facts.input_info import InputInfo, InputKind
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.compile.passes.outline import outline
from cgpass.compile.passes.partition import Partition
from cgpass.compile.plan import Argument, Single, build_plan
from cgpass.runtime.executor import Executor, Plan, Step
from cgpass.runtime.partition import PartitionRunner
from tests.graphs import sync_between

CPU = torch.device("cpu")


def plan_of(fn, *args, visible, mode="fake"):
    gm = make_fx(fn, tracing_mode=mode)(*args)
    run_passes([Partition(frozenset(), 1)], gm, PassContext(CPU, "graph", "forward"))
    parts = outline(gm)
    runs = {part.name: lambda values, part=part: part.gm(*values) for part in parts}
    return build_plan(gm, parts, runs, frozenset(visible))


def steps_of(plan):
    return [(step.name, step.inputs, step.outputs, step.drops) for step in plan.steps]


def test_the_plan_of_an_outlined_graph():
    plan = plan_of(sync_between, torch.ones(4, 4), torch.ones(4, 4), visible={0, 2})
    assert steps_of(plan) == [
        ("captured_0", (0, 1), (2, 3, 4), (0, 1)),
        ("eager_1", (2,), (5,), (2,)),
    ]
    assert (plan.num_inputs, plan.outputs, plan.visible) == (2, (5, 4, 3), {0, 2})


def host_numbers(x, w):
    n = x.shape[0] * 2 + 1
    return torch.nonzero(x.sin() * n), x.new_ones(n) + 1, n


def constants(x, w):
    return None, x.sin(), x, 3


@pytest.mark.parametrize("fn", [sync_between, host_numbers, constants])
@pytest.mark.parametrize("mode", ["fake", "symbolic"])
def test_a_plan_computes_what_the_graph_does(fn, mode):
    plan = plan_of(fn, torch.ones(4, 4), torch.ones(4, 4), visible={0, 1}, mode=mode)
    args = [torch.randn(4, 4), torch.randn(4, 4)]
    args = args if plan.num_inputs == 2 else [4, *args]
    torch.testing.assert_close(Executor(plan, None)([*args]), [*fn(*args[-2:])], rtol=0, atol=0)


def runner(*names):
    """A runner that adds two inputs, doubles the second, and names its inputs."""
    found = Mock(spec=PartitionRunner)
    found.fn = lambda values: (values[0] + values[1], values[1] * 2)
    found.layout = SimpleNamespace(infos=[InputInfo(name, InputKind.COPIED) for name in names])
    return found


def test_one_partition_behind_scalars_that_are_put_on_the_device():
    put = Step("put", Argument(CPU), (1,), (2,), (1,))
    last = Step("captured_0", runner("x", "on the device"), (0, 2), (3, 4), (0, 2))
    plan = Plan(2, 5, (put, last), (4, 3))
    single = Single.of(plan)
    assert list(single.arguments) == [1]
    assert [info.name for info in single.infos()] == ["x", "number 1"]
    args = [torch.tensor(3.0), torch.tensor(4.0)]
    assert [value.item() for value in single.alone()(args)] == [8.0, 7.0]
    assert args == []


@pytest.mark.parametrize(
    "plan",
    [
        Plan(
            2,
            5,
            (Step("a host step", len, (1,), (2,)), Step("a", runner(), (0, 2), (3, 4))),
            (4, 3),
        ),
        Plan(2, 4, (Step("does not read input 1", runner(), (0, 0), (2, 3)),), (2, 3)),
        Plan(2, 5, (Step("returns a constant", runner(), (0, 1), (2, 3)),), (2, 4), ((4, 1),)),
        Plan(2, 4, (Step("not captured", len, (0, 1), (2, 3)),), (2, 3)),
    ],
    ids=lambda plan: plan.steps[0].name,
)
def test_plans_that_do_more(plan):
    assert Single.of(plan) is None
