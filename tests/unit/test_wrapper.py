"""`CUDAGraphWrapper` by itself: any callable, on CPU with the simulated driver."""

import dataclasses
import logging
from collections import OrderedDict

import pytest
import torch

import cgpass
from cgpass.errors import (
    CaptureError,
    DriverUnavailableError,
    InputError,
    OptionError,
    OutputError,
    StaticInputMovedError,
)

X = torch.ones(3)


def wrap(fn, static=(), **options):
    return cgpass.CUDAGraphWrapper(
        fn, static_input_indices=static, options={"driver": "simulated", **options}
    )


def counts(wrapper):
    stats = wrapper.stats
    return (stats.warmups, stats.recordings, stats.replays, stats.plain_calls)


def test_it_warms_up_records_and_replays():
    call = wrap(lambda x, y: x * y)
    assert call.stats is None
    for value in range(5):
        assert call(X, X * value).tolist() == [value] * 3
    assert counts(call) == (1, 1, 4, 0)


def test_outputs_are_the_callers_own():
    call = wrap(lambda x: (x * 2, x + 1))
    kept = [call(X * value) for value in range(5)]
    assert [(a[0].item(), b[0].item()) for a, b in kept] == [(2 * v, v + 1) for v in range(5)]
    assert counts(call) == (1, 1, 4, 0)


def test_python_does_not_run_again():
    runs = []
    call = wrap(lambda x: (runs.append(1), x * 2)[1])
    for _ in range(6):
        call(X)
    assert len(runs) == 2


def test_a_written_input_is_written_back():
    def fn(x, state):
        state.add_(x)
        return state * 2

    call = wrap(fn)
    state = torch.zeros(3)
    outs = [call(X, state) for _ in range(4)]
    assert state.tolist() == [4] * 3
    assert [out[0].item() for out in outs] == [2, 4, 6, 8]
    other = torch.full((3,), 10.0)
    call(X, other)
    assert other.tolist() == [11] * 3
    assert state.tolist() == [4] * 3
    assert counts(call) == (1, 1, 4, 0)


def test_a_written_static_input_is_written_in_place():
    call = wrap(lambda x, cache: cache.copy_(x) + 1, static=[1])
    cache = torch.zeros(3)
    for value in range(4):
        assert call(X * value, cache).tolist() == [value + 1] * 3
        assert cache.tolist() == [value] * 3
    assert call.stats.copied_bytes == 3 * 12, "x in; the cache stays"


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


def test_outputs_that_are_inputs_are_those_of_the_call():
    call = wrap(lambda x: (x.add_(1), x[1:]))
    for _ in range(4):
        x = torch.zeros(3)
        same, part = call(x)
        assert same is x
        assert part.data_ptr() == x[1:].data_ptr()
        assert x.tolist() == [1] * 3


def test_each_layout_has_its_recording():
    call = wrap(lambda x: x * 2)
    largest = torch.ones(
        2, 3
    )  # first: a larger one that comes later has smaller ones recorded again
    inputs = [largest, torch.ones(3, 2).t(), torch.ones(3), torch.ones(4), torch.arange(3)]
    for _ in range(4):
        for x in inputs:
            found = call(x)
            assert torch.equal(found, x * 2)
            assert found.dtype == x.dtype
    assert counts(call) == (5, 5, 15, 0)


def test_values_and_objects_belong_to_the_signature():
    call = wrap(lambda x, key: x[key] if isinstance(key, (bool, int)) else x)
    for key in (1, True, 1, True, 1, True, None, "text", None, "text"):
        assert torch.equal(call(X, key), X if key in (None, "text") else X[key])


def test_a_generator_advances_as_without_graphs():
    def fn(x, generator):
        return x + torch.rand(3, generator=generator)

    generator, control = (torch.Generator().manual_seed(3) for _ in range(2))
    call = wrap(fn)
    for _ in range(5):
        assert torch.equal(call(X, generator), fn(X, control))
    assert counts(call) == (1, 1, 4, 0)


def test_static_inputs_that_move_are_recorded_again():
    call = wrap(lambda x, w: x + w, static=[1])
    weights = [torch.full((3,), float(i)) for i in range(3)]
    for _ in range(3):
        for number, weight in enumerate(weights):
            assert call(X, weight).tolist() == [number + 1] * 3
    assert counts(call) == (3, 3, 6, 0)


def test_static_inputs_that_may_not_move():
    call = wrap(lambda x, w: x + w, static=[1], static_input_check="error")
    weight = torch.zeros(3)
    call(X, weight)
    call(X, weight)
    with pytest.raises(StaticInputMovedError, match="input 1"):
        call(X, torch.zeros(3))
    assert call(X, weight).tolist() == [1] * 3


@pytest.mark.parametrize("value", [1.5, [1], {"a": 1}])
def test_values_that_would_freeze_are_refused(value):
    with pytest.raises(InputError, match=f"input 1 is a {type(value).__name__}: a graph would"):
        wrap(lambda x, y: x)(X, value)
    call = wrap(lambda x, y: x * 2)
    call(X, 3)
    with pytest.raises(InputError, match=f"input 1 is a {type(value).__name__}: a graph would"):
        call(X, value)


def test_inputs_of_another_kind_than_before_are_refused():
    call = wrap(lambda x, y: x * 2)
    call(X, 3)
    with pytest.raises(
        InputError, match="input 1 is a Tensor, in the first call it was of another kind"
    ):
        call(X, X)
    with pytest.raises(InputError, match="input 0 is a int, in the first call it was a tensor"):
        call(X.numel(), X)
    with pytest.raises(InputError, match="was first called with 2 inputs, now with 1"):
        call(X)
    with pytest.raises(
        InputError, match="input 1 is a object, in the first call it was of another"
    ):
        call(X, object())


