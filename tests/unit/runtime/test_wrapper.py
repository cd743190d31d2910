"""`CUDAGraphWrapper` by itself: any callable, on CPU with the simulated driver."""

import dataclasses
from collections import OrderedDict

import pytest
import torch

import cgpass
from cgpass.errors import (
    DriverUnavailableError,
    InputError,
    OutputError,
)
from tests.unit.runtime.runners import counts

X = torch.ones(3)


def wrap(fn, static=(), **options):
    return cgpass.CUDAGraphWrapper(
        fn, static_input_indices=static, options={"driver": "simulated", **options}
    )


@dataclasses.dataclass
class Opaque:
    value: int


def test_nested_results_keep_their_structure():
    def fn(x):
        return {"a": [x + 1, (x * 2, None)], "b": OrderedDict(n=3, s="text"), "c": Opaque(4)}

    call = wrap(fn)
    for value in range(4):
        found = call(X * value)
        assert found["a"][0].tolist() == [value + 1] * 3
        assert found["a"][1][0].tolist() == [2 * value] * 3
        assert found["a"][1][1] is None
        assert found["b"] == OrderedDict(n=3, s="text")
        assert found["c"] == Opaque(4)
    assert call.stats.replays == 3


def quantised(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_refused():
    with pytest.raises(
        InputError, match=r"input 0 is quantised \(torch.qint8\): a recording takes .*pass its int_"
    ):
        wrap(lambda x: x.dequantize())(quantised(X))
    call = wrap(quantised)
    for _ in range(3):
        with pytest.raises(
            OutputError, match=r"output 0 is quantised \(torch.qint8\), but a replay"
        ):
            call(X)


def test_close_frees_and_later_calls_run_plainly():
    call = wrap(lambda x: x * 2)
    call.close()
    for _ in range(3):
        held = call(X)
    call.close()
    call.close()
    assert held.tolist() == [2] * 3
    assert call(X * 5).tolist() == [10] * 3
    assert counts(call) == (1, 1, 2, 1)


def test_calls_without_tensors_say_that_they_run_plainly(caplog):
    @dataclasses.dataclass
    class Batch:
        x: torch.Tensor

    call = wrap(lambda batch: batch.x * 2)
    for _ in range(3):
        assert call(Batch(X)).tolist() == [2.0] * 3
    assert caplog.text.count("no input is a tensor, so calls run without a graph") == 1
    assert wrap(lambda: X)().tolist() == [1.0] * 3
    assert caplog.text.count("no input is a tensor") == 1


def test_without_a_gpu_calls_say_once_that_they_run_plainly(caplog):
    call = cgpass.CUDAGraphWrapper(lambda x: x * 2, name="doubled")
    for each in (call, wrap(lambda x: x * 2, driver="none")):
        assert [each(X).tolist() for _ in range(3)] == [[2.0] * 3] * 3
        assert each.stats is None
    layer = torch.nn.Linear(3, 3)
    graphed = cgpass.make_graphed_callables(layer, (X,))
    assert torch.equal(graphed(X), layer(X))
    assert [each.partition(". ")[0] for each in caplog.messages] == [
        "doubled: inputs are on cpu, so calls run without a graph",
        "make_graphed_callables: calls run without a graph, since modules and samples are on cpu",
    ]


class Subclass(torch.Tensor):
    pass


META = torch.ones(3, device="meta")
WRONG = "input 1 is a"
NOT_STRIDED = "input 1 has layout torch.sparse_coo: a recording takes strided tensors"
NOT_PLAIN = f"{WRONG} Subclass: a recording takes plain tensors"


@pytest.mark.parametrize(
    ("first", "then", "error", "text"),
    [
        ((X, 3), (X, X), InputError, f"{WRONG} Tensor, in the first call it was of another kind"),
        ((X, 3), (3, X), InputError, "input 0 is a int, in the first call it was a tensor"),
        ((X, 3), (X,), InputError, "was first called with 2 inputs, now with 1"),
        ((X, 3), (X, object()), InputError, f"{WRONG} object, in the first call it was of another"),
        ((X, 3), (X, 1.5), InputError, f"{WRONG} float: a graph would freeze"),
        (None, ([X],), InputError, "input 0 is a list: a graph would freeze its value"),
        (None, (X, META), InputError, "input 1 lies on meta, the recording on cpu: move it there"),
        (None, (X, X.to_sparse()), InputError, NOT_STRIDED),
        (None, (X, X.as_subclass(Subclass)), InputError, NOT_PLAIN),
        (None, (META,), DriverUnavailableError, 'driver="simulated" can\'t record on meta'),
        (None, (X.clone().requires_grad_(),), InputError, "input 0 requires grad, but no autograd"),
    ],
)
def test_inputs_that_are_refused(first, then, error, text):
    call = wrap(lambda *args: X * 2)
    if first is not None:
        call(*first)
    with pytest.raises(error, match=text):
        call(*then)


@pytest.mark.parametrize("index", [-1, 1, "a"])
def test_static_inputs_that_are_no_positions_are_refused(index):
    with pytest.raises(InputError, match=f"has {index!r}, but the call has 1 inputs"):
        wrap(lambda x: x, static=[0, index])(X)
