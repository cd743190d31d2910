"""Arguments that are one tensor, and code that asks whether they are."""

import copy
import logging

import pytest
import torch

from tests.graphed.steps import same, same_grads


class Attends(torch.nn.Module):
    """Another projection where it attends to what it is given twice."""

    def __init__(self):
        super().__init__()
        self.own = torch.nn.Linear(4, 4)
        self.cross = torch.nn.Linear(4, 4)

    def forward(self, x, context):
        return (self.own if x is context else self.cross)(context) * x


def pairs(setting):
    """Arguments that are one tensor, and that are two."""
    x, y, z = (setting.randn(2, 4, grad=True) for _ in range(3))
    return {"one": (x, x), "two": (y, z)}


@pytest.mark.parametrize("sample", ["one", "two"])
@pytest.mark.parametrize("form", [lambda *args: args, lambda a, b: ({"a": a, "b": [b]},)])
def test_code_that_asks_whether_arguments_are_one(setting, sample, form, caplog):
    module = setting.module(Attends())
    twin = copy.deepcopy(module)

    def unpacking(fn):
        return lambda *given: fn(*given) if len(given) == 2 else fn(given[0]["a"], *given[0]["b"])

    graphed = setting.graphed(unpacking(module), form(*pairs(setting)[sample]), modules=(module,))
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            for kind, args in pairs(setting).items():
                before = graphed.stats.plain_calls
                expected = twin(*args)
                expected.square().sum().backward()
                wanted = [arg.grad.clone() for arg in args]
                for arg in args:
                    arg.grad = None
                found = graphed(*form(*args))
                found.square().sum().backward()
                same(found, expected)
                for arg, grad in zip(args, wanted, strict=True):
                    same(arg.grad, grad)
                same_grads(module, twin)
                is_plain = (kind == "one") is (sample == "two")
                assert graphed.stats.plain_calls - before == is_plain
    (message,) = [each.getMessage() for each in caplog.records]
    assert "runs without a graph: other arguments are one tensor than in the sample" in message


def test_other_pairs_of_arguments_that_are_one(setting):
    def fn(a, b, c):
        return a - b if a is b else a * b * c

    x, y = setting.randn(3), setting.randn(3)
    graphed = setting.graphed(fn, (x, x, y))
    for args in ((x, x, y), (x, y, y), (y, x, y), (y, y, x)):
        same(graphed(*args), fn(*args))
    assert graphed.stats.plain_calls == 2


def test_an_argument_given_twice_that_is_written(setting):
    def fn(a, b):
        a.add_(1)
        return a * b

    def ones():
        return torch.ones(3, device=setting.device)

    sample = ones()
    graphed = setting.graphed(fn, (sample, sample))
    same(sample, ones())
    found, expected = ones(), ones()
    same(graphed(found, found), fn(expected, expected))
    same(found, expected)
    assert graphed.stats.plain_calls == 0
