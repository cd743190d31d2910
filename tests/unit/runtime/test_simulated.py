"""The simulated driver does what a CUDA graph does, and fails where that would."""

import contextlib
import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from cgpass import torch_private
from cgpass.errors import DriverUnavailableError
from cgpass.runtime import rng, simulated
from cgpass.runtime.simulated import SimulatedDriver, driver_for
from tests.operators import waits
from tests.usage.programs import in_threads


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


def test_host_code_runs_once_while_nothing_is_collected(driver):
    runs, x = [], torch.zeros(2)
    other = SimulatedDriver()

    def fn(x):
        in_threads(lambda: runs.append(other.is_capturing()))
        runs.extend([driver.is_capturing(), other.is_capturing(), gc.isenabled()])
        return [x + len(runs)]

    graph, (out,) = record(driver, fn, x)
    assert out.isnan().all(), "nothing before the first replay"
    for _ in range(3):
        graph.replay()
        assert out.tolist() == [4, 4]
    assert runs == [False, True, True, False], "a capture belongs to one thread"
    assert not driver.is_capturing()
    assert gc.isenabled()


def test_an_unregistered_generator_is_refused(driver):
    generator = torch.Generator()
    with pytest.raises(RuntimeError, match="is not registered with the graph"):
        record(driver, lambda: [torch.rand(2, generator=generator)])


@torch.library.custom_op("test_simulated::twice_hidden", mutates_args=())
def twice_hidden(x: torch.Tensor) -> torch.Tensor:
    return waits(x) + 1


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [x + 1] if x.sum() > 0 else [x],
        lambda x: [x[x > 0]],
        lambda x: [x + torch.from_numpy(x.numpy())],
        lambda x: [x * [1, 2][torch.tensor(1)]],
        lambda x: [x.cpu() + 1],
        waits,
        twice_hidden,
    ],
)
@pytest.mark.parametrize("opaque", [False, True])
def test_host_reads_are_refused(driver, fn, opaque):
    with pytest.raises(RuntimeError, match="operation not permitted when stream is capturing"):
        record(driver, lambda x: [*fn(x)], torch.ones(3), opaque=opaque)
    assert not driver.is_capturing()


def test_a_draw_of_another_thread_is_named(driver):
    def fn(x):
        in_threads(lambda: torch.rand(1))
        return [x + 1]

    with pytest.raises(RuntimeError, match="another thread drew from"):
        record(driver, fn, X)


def test_a_size_that_is_given_is_not_read(driver):
    fn = lambda n: [torch.repeat_interleave(n, output_size=3)]  # noqa: E731
    record(driver, fn, torch.ones(3, dtype=torch.int64))


@torch.library.custom_op("test_simulated::with_gradients", mutates_args=())
def with_gradients(x: torch.Tensor) -> torch.Tensor:
    return x + torch.is_grad_enabled()


def test_operators_replay_with_gradients_where_they_were_recorded_with_them(driver):
    """Some make less where no backward is to come."""

    def fn(x):
        with torch.enable_grad():
            first = with_gradients(x)
        return [first, with_gradients(x)]

    graph, outputs = record(driver, fn, torch.zeros(2))
    graph.replay()
    assert [out.tolist() for out in outputs] == [[1, 1], [0, 0]]


def test_neither_a_tape_nor_its_reset_keeps_inputs_alive(driver):
    x = torch.ones(2)
    graph, (out,) = driver.record(lambda args: [args[0] * 2], [x], opaque=False)
    graph.replay()
    alive = weakref.ref(x)
    del x
    assert alive() is None, "inputs belong to the caller"
    graph.reset()
    assert out.tolist() == [2, 2]


def test_a_result_of_one_byte_lies_in_the_pool(driver):
    _, (out,) = record(driver, lambda x: [x > 0], torch.ones(1))
    assert out.data_ptr() in driver.live_blocks(0)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("opaque", [False, True])
