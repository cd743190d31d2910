"""Ways to use `CUDAGraphWrapper`: inputs that are written, wrappers inside wrappers, outputs held, modes of torch's."""

import pytest
import torch
from torch.nn import functional as F

from cgpass.errors import OutputError
from tests.unit.runtime.runners import counts
from tests.usage.programs import ATEN, Ways


def test_a_static_inference_tensor_is_written_in_place(setting):
    session = setting.session()
    call = session.wrap(lambda x, cache: cache.add_(x) + 1, static_input_indices=[1])
    with torch.inference_mode():
        cache = session.tensor([0.0])
        for value in range(5):
            assert call(session.tensor([1.0]), cache).item() == value + 2
            assert cache.item() == value + 1
        for _ in range(3):
            call(cache, cache)
        assert cache.item() == 5 * 8, "they share memory: doubled each time, without a graph"
    assert counts(call) == (1, 1, 4, 3)


def test_an_input_that_the_first_call_left_alone_is_written_later(setting):
    session = setting.session()
    ready = []

    def fn(x, y):
        if not ready:  # as a module that sets itself up when it is first called
            ready.append(y * 0)
            return x + y
        x.add_(y)
        return x * 1

    call = session.wrap(fn)
    x, one = session.tensor([0.0]), session.tensor([1.0])
    found = []
    for _ in range(6):
        call(x, one)
        found.append(x.item())
    assert found == [0, 1, 2, 3, 4, 5]
    assert counts(call) == (1, 1, 5, 0)


def test_inputs_that_share_memory_although_one_turns_out_to_be_written(setting):
    session = setting.session()
    call = session.wrap(lambda x, y: (x.add_(1), y * 2)[1])
    for inference in (True, False):
        with torch.inference_mode(inference):
            for _ in range(4):
                x = session.tensor([0.0, 0.0])
                assert call(x, x).tolist() == [2, 2]
                assert call(x, x[:1]).tolist() == [4]
                assert x.tolist() == [2, 2]
    assert call.stats.replays == 0


def test_a_wrapper_inside_a_wrapper(setting):
    session = setting.session()
    inner = session.wrap(lambda x: (x * 2).sin(), name="inner")
    outer = session.wrap(lambda x: inner(x + 1) + 0, name="outer")
    held = []
    for batch in session.batches(4, count=6):
        held.append((outer(batch), ((batch + 1) * 2).sin()))
    for found, expected in held:
        torch.testing.assert_close(found, expected)
    assert counts(outer) == (1, 1, 5, 0)
    batch = session.randn(4)
    for _ in range(3):
        torch.testing.assert_close(inner(batch), (batch * 2).sin())
    assert inner.stats.replays > 0


class Tagged(torch.Tensor):
    """A subclass as users write them."""


@pytest.mark.parametrize(
    ("fn", "what"),
    [
        (lambda x: (x, (x + 1).as_subclass(Tagged)), "output 1 is a Tagged"),
        (lambda x: torch.nn.Parameter(x + 1), "output 0 is a Parameter"),
        (lambda x: [x.sin(), (x + 1).requires_grad_()], "output 1 requires grad"),
    ],
)
def test_outputs_that_a_replay_cannot_make_are_refused(setting, fn, what):
    session = setting.session()
    call = session.wrap(fn, name="fn")
    for _ in range(3):
        with pytest.raises(OutputError, match=f"fn: {what}, but a replay makes plain tensors"):
            call(session.randn(2))


@pytest.mark.parametrize(
    "change",
    [lambda x: x.t_(), lambda x: x.unsqueeze_(0), lambda x: setattr(x, "data", x.data * 2)],
    ids=["t_", "unsqueeze_", "data"],
)
def test_an_input_that_is_given_another_shape(setting, change, caplog):
    def program(session):
        def fn(x):
            change(x)
            return (x.sin() + 1).cos()

        call = session.wrap(fn)
        for _ in range(5):
            x = session.randn(3, 3)
            yield [call(x), x]

    setting.compare(program)
    assert "input 0 is given another shape, other strides or other memory" in caplog.text


def write_data(total, x):
    total.data.add_(x)


@torch.library.custom_op("cgpass_tests::accumulate", mutates_args={"total"})
def accumulate(total: torch.Tensor, x: torch.Tensor) -> None:
    total += x


def writes_that_change_nothing_at_first(write, *, static):
    def program(session):
        state = session.randn(4)
        call = session.wrap(write, static_input_indices=(0,) if static else ())
        for number in range(6):
            call(state, session.randn(4) * max(0, number - 1))
            yield [state.clone()]

    return program


def statistics_that_do_not_change_at_first(*, static):
    """No counter counts that they are written."""

    def program(session):
        fn = lambda mean, var, x: F.batch_norm(x, mean, var, training=True) * 2  # noqa: E731
        call = session.wrap(fn, static_input_indices=(0, 1) if static else ())
        mean, var = session.randn(3) * 0, session.randn(3).abs()
        for number in range(6):
            x = session.randn(4, 3)
            x = (x - x.mean(0)) * 0 + max(0, number - 1)
            yield [call(mean, var, x), mean.clone(), var.clone()]

    return program


