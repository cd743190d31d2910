"""Bookkeeping of generator states for captures, with generators that exchange their states as CUDA's do."""

import pytest
import torch

import cgpass
from cgpass.errors import CheckpointError
from cgpass.recompute import checkpointed, states, tracker
from cgpass.recompute.states import CheckpointStates
from tests.generators import FakeGenerator, State
from tests.recompute.steps import tensor, tracker_of

FAKE = torch.device("meta", 0)


class Generator(FakeGenerator):
    """One that no capture may ask where it stands."""

    @property
    def state(self):
        assert not DEVICE.capturing, "not allowed while capturing"
        return self._state


class Device:
    """Draws from the default generator; notes who drew where."""

    def __init__(self):
        self.default = Generator(State(100))
        self.capturing = False
        self.drawn = []

    def draw(self, amount=4):
        state = self.default._state
        if self.capturing:
            self.drawn.append((state, amount))
        else:
            self.drawn.append((state.seed, state.offset))
            state.offset += amount

    def replay(self):
        """Give what the captured draws give now; advance every state by its draws, like a replay."""
        found = []
        for state, amount in self.drawn:
            found.append((state.seed, state.offset))
            state.offset += amount
        return found


DEVICE = Device()


@pytest.fixture(autouse=True)
def device(monkeypatch):
    DEVICE.__init__()
    cpu = torch.default_generator
    for module in (states, tracker):
        monkeypatch.setattr(
            module,
            "default_generator",
            lambda d: cpu if d == torch.device("cpu") else DEVICE.default,
        )
    monkeypatch.setattr(states, "is_capturing", lambda: DEVICE.capturing)
    monkeypatch.setattr(tracker, "new_generator", lambda d, seed: Generator(State(seed)))
    monkeypatch.setattr(checkpointed, "devices_of", lambda tensors: (FAKE,))
    return DEVICE


def drawing(device, *amounts):
    """A function that draws before what it saves."""

    def fn(x):
        for amount in amounts:
            device.draw(amount)
            x = x.sin()
        return x

    return fn


def captured(device, program, rng_tracker=None, warm_ups=1):
    """`program` warmed up and captured; returns its states and what the warm-up drew."""
    kept = CheckpointStates(FAKE, rng_tracker)
    for _ in range(warm_ups):
        device.drawn.clear()
        with kept:
            program()
    warm = list(device.drawn)
    device.drawn.clear()
    with kept:
        device.capturing = True
        program()
        device.capturing = False
    return kept, warm


def moved(drawn, seed, by):
    return [(seed, offset + by) for _, offset in drawn]


def test_replays_draw_what_eager_would(device):
    first, second = drawing(device, 4, 8), drawing(device, 4)

    def program():
        x = tensor(2, requires_grad=True)
        device.draw()
        y = cgpass.checkpoint(first, x)
        device.draw(12)
        y = cgpass.checkpoint(second, y)
        device.draw()
        y.sum().backward()
        device.draw()

    kept, warm = captured(device, program, warm_ups=2)
    assert warm == [(100, n + 40) for n in (0, 4, 8, 16, 28, 32, 28, 4, 8, 36)]
    for seed, offset in ((100, 80), (7, 0), (7, 400)):
        device.default.manual_seed(seed).set_offset(offset)
        kept.rewind(kept.position())
        assert device.replay() == moved(warm, seed, offset - 40)
        assert kept.position() == {None: (seed, offset + 40)}


