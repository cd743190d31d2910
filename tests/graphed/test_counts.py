"""What is counted and listed of graphed callables."""

import torch

import cgpass


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
