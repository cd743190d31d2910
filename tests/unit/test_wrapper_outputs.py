"""What `CUDAGraphWrapper` hands out: numbers of outputs that differ, tensors returned twice, types."""

import pytest
import torch

import cgpass

X = torch.ones(3)


def wrap(fn, **options):
    return cgpass.CUDAGraphWrapper(fn, options={"driver": "simulated", **options})


@pytest.mark.parametrize("outputs", ["shared", "owned"])
def test_each_integer_may_return_another_structure(outputs):
    def fn(x, n):
        return {str(i): x + i for i in range(n)}

    call = wrap(fn, outputs=outputs)
    held = [call(X, 1 + number % 4) for number in range(24)]
    for number, out in enumerate(held):
        assert sorted(out) == [str(i) for i in range(1 + number % 4)]
        assert all(value.tolist() == [1.0 + int(key)] * 3 for key, value in out.items())


@pytest.mark.parametrize("outputs", ["shared", "owned"])
def test_one_tensor_returned_twice_stays_one(outputs):
    def fn(x):
        y = x + 1
        return y, y[1:], y

    call = wrap(fn, outputs=outputs)
    held = []
    for number in range(12):
        first, part, again = call(X * number)
        assert first is again
        held.append((first, part))
        before = first._version
        part.add_(1)
        assert first.tolist() == [number + 1, number + 2, number + 2]
        assert first._version > before, "autograd sees the write through the view"
    assert [part[0].item() for _, part in held] == [number + 2 for number in range(12)]
