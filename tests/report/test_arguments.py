"""A batch, and options, as `explain` is given them."""

from collections import UserDict

import pytest
import torch
from expecttest import assert_expected_inline
from torch import nn

import cgpass
from cgpass.errors import InputError, OptionError
from cgpass.report.arguments import arguments_of, options_of

X, Y = torch.ones(2, 8), torch.zeros(2, 8)


class Names(nn.Module):
    def forward(self, x=None, y=None):
        return x.sin() + y


class Anything(nn.Module):
    def forward(self, *inputs, **kwargs):
        return inputs, kwargs


def named(x, **others):
    return x, others


def two(x, y):
    return x.sin() + y


def optional(images, targets=None):
    return images, targets


def one(batch):
    return batch["x"].sin() * batch["y"]


PAIR, BY_NAME = (X, Y), {"x": X, "y": Y}


@pytest.mark.parametrize("wrap", [lambda fn: fn, lambda fn: torch.compile(fn, backend="eager")])
@pytest.mark.parametrize(
    ("fn", "batch", "expected"),
    [
        (Names(), BY_NAME, ((), BY_NAME)),
        (Names(), {"x": X}, ((), {"x": X})),
        (Names(), UserDict(BY_NAME), ((), BY_NAME)),
        (Anything(), BY_NAME, ((), BY_NAME)),
        (named, BY_NAME, ((), BY_NAME)),
        (named, {"y": Y}, (({"y": Y},), {})),  # x is the batch
        (one, BY_NAME, ((BY_NAME,), {})),
        (one, PAIR, ((PAIR,), {})),
        (nn.Identity(), PAIR, ((PAIR,), {})),
        (Names(), PAIR, (PAIR, {})),
        (Anything(), PAIR, (PAIR, {})),
        (two, [X, Y], ((X, Y), {})),
        (optional, [X, Y], ((X, Y), {})),
        (optional, [X, Y, X], (([X, Y, X],), {})),
        (two, (), ((), {})),
        (two, X, ((X,), {})),
    ],
)
def test_a_batch_is_given_as_it_is_taken(wrap, fn, batch, expected):
    given = batch if batch == () else (batch,)
    args, kwargs = arguments_of(wrap(fn), given, {})
    assert (tuple(map(same, args)), {k: same(v) for k, v in kwargs.items()}) == (
        tuple(map(same, expected[0])),
        {k: same(v) for k, v in expected[1].items()},
    )


def same(value):
    return list(map(id, value.values() if isinstance(value, dict) else value))


def test_several_arguments_stay_as_they_are():
    assert arguments_of(Names(), (BY_NAME, X), {}) == ((BY_NAME, X), {})
    assert arguments_of(two, (BY_NAME,), {"y": X}) == ((BY_NAME,), {"y": X})


def refusal(fn, batch):
    with (
        cgpass.set_defaults(driver="simulated", compiler="eager"),
        pytest.raises(InputError) as told,
    ):
        cgpass.explain(fn, batch)
    torch.compiler.reset()
    assert len(told.traceback) <= 6
    assert told.value.__cause__ is None
    return str(told.value)


def test_what_is_not_taken_says_what_to_write():
    assert_expected_inline(
        "\n".join(
            [
                refusal(Names(), {"x": X, "labels": Y}),
                refusal(two, {"x": X}),
                refusal(two, (X, Y, X)),
                refusal(nn.Sequential(nn.Linear(8, 8)), (X, Y)),
                refusal(nn.Linear(8, 8), {"ids": X}),
                refusal(lambda x: x.view(x.size(0)), {"ids": X}),
            ]
        ),
        """\
cgpass.explain: Names.forward does not take **batch: got an unexpected keyword argument 'labels'; write out what it takes: cgpass.explain(model, x=..., y=...)
cgpass.explain: two does not take **batch: missing a required argument: 'y'; write out what it takes: cgpass.explain(model, x=..., y=...)
cgpass.explain: two does not take *batch: too many positional arguments; write out what it takes: cgpass.explain(model, x=..., y=...)
cgpass.explain: Sequential.forward was given the tuple as one argument: linear(): argument 'input' (position 1) must be Tensor, not tuple; write out what it takes: cgpass.explain(model, input=...)
cgpass.explain: Linear.forward was given the dict as one argument: linear(): argument 'input' (position 1) must be Tensor, not dict; write out what it takes: cgpass.explain(model, input=...)
cgpass.explain: <lambda> was given the dict as one argument: 'dict' object has no attribute 'view'; write out what it takes: cgpass.explain(model, x=...)""",
    )


def test_a_function_that_takes_a_batch_raises_what_it_raises():
    def wrong(batch):
        return batch["none"]

    with cgpass.set_defaults(driver="simulated", compiler="eager"), pytest.raises(KeyError):
        cgpass.explain(wrong, {"ids": X})
    torch.compiler.reset()


def test_a_mapping_runs():
    with cgpass.set_defaults(driver="simulated", compiler="eager"):
        report = cgpass.explain(Names(), UserDict(BY_NAME))
        assert report.work == (2, 2)
        assert cgpass.explain(one, BY_NAME).work == (2, 2)
    torch.compiler.reset()


def test_options_by_themselves_say_where_they_belong():
    with pytest.raises(OptionError) as told:
        cgpass.explain(two, X, Y, driver="simulated", compiler="eager")
    assert_expected_inline(
        str(told.value),
        """cgpass.explain takes options as one argument: write options={'compiler': 'eager', 'driver': 'simulated'} instead of compiler=..., driver=...""",
    )
    kwargs = {"rng": 1, "options": 2}
    assert options_of(named, kwargs) == {}
    assert kwargs == {"rng": 1, "options": 2}
