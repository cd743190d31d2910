"""Arguments that are no tensors: they must be what they were when the callable was recorded."""

import array
import enum
import math
import types
from dataclasses import dataclass

import numpy as np
import pytest
import torch

import cgpass
from tests.graphed.steps import same

refused = pytest.raises(cgpass.errors.InputError, match="when it was recorded and is")


@dataclass
class Scale:
    by: float
    parts: list


class Plain:
    def __init__(self, by):
        self.inner = {"by": by}

    def method(self):
        return self.inner


PLAIN = Plain(1)


class Kind(enum.Enum):
    A = 1
    B = 2


@pytest.mark.parametrize(
    ("recorded", "fits", "other"),
    [
        (0.0, 0.0, -0.0),
        (-0.0, -0.0, 0.0),
        (math.nan, float("nan"), 1.0),
        (1, 1, 1.0),
        (1, 1, True),
        (complex(0.0, 1.0), complex(0.0, 1.0), complex(-0.0, 1.0)),
        (Kind.A, Kind.A, Kind.B),
        (PLAIN.method, PLAIN.method, Plain(1).method),
        (torch.float32, torch.float32, torch.float64),
        (frozenset({1}), frozenset({1}), frozenset({2})),
        (Scale(2.0, [1]), Scale(2.0, [1]), Scale(2.0, [2])),
        (Plain(1), None, Plain(1)),
        (np.array([0, 2]), np.array([0, 2]), np.array([0, 1])),
        (np.array([0, 2]), np.array([0, 2]), np.array([0.0, 2.0])),
        (array.array("i", [1]), array.array("i", [1]), array.array("f", [1e-45])),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_alike_and_others(setting, recorded, fits, other):
    graphed = setting.graphed(lambda x, c: x * 2, (setting.randn(3), recorded))
    x = setting.randn(3)
    same(graphed(x, recorded), x * 2)
    if fits is not None:
        same(graphed(x, fits), x * 2)
    with refused:
        graphed(x, other)


@pytest.mark.parametrize(
    ("value", "change"),
    [
        (Scale(2.0, [1]), lambda v: setattr(v, "by", 3.0)),
        (Scale(2.0, [1]), lambda v: v.parts.append(2)),
        (Plain(1), lambda v: v.inner.update(by=2)),
        ({1, 2}, lambda v: v.add(3)),
        (bytearray(b"a"), lambda v: v.extend(b"b")),
    ],
    ids=lambda value: type(value).__name__,
)
def test_values_that_were_changed(setting, value, change):
    graphed = setting.graphed(lambda x, c: x * 2, (setting.randn(3), value))
    x = setting.randn(3)
    same(graphed(x, value), x * 2)
    change(value)
    with refused:
        graphed(x, value)


def test_tensors_of_an_object_are_read_where_they_lie(setting):
    scale = Scale(1.0, [setting.randn(3)])
    graphed = setting.graphed(lambda x, s: x * s.parts[0], (setting.randn(3), scale))
    x = setting.randn(3)
    scale.parts[0].mul_(2)
    same(graphed(x, scale), x * scale.parts[0])
    scale.parts[0] = setting.randn(3)
    with refused:
        graphed(x, scale)


@dataclass
class Aux:
    loss: object = None
    seen: int = 0


def set_once(aux, y):
    if aux.loss is None:
        aux.loss = y.detach()


def count(aux, y):
    aux.seen += 1


@pytest.mark.parametrize("iterations", [1, 3])
@pytest.mark.parametrize("way", [lambda aux, y: setattr(aux, "loss", y.mean()), count])
@pytest.mark.parametrize("kind", [Aux, lambda: types.SimpleNamespace(loss=None, seen=0)])
def test_a_forward_that_writes_into_an_object_is_refused(setting, kind, way, iterations):
    def fn(x, aux):
        y = x * 2
        way(aux, y)
        return y

    with pytest.raises(
        cgpass.errors.GraphedArgumentError, match=r"fn writes into argument 1, a \w+, .* return"
    ):
        setting.graphed(fn, (setting.randn(3), kind()), num_warmup_iters=iterations)


def test_what_a_first_run_sets_up_in_an_object_stays(setting):
    def fn(x, aux):
        set_once(aux, x)
        return x * aux.loss

    aux = Aux()
    graphed = setting.graphed(fn, (setting.randn(3), aux))
    x = setting.randn(3)
    same(graphed(x, aux), x * aux.loss)
    with refused:
        graphed(x, Aux())


def test_objects_in_an_array_that_change(setting):
    parts = np.array([[1], [2]], dtype=object)
    parts[0, 0] = [1, 2]
    graphed = setting.graphed(lambda x, c: x * 2, (setting.randn(3), parts))
    x = setting.randn(3)
    same(graphed(x, parts), x * 2)
    parts[0, 0].append(3)
    with refused:
        graphed(x, parts)
