"""An exception that comes in the middle of the runtime's work makes no later call wrong."""

import gc

import pytest
import torch
from faultlib import inject

import cgpass
from cgpass.runtime import output_memory


def compiled():
    weight = torch.randn(4, 4)

    def fn(x):
        return (x @ weight).sin().cos().tanh().exp()

    options = {"driver": "simulated", "compiler": "eager"}
    return fn, torch.compile(fn, backend="cgpass", options=options)


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_a_rescue_that_an_exception_ends_leaves_no_stale_values(error):
    """At each line and native call of the rescue: what was held stays, and later calls give their own values."""
    fn, call = compiled()
    inputs = [torch.randn(3, 4) for _ in range(5)]

    def until_held():
        cgpass.reset()
        for x in inputs[:2]:
            call(x)
        return call(inputs[2])

    for _ in range(2):
        held = until_held()
        with inject.noted(lambda name: name == output_memory.__file__) as points:
            call(inputs[3])
        del held
    assert len(points) > 50
    for point in points:
        held = until_held()
        with inject.fault(point, error) as was_raised, pytest.raises(error, match="injected"):
            call(inputs[3])
        assert was_raised(), point
        assert torch.equal(held, fn(inputs[2])), point
        for x in inputs:
            assert torch.equal(call(x), fn(x)), point
        assert torch.equal(held, fn(inputs[2])), point
        del held
        for x in inputs:
            assert torch.equal(call(x), fn(x)), point
        gc.collect(0)
