"""The sync check: what it refuses on CPU, and when it is turned on for CUDA."""

import contextlib
import threading
import warnings

import pytest
import torch

from cgpass.runtime.syncs import is_capture_error, syncs_noted

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
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
def test_reading_data_counts_as_waiting(name):
    WAITS[name]()
    with syncs_noted(CPU) as found:
        WAITS[name]()
    assert found


def test_other_work_is_left_alone():
    with syncs_noted(CPU) as waits:
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


@pytest.fixture
def modes(monkeypatch):
    """What torch's check is set to, in order."""
    found = [0]

    def set_mode(mode):
        warnings.warn("Synchronization debug mode is a prototype feature", stacklevel=1)
        found.append(mode)

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: found[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", set_mode)
    monkeypatch.setattr(threading, "enumerate", lambda: [threading.current_thread()])
    return found


def test_cuda_is_set_back_whatever_happens(modes):
    with contextlib.suppress(KeyError), syncs_noted(CUDA):
        raise KeyError
    assert modes == [0, "warn", 0]


def idle():
    pass


def from_module(module):
    def target():
        pass

    target.__module__ = module
    return threading.Thread(target=target)


def test_a_thread_of_the_user_keeps_the_check_off(modes, monkeypatch):
    me = threading.current_thread()
    others = [threading.Thread(target=idle)]
    monkeypatch.setattr(threading, "enumerate", lambda: [me, *others])
    with syncs_noted(CUDA):
        pass
    assert modes == [0]
    others[:] = [from_module("torch._inductor.compile_worker"), from_module("cgpass.runtime.fast")]
    with syncs_noted(CUDA):
        pass
    assert modes == [0, "warn", 0]


def test_in_a_backward_one_thread_waits_for_it(modes, monkeypatch):
    dummy, user = object.__new__(threading._DummyThread), threading.Thread(target=idle)
    threads = [dummy, threading.main_thread()]
    monkeypatch.setattr(threading, "current_thread", lambda: dummy)
    monkeypatch.setattr(threading, "enumerate", lambda: threads)
    with syncs_noted(CUDA):
        pass
    assert modes == [0, "warn", 0]
    threads.append(user)
    with syncs_noted(CUDA):
        pass
    assert modes == [0, "warn", 0]


def test_what_waits_is_noted_and_goes_on():
    with syncs_noted(CPU) as found:
        value = torch.ones(3).sum().item()
    assert value == 3
    assert found == ["aten._local_scalar_dense.default"]
    with syncs_noted(CPU) as found:
        torch.ones(3).sum()
    assert found == []