@pytest.mark.parametrize("named", [True, False])
def test_a_trackers_states(device, named):
    """The checkpoint is in a tracker's fork, and is told of the tracker or not."""
    rng_tracker = tracker_of(FAKE, a=1, b=2)
    told = {"rng_tracker": rng_tracker} if named else {}

    def fn(x):
        device.draw(4)
        x = x.sin()
        with rng_tracker.fork("a"):
            device.draw(8)
            x = x.sin()
        return x.sin()

    def program():
        x = tensor(2, requires_grad=True)
        with rng_tracker.fork("b"):
            x = cgpass.checkpoint(fn, x, **told)
            x = cgpass.checkpoint(fn, x, **told)
        device.draw(4)
        x.sum().backward()

    with pytest.raises(CheckpointError, match="CheckpointedGraph"):
        captured(device, program)
    rng_tracker.reset()
    rng_tracker.add("a", 1)
    rng_tracker.add("b", 2)
    device.default.manual_seed(100)
    kept, warm = captured(device, program, rng_tracker)
    assert warm == [(2, 0), (1, 0), (2, 4), (1, 8), (100, 0), (2, 4), (1, 8), (2, 0), (1, 0)]
    sources = (device.default, *rng_tracker.generators.values())
    for generator, seed in zip(sources, (30, 31, 32), strict=True):
        generator.manual_seed(seed).set_offset(40)
    kept.rewind(kept.position())
    seeds = {100: 30, 1: 31, 2: 32}
    assert device.replay() == [(seeds[seed], offset + 40) for seed, offset in warm]
    assert rng_tracker.current is None


def test_random_operators_without_warm_up_are_refused(device):
    device.capturing = True
    x = tensor(2, requires_grad=True)
    with pytest.raises(CheckpointError) as error:
        cgpass.checkpoint(torch.nn.functional.dropout, x, 0.5)
    assert str(error.value) == (
        "cgpass.checkpoint: aten.bernoulli_.float draws random numbers while a CUDA graph is being captured, and the "
        "recomputation could not draw the same ones. Capture into a cgpass.CheckpointedGraph() after a "
        "`with graph.warm_up():` run of the same code, or draw outside of the checkpoint."
    )


def test_what_draws_nothing_needs_no_warm_up(device):
    device.capturing = True
    x = tensor(1, 2, 4, 4, requires_grad=True)

    def fn(x):
        x = torch.native_dropout(x, 0.0, True)[0]
        x = torch.native_dropout(x, 0.5, False)[0]
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    cgpass.checkpoint(fn, x).sum().backward()
    assert x.grad.shape == x.shape


def test_a_recomputation_on_the_other_side_of_a_capture(device):
    x = tensor(2, requires_grad=True)
    y = cgpass.checkpoint(lambda x: torch.nn.functional.dropout(x.sin(), 0.5).exp(), x)
    device.capturing = True
    with pytest.raises(CheckpointError, match="outside of the capture that its forward ran in"):
        y.sum().backward()
    device.capturing = False
    y.sum().backward()


def test_a_capture_that_was_not_warmed_up_like_this(device):
    fn = drawing(device, 4)
    x = tensor(2, requires_grad=True)
    kept = CheckpointStates(FAKE)
    with kept:
        cgpass.checkpoint(fn, x).sum()
    with kept:
        device.capturing = True
        y = cgpass.checkpoint(fn, x).sum()
        with pytest.raises(CheckpointError, match="0 of this capture has no generator"):
            y.backward()
        with pytest.raises(CheckpointError, match="checkpoint 1 of this capture was not seen"):
            cgpass.checkpoint(fn, x)


@pytest.mark.parametrize("registered", [False, True])
def test_a_tracker_that_is_not_registered_is_named(device, registered):
    x = tensor(2, requires_grad=True)
    mine, other = tracker_of(FAKE, mine=1), tracker_of(FAKE, a=1, b=2)
    has = "another one, of states 'mine'" if registered else "none"
    fix = r"pass this one as CheckpointedGraph\(rng_tracker=...\) or GraphedOptions\(rng_tracker=...\)"
    told = rf"this checkpoint's rng_tracker \(states 'a', 'b'\) is not the graph's tracker \({has}\). .* {fix}"
    forked = (
        rf"the tracker in whose fork\('b'\) this checkpoint is .* {fix}, or leave its fork before"
    )
    with CheckpointStates(FAKE, mine if registered else None):
        with pytest.raises(CheckpointError, match=told):
            cgpass.checkpoint(torch.sin, x, rng_tracker=other)
        with other.fork("b"), pytest.raises(CheckpointError, match=forked):
            cgpass.checkpoint(torch.sin, x, rng_tracker=mine if registered else None)
