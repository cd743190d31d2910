"""The simulated driver: outputs that share memory, and drivers beside each other."""

import threading

import pytest
import torch

from cgpass.runtime.simulated import SimulatedDriver


@pytest.fixture
def driver():
    return SimulatedDriver()


_inputs = []


@pytest.fixture(autouse=True)
def _free_inputs():
    yield
    _inputs.clear()


def record(driver, fn, *args, opaque=False):
    graph, outputs = driver.record(lambda inputs: fn(*inputs), list(args), opaque=opaque)
    _inputs.append(args)  # a graph reads them where they lie, and keeps none alive
    return graph, outputs


def test_drivers_know_of_each_other(driver):
    other, seen = SimulatedDriver(), []

    def fn(x):
        seen.append(other.is_capturing())
        thread = threading.Thread(target=lambda: seen.append(other.is_capturing()))
        thread.start()
        thread.join()
        return [x + 1]

    record(driver, fn, torch.ones(1))
    assert seen == [True, False], "as CUDA's captures, one belongs to one thread"
    assert not other.is_capturing()


@pytest.mark.parametrize("opaque", [False, True])
def test_outputs_may_overlap_themselves_and_share_memory(driver, opaque):
    def fn(x):
        y = x * 2
        return [y.sum().expand(3), y, y[1:]]

    x = torch.ones(3)
    graph, (total, whole, part) = record(driver, fn, x, opaque=opaque)
    for value in (1, 4):
        x.fill_(value)
        graph.replay()
        assert total.stride() == (0,)
        assert total.tolist() == [6 * value] * 3
        assert whole.tolist() == [2 * value] * 3
        assert part.data_ptr() == whole[1:].data_ptr()
