"""Modules and tensors in plain containers, of any size."""

import collections
import logging

import pytest
import torch

from cgpass.errors import GraphedArgumentError
from cgpass.graphed.containers import LIMIT, contents
from cgpass.graphed.hidden import HiddenTensors
from cgpass.graphed.reach import modules_behind
from tests.graphed.steps import net, same

NUMBERS = list(range(10 * LIMIT))
PAIRS = [(i, str(i)) for i in range(10 * LIMIT)]


def test_numbers_are_skipped_and_tensors_found():
    tensors = [torch.zeros(()) for _ in range(2 * LIMIT)]
    found, is_all = contents([NUMBERS, {"a": (tensors,), "b": "c", "d": {1.5, None}}])
    assert is_all
    assert all(a is b for a, b in zip(found, tensors, strict=True))


def test_a_search_ends_after_so_many_things():
    objects = [object() for _ in range(LIMIT + 1)]
    assert contents(objects[:-1]) == (objects[:-1], True)
    assert contents(objects) == (objects[:-1], False)
    assert contents(PAIRS) == ([], False)
    half = PAIRS[: LIMIT // 2]
    assert contents([half, half]) == ([], True)


def test_containers_are_looked_at_once():
    item = object()
    inner = [item]
    inner.append(inner)
    seen = set()
    assert contents([inner, (inner, inner)], seen) == ([item], True)
    assert contents((inner,), seen) == ([], True)


def test_no_method_of_a_container_runs():
    class Lazy(dict):
        def values(self):
            raise AssertionError

        __iter__ = __getitem__ = values

    assert contents([Lazy(a=3 + 1j, b=len)]) == ([len], True)


def test_modules_among_many_things():
    module = net()
    many = [torch.nn.Identity() for _ in range(LIMIT + 5)]
    table = {"numbers": NUMBERS, "pairs": {"module": module}}
    assert modules_behind(lambda x: table["pairs"]["module"](x)) == [module]
    assert modules_behind(lambda x: many[0](x)) == many
    with_pairs = {"module": module, "pairs": PAIRS}
    assert modules_behind(lambda x: with_pairs["module"](x)) == [module]


class Logs(torch.nn.Module):
    def __init__(self, into, put):
        super().__init__()
        self.inner = net()
        self.logs = into
        self.put = put

    def forward(self, x):
        y = self.inner(x)
        self.put(self.logs, y)
        return y


def itself():
    found = []
    found.append(found)
    return found


@pytest.mark.parametrize(
    ("into", "put", "warned"),
    [
        (lambda: list(NUMBERS), list.append, True),
        (lambda: collections.deque(maxlen=2), collections.deque.append, True),
        (lambda: [list(NUMBERS), []], lambda logs, y: logs[1].append((1, {"loss": y})), True),
        (itself, list.append, True),
        (lambda: list(PAIRS), list.append, False),
    ],
    ids=["numbers", "deque", "nested", "itself", "pairs"],
)
def test_tensors_put_into_containers(setting, into, put, warned, caplog):
    module = setting.module(Logs(into(), put))
    with caplog.at_level(logging.WARNING):
        graphed = setting.graphed(module, (setting.randn(2, 8),))
    assert ("puts a tensor into logs of Logs" in caplog.text) is warned
    x = setting.randn(2, 8)
    same(graphed(x), module.inner(x))


class Result:
    def __init__(self, **fields):
        vars(self).update(fields)


def test_results_with_large_containers():
    hidden = HiddenTensors()
    hidden.check("f", Result(pairs=PAIRS))
    hidden.check("f", Result(pairs=PAIRS))
    with pytest.raises(GraphedArgumentError, match=r"at result\.found\[100000\]"):
        hidden.check("f", Result(found=[*NUMBERS, torch.zeros(())], pairs=PAIRS))
