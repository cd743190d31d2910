"""What counts as reading data on the host, and which errors are a capture's."""

import pytest
import torch

from cgpass.runtime.syncs import HostReads, is_capture_error

X = torch.ones(3)


@torch.library.custom_op("test_syncs::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


@torch.library.custom_op("test_syncs::listed", mutates_args=())
def listed(x: torch.Tensor) -> torch.Tensor:
    return x * sum(x.tolist())


@torch.library.custom_op("test_syncs::twice_hidden", mutates_args=())
def twice_hidden(x: torch.Tensor) -> torch.Tensor:
    return hidden(x) + 1


WAITS = {
    "item": lambda: X.sum().item(),
    "truth": lambda: bool(X.sum() > 0),
    "nonzero": lambda: X.nonzero(),
    "mask": lambda: X[X > 0],
    "float": lambda: float(X[0]),
    "index": lambda: [1, 2, 3][torch.tensor(1)],
    "tolist": lambda: X.tolist(),
    "numpy": lambda: X.numpy(),
    "array": lambda: X.__array__(),
    "cpu": lambda: X.cpu(),
    "in a custom operator": lambda: hidden(X),
    "tolist in a custom operator": lambda: listed(X),
    "in a custom operator's custom operator": lambda: twice_hidden(X),
}


@pytest.mark.parametrize("name", WAITS)
def test_reading_data_is_noticed(name):
    found = []
    with HostReads(found.append):
        WAITS[name]()
    assert found


def test_other_work_is_left_alone():
    waits = []
    with HostReads(waits.append):
        found = X[torch.tensor([0, 1])] + X.sum()
    assert found.tolist() == [4, 4]
    assert not waits


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (RuntimeError("operation not permitted when stream is capturing"), True),
        (RuntimeError("CUDA error: operation failed due to a previous error"), True),
        (RuntimeError("CUBLAS_STATUS_NOT_INITIALIZED"), True),
        (RuntimeError("the user's"), False),
        (ValueError("not while capturing"), False),
    ],
)
def test_errors_of_captures(error, expected):
    assert is_capture_error(error) is expected