def test_gradients_are_refused():
    call = wrap(lambda x: x * 2)
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(
        InputError, match="input 0 requires grad, but no autograd graph is recorded"
    ):
        call(x)
    with torch.no_grad():
        assert call(x).tolist() == [2] * 3


def test_other_devices_are_refused():
    call = wrap(lambda x, y: x)
    with pytest.raises(InputError, match="input 1 lies on meta, the recording on cpu"):
        call(X, torch.ones(3, device="meta"))
    with pytest.raises(
        DriverUnavailableError, match='driver="simulated" can\'t record inputs on meta'
    ):
        wrap(lambda x: x)(torch.ones(3, device="meta"))


@pytest.mark.parametrize("driver", ["none", "auto"])
def test_without_a_driver_it_is_the_function(driver):
    call = wrap(lambda x: x * 2, driver=driver)
    for _ in range(3):
        assert call(X).tolist() == [2] * 3
    assert call.stats is None


def test_cuda_on_cpu_inputs_is_an_error():
    with pytest.raises(DriverUnavailableError, match='driver="cuda" can\'t record inputs on cpu'):
        wrap(lambda x: x, driver="cuda")(X)


def test_unknown_options_are_refused():
    with pytest.raises(OptionError, match="did you mean 'driver'"):
        cgpass.CUDAGraphWrapper(lambda x: x, options={"drivr": "none"})


@pytest.mark.parametrize(
    ("indices", "shown"), [(0, "0"), (("a",), "'a'"), ("a", "'a'"), ([0, True], "True"), ([X], "")]
)
def test_static_inputs_that_are_no_positions_are_refused(indices, shown):
    with pytest.raises(
        InputError, match=rf"must be positions of inputs, as in \(0, 2\), got {shown}"
    ):
        wrap(lambda x: x, static=indices)


def test_what_cannot_be_captured_runs_plainly_or_raises(caplog):
    def sync(x):
        return x * x.sum().item()

    call = wrap(sync)
    with caplog.at_level(logging.WARNING, "cgpass"):
        assert [call(X).tolist() for _ in range(3)] == [[3] * 3] * 3
    assert counts(call) == (1, 0, 0, 2)
    (record,) = caplog.records
    assert "sync can't be captured" in record.getMessage()
    call = wrap(sync, on_skip="raise")
    call(X)
    with pytest.raises(CaptureError, match="sync can't be captured"):
        call(X)


def quantised(x):
    return torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
def test_quantised_tensors_are_refused():
    with pytest.raises(
        InputError, match=r"input 0 is quantised \(torch.qint8\): a recording takes"
    ):
        wrap(lambda x: x.dequantize())(quantised(X))
    call = wrap(quantised)
    for _ in range(3):
        with pytest.raises(
            OutputError, match=r"output 0 is quantised \(torch.qint8\), but a replay"
        ):
            call(X)


def test_inputs_that_share_memory_and_are_only_read_replay():
    call = wrap(lambda x, y: x * 2 + y)
    for value in range(4):
        x = X * value
        assert call(x, x).tolist() == [3 * value] * 3
    assert counts(call) == (1, 1, 3, 0)


@pytest.mark.parametrize("first", ["shared", "apart"])
def test_writes_are_seen_through_inputs_that_share_memory(first, caplog):
    def fn(x, y):
        x.add_(1)
        return y * 2

    call = wrap(fn)
    if first == "apart":
        for _ in range(3):
            call(torch.zeros(3), torch.zeros(3))
    for _ in range(4):
        x = torch.zeros(3)
        assert call(x, x[1:] if first == "apart" else x)[0].item() == 2
        assert x.tolist() == [1] * 3
    assert call.stats.plain_calls > 0
    assert len([r for r in caplog.records if "share memory" in r.getMessage()]) == 1
    y = torch.zeros(3)
    assert call(torch.zeros(3), y).tolist() == [0] * 3


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


def test_the_functions_own_error_passes():
    def fn(x, n):
        if n > 1:
            raise ValueError("user's")
        return x * n

    call = wrap(fn)
    for _ in range(3):
        call(X, 1)
    for _ in range(2):
        with pytest.raises(ValueError, match="user's"):
            call(X, 2)
    assert call(X, 1).tolist() == [1] * 3
    assert counts(call) == (1, 1, 3, 0)


def test_no_outputs_and_empty_tensors():
    call = wrap(lambda x, empty: (empty * 2, None))
    for _ in range(3):
        out, none = call(X, torch.empty(0, 2))
        assert out.shape == (0, 2)
        assert none is None
    nothing = wrap(lambda x: None)
    for _ in range(3):
        assert nothing(X) is None


@pytest.mark.parametrize("batch", [{"x": X}, [X], (X, X)], ids=["dict", "list", "tuple"])
def test_tensors_in_containers_alone_are_refused(batch):
    wrapper = cgpass.CUDAGraphWrapper(lambda batch: batch, options={"driver": "simulated"})
    with pytest.raises(InputError, match="a graph would freeze its value"):
        wrapper(batch)


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


class Logged(torch.Tensor):
    """A tensor around another that sees to every call, and can't be flattened."""

    @staticmethod
    def __new__(cls, inner):
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        def inner(value):
            return value.inner if isinstance(value, Logged) else value

        return Logged(func(*map(inner, args), **(kwargs or {})))


def test_tensors_around_others_inside():
    call = wrap(lambda x: Logged(x * 2).exp().mul_(3).inner + 1)
    for value in range(4):
        x = X * value
        assert torch.equal(call(x), (x * 2).exp() * 3 + 1)
    assert counts(call) == (1, 1, 3, 0)