def test_recording_on_memory_that_was_used_before_leaves_its_contents(driver, opaque, fails):
    """Its first owner died, but an alias that owns nothing still reads there."""
    x = torch.arange(4.0)
    first, (a,) = record(driver, lambda x: [x + 10], x)
    first.replay()
    alias, address = torch_private.tensor_at_address(a), a.data_ptr()
    del a

    def fn(x):
        out = x * 5
        out.add_(1)
        if fails:
            raise ValueError("user's")
        return [out]

    replays = []
    with pytest.raises(ValueError, match="user's") if fails else contextlib.nullcontext():
        graph, (out,) = record(driver, fn, x, opaque=opaque)
        assert out.data_ptr() == address
        replays.append(graph.replay)
    assert alias.tolist() == [10, 11, 12, 13]
    for replay in replays:
        replay()
        assert alias.tolist() == [1, 6, 11, 16]


OUTSIDE, X = torch.get_rng_state(), torch.ones(8)


def checkpointed(x, p):
    with torch.enable_grad():
        x = x.detach().requires_grad_()
        y = checkpoint(lambda v: F.dropout(v.sin(), p).cos(), x, use_reentrant=False)
        F.dropout(y, 0.5).sum().backward()
    return [y.detach(), x.grad]


def drawn_from(state):
    torch.set_rng_state(state)
    return [torch.rand(2)]


def left_at(state):
    torch.set_rng_state(state)
    return [torch.ones(2) + 1]


def read_at(state):
    torch.set_rng_state(state)
    return [rng.read_rng_state(torch.default_generator)]


@pytest.mark.parametrize(
    ("fn", "why"),
    [
        (
            lambda x: drawn_from(OUTSIDE),
            "rand.default draws from a state .* that was set in what is",
        ),
        (lambda x: read_at(OUTSIDE), "read_rng_state.default draws from a state"),
        (lambda x: left_at(OUTSIDE), "set_rng_state without setting it back"),
        (lambda x: checkpointed(x, 0.5), "Recompute by cgpass.checkpoint"),
    ],
)
def test_states_that_no_replay_repeats_are_refused_and_the_generator_stays(driver, fn, why):
    torch.manual_seed(7)
    torch.rand(1)
    before = torch.get_rng_state()
    with pytest.raises(RuntimeError, match=f"not permitted when stream is capturing: .*{why}"):
        record(driver, fn, X)
    assert torch.equal(torch.get_rng_state(), before)


@torch.library.custom_op("cgpass_test::seeded", mutates_args=())
def seeded(x: torch.Tensor) -> torch.Tensor:
    state = torch.get_rng_state()
    torch.manual_seed(5)
    drawn = torch.rand_like(x)
    torch.set_rng_state(state)
    return drawn


def back_before_anything_draws(x):
    first, state = torch.rand_like(x), torch.get_rng_state()
    torch.set_rng_state(OUTSIDE)
    y = x + 1
    torch.set_rng_state(state)
    return [y, first, torch.rand_like(x)]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: [seeded(x), torch.rand_like(x)],  # inside an operator, which a replay runs again
        lambda x: checkpointed(x, 0.0),
        back_before_anything_draws,
    ],
)
def test_states_that_a_replay_repeats_are_recorded(driver, fn):
    graph, outputs = record(driver, fn, X)
    for seed in range(3):
        torch.manual_seed(seed)
        graph.replay()
        found = [*(out.clone() for out in outputs), torch.rand(3)]
        torch.manual_seed(seed)
        for a, b in zip(found, [*fn(X), torch.rand(3)], strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("wanted", "on_cpu", "on_cuda"),
    [
        ("auto", None, "CUDA"),
        ("cuda", "refused", "CUDA"),
        ("simulated", "Simulated", "refused"),
        ("none", None, None),
    ],
)
def test_the_driver_that_an_option_means(monkeypatch, wanted, on_cpu, on_cuda):
    for name in ("CUDA", "Simulated"):
        monkeypatch.setattr(simulated, f"{name}Driver", lambda device, name=name: name)
    for device, expected in (("cpu", on_cpu), ("cuda:0", on_cuda)):
        if expected == "refused":
            with pytest.raises(DriverUnavailableError, match=f"can't record on {device}"):
                driver_for(wanted, torch.device(device))
        else:
            assert driver_for(wanted, torch.device(device)) == expected
