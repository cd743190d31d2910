"""What is counted and listed of graphed callables."""

import torch

import cgpass
from tests.graphed.steps import net


def test_calls_in_the_other_mode_are_counted(setting):
    graphed = setting.graphed(setting.module(net()), (setting.randn(4, 8),))
    graphed(setting.randn(4, 8))
    graphed.eval()
    with cgpass.expect(calls=2, plain_calls=2, replays=0):
        for _ in range(2):
            graphed(setting.randn(4, 8))
    graphed.train()
    with cgpass.expect(calls=1, plain_calls=0, replays=1):
        graphed(setting.randn(4, 8))


class Named(torch.nn.Linear):
    pass


def listed():
    return [line for line in cgpass.summary().splitlines() if "Named" in line]


def test_the_summary_lists_graphed_callables(setting):
    module, x = setting.module(Named(8, 8)), setting.randn(4, 8)
    graphed = setting.graphed((module, torch.sin), ((x,), (x,)))
    for each in graphed:
        each(x)
    graphed[0].eval()(x)
    assert listed() == [
        "callable 0 (Named), graphed by hand: 2 recordings, 2 calls, 1 of them without a graph"
    ]
    cgpass.reset()
    assert listed() == []