ways = Ways(*ATEN)
for static in (False, True):
    ways.add(
        {
            f"data {static}": writes_that_change_nothing_at_first(write_data, static=static),
            f"operator {static}": writes_that_change_nothing_at_first(accumulate, static=static),
            f"statistics {static}": statistics_that_do_not_change_at_first(static=static),
        },
        replays="some",
    )


@ways.everywhere
def test_ways_to_wrap(way, program):
    program.check(way)


@pytest.mark.parametrize("static", [(), (0,)])
def test_autograd_knows_of_every_write_to_an_input(setting, static):
    """Else a backward that saved it computes with what was written, silently."""
    session = setting.session()
    call = session.wrap(lambda total, x: total.add_(x).sum(), static_input_indices=static)
    total, weight = session.randn(4), session.randn(4).requires_grad_()
    for _ in range(5):
        out = (weight * total).sum()
        with torch.no_grad():
            call(total, session.randn(4))
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    assert call.stats.replays >= 3


@pytest.mark.parametrize("reads", [False, True])
def test_a_tensor_of_the_closure_that_is_returned_outlives_its_replacement(setting, reads):
    session = setting.session()
    state = {"table": session.tensor([3.0] * 1024)}

    def fn(x):
        table = state["table"]
        return x + (table[:4] if reads else 1), table

    call = session.wrap(fn)
    for _ in range(3):
        _, table = call(session.tensor([1.0] * 4))
        assert table is state["table"]
    address = table.data_ptr()
    del table
    for _ in range(3):
        call(session.tensor([[0.0] * 4]))
    state["table"] = session.tensor([5.0] * 1024)
    others = [session.tensor([-9.0] * 1024) for _ in range(4)]
    out, table = call(session.tensor([1.0] * 4))
    assert table.tolist() == [3.0] * 1024, "frozen"
    assert out.tolist() == [4.0 if reads else 2.0] * 4
    assert address not in [t.data_ptr() for t in others]
    assert call.stats.replays > 2


# ---- modes of torch's: what they decide is in the graph, or asks for another one


@pytest.mark.parametrize("inside", ["nothing", "decorated", "made before", "with its cache"])
@pytest.mark.parametrize("static", [False, True])
def test_weights_that_autocast_has_cast_before_are_cast_in_the_graph(setting, static, inside):
    """A weight that its cache keeps would be read in every replay, however old it is."""
    session = setting.session()
    linear = session.module(lambda: torch.nn.Linear(4, 4))

    def fn(x, weight):
        weight = weight if static else linear.weight
        return torch.nn.functional.linear(x, weight).sin() * 2

    kind = setting.device.type
    ready = torch.autocast(kind, torch.bfloat16)
    if inside == "decorated":
        fn = torch.autocast(kind, torch.bfloat16)(fn)
    elif inside != "nothing":
        plain = fn

        def fn(x, weight):
            again = torch.autocast(kind, torch.bfloat16, cache_enabled=True)
            with ready if inside == "made before" else again:
                return plain(x, weight)

    call = session.wrap(fn, static_input_indices=[1])
    for _ in range(3):
        x = session.randn(3, 4)
        with torch.autocast(kind, torch.bfloat16), torch.no_grad():
            linear(x)  # which casts the weight, too
            found = [call(x, linear.weight) for _ in range(3)]
        with torch.autocast(kind, torch.bfloat16), torch.no_grad():
            assert all(torch.equal(each, fn(x, linear.weight)) for each in found)
        assert torch.is_autocast_cache_enabled()
        with torch.no_grad():
            linear.weight.mul_(1.5)
    assert call.stats.replays >= 6


def test_what_decides_on_dtypes_and_kernels_is_part_of_the_signature(setting):
    def fn(x):
        factor = 2 if torch.are_deterministic_algorithms_enabled() else 3
        return (torch.zeros(4, device=x.device) + x) * factor

    session, precision = setting.session(), torch.get_float32_matmul_precision()
    call, x = session.wrap(fn), session.randn(4).half()
    torch.set_float32_matmul_precision(precision)  # some of its settings are none before
    for put, value, before in 2 * (
        (torch.set_default_dtype, torch.float64, torch.float32),
        (torch.use_deterministic_algorithms, True, False),
        (torch.set_float32_matmul_precision, "medium", precision),
    ):
        for now in (before, value):
            put(now)
            try:
                for _ in range(3):
                    assert torch.equal(call(x), fn(x))
            finally:
                put(before)
    assert call.stats.recordings == 4, "the usual, and one for each of the others"


def test_true_is_another_value_than_one(setting):
    session = setting.session()
    call, x = session.wrap(lambda x, n: x[n] * 2), session.randn(3, 4)
    for n in (1, True, 1, True, 1, True):
        assert torch.equal(call(x, n), x[n] * 2)
    assert counts(call) == (2, 2, 4, 0)
