"""`cgpass.explain` calls a function again and again, and each call is the one that would come next."""

import copy

import pytest
import torch
from torch import nn

import cgpass
from cgpass.report import positions
from tests.report.test_explain import X

pytestmark = pytest.mark.usefixtures("simulated")


class Cache(nn.Module):
    """Keys, and how many there are; one call too many is out of bounds."""

    def __init__(self, size, *, is_buffer):
        super().__init__()
        self.register_buffer("keys", torch.zeros(size, 8))
        position = torch.zeros(1, dtype=torch.long)
        self.position = nn.Buffer(position) if is_buffer else position
        self.register_buffer("is_used", torch.zeros(size, dtype=torch.bool))

    def forward(self, x):
        self.keys.index_copy_(0, self.position, x)
        self.is_used.index_fill_(0, self.position, True)
        self.position.add_(1)
        return (self.keys.sum(0) * x).tanh().exp(), self.is_used.clone()


@pytest.mark.parametrize("is_buffer", [False, True])
@pytest.mark.parametrize("used", [0, 2])
def test_every_call_is_the_one_that_would_come_next(is_buffer, used):
    cache = Cache(used + 1, is_buffer=is_buffer)
    compiled = torch.compile(cache, backend=cgpass.cgpass)
    x = torch.randn(1, 8)
    with torch.no_grad():
        for _ in range(used):
            compiled(x)
    position, before = cache.position, copy.deepcopy(cache.state_dict())
    report = cgpass.explain(compiled, x, training=False)
    assert report.settled
    assert cache.position is position
    for name, value in cache.state_dict().items():
        assert torch.equal(value, before[name]), name
    with torch.no_grad():
        _, is_used = compiled(x)
    assert is_used.all()
    assert int(cache.position) == used + 1


def test_a_position_that_is_replaced_goes_on():
    """As in the user's own loop, where that keeps a graph from being replayed."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.position = torch.zeros(64, dtype=torch.long)

        @torch.compiler.disable
        def step(self):
            seen.append(int(self.position[0]))
            self.position = self.position + 1

        def forward(self, x):
            self.step()
            return (x * self.position.sum()).sin().cos().exp()

    seen = []
    cgpass.explain(Counting(), X, training=False)
    assert len(seen) > 5
    assert seen == list(range(len(seen)))


class Layer:
    """Of a cache: not the model's, and not a module."""

    __slots__ = ("keys", "length", "newest")

    def __init__(self, size):
        self.newest = None
        self.keys, self.length = torch.zeros(size, 8), torch.zeros(1, dtype=torch.long)


class Layers:
    def __init__(self, size):
        self.layers = [Layer(size), Layer(size)]

    def update(self, number, x):
        layer = self.layers[number]
        layer.keys.index_copy_(0, layer.length, x)
        layer.length.add_(1)
        layer.newest = x
        return layer.keys


class Attending(nn.Module):
    def __init__(self, cache=None):
        super().__init__()
        self.cache = cache

    @torch.compiler.disable
    def keys(self, x, cache):
        return (cache or self.cache).update(0, x), (cache or self.cache).update(1, x)

    def forward(self, x, cache=None):
        first, second = self.keys(x, cache)
        return ((first.sum(0) + second.sum(0)) * x).tanh().exp()


@pytest.mark.parametrize("given", [False, True])
def test_a_cache_of_objects_is_not_left_and_is_put_back(given):
    cache = Layers(2)
    cache.update(0, torch.ones(1, 8))
    cache.update(1, torch.ones(1, 8))
    layers, keys = list(cache.layers), [layer.keys.clone() for layer in cache.layers]
    newest = [layer.newest for layer in layers]
    if given:
        cgpass.explain(Attending(), torch.randn(1, 8), cache, training=False)
    else:
        cgpass.explain(Attending(cache), torch.randn(1, 8), training=False)
    assert cache.layers == layers
    assert all(layer.newest is each for layer, each in zip(layers, newest, strict=True))
    for layer, before in zip(layers, keys, strict=True):
        assert layer.length.tolist() == [1]
        assert torch.equal(layer.keys, before)


class Lazy:
    """A cache that makes its memory in the first call."""

    def __init__(self):
        self.keys, self.num_calls = None, 0

    def update(self, number, x):
        if self.keys is None:
            self.keys, self.length = torch.zeros(64, 8), torch.zeros(1, dtype=torch.long)
        self.num_calls += 1
        self.keys.index_copy_(0, self.length, x)
        self.length.add_(1)
        return self.keys


def test_a_cache_that_makes_its_memory_in_the_first_call_has_none_afterwards():
    cache = Lazy()
    cgpass.explain(Attending(cache), torch.randn(1, 8), training=False)
    assert vars(cache) == {"keys": None, "num_calls": 0}


def test_a_position_that_shares_memory_with_another_is_replaced_with_it():
    class Sharing(nn.Module):
        def __init__(self):
            super().__init__()
            self.state = torch.zeros(2, dtype=torch.long)
            self.position = self.state[:1]

        @torch.compiler.disable
        def step(self):
            assert self.position.data_ptr() == self.state.data_ptr()
            self.state = self.state + 1
            self.position = self.state[:1]

        def forward(self, x):
            self.step()
            return x.sin().cos().exp()

    model = Sharing()
    cgpass.explain(model, X, training=False)
    assert model.position.tolist() == [0]


def test_a_tensor_whose_memory_was_freed_is_left_alone():
    class Freed(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("elsewhere", torch.arange(64))
            self.elsewhere.untyped_storage().resize_(0)

        def forward(self, x):
            return x.sin().cos().exp()

    cgpass.explain(Freed(), X, training=False)


class Growing(nn.Module):
    """A mask that is as long as the keys."""

    def __init__(self):
        super().__init__()
        self.keys, self.mask = torch.zeros(2, 8), torch.ones(2, dtype=torch.bool)

    def forward(self, x):
        self.keys = torch.cat([self.keys, x])
        self.mask = torch.cat([self.mask, torch.ones(1, dtype=torch.bool)])
        return (x @ self.keys.t()).masked_fill(~self.mask, -1e9).softmax(-1) @ self.keys


class Agreeing(nn.Module):
    """A Python number and a tensor that count the same."""

    def __init__(self, *, replaces):
        super().__init__()
        self.calls, self.count, self.replaces = 0, torch.zeros((), dtype=torch.long), replaces

    @torch.compiler.disable
    def note(self):
        self.calls += 1
        if self.replaces:
            self.count = self.count + 1
        else:
            self.count += 1
        assert self.calls == int(self.count)

    def forward(self, x):
        self.note()
        return x.sin().cos().exp()


class Unpacking(nn.Module):
    """Packed weights that are gone after the first call."""

    def __init__(self):
        super().__init__()
        self.packed, self.weight = torch.ones(8, dtype=torch.int8), None

    @torch.compiler.disable
    def unpack(self):
        if self.packed is not None:
            assert self.weight is None
            self.weight, self.packed = self.packed.float(), None

    def forward(self, x):
        self.unpack()
        return (x * self.weight).sin().cos().exp()


class Log:
    """An object beside the module."""

    def __init__(self):
        self.lengths, self.count = [], torch.zeros((), dtype=torch.long)

    def add(self, length):
        self.lengths.append(length)
        self.count += 1
        assert len(self.lengths) == int(self.count)


class Logging(nn.Module):
    def __init__(self):
        super().__init__()
        self.log = Log()

    @torch.compiler.disable
    def note(self, x):
        self.log.add(len(x))

    def forward(self, x):
        self.note(x)
        return x.sin().cos().exp()


@pytest.mark.parametrize(
    "make",
    [
        Growing,
        lambda: Agreeing(replaces=False),
        lambda: Agreeing(replaces=True),
        Unpacking,
        Logging,
    ],
)
def test_numbers_that_have_to_agree_go_on_together(make):
    model = make()
    x = torch.randn(1, 8)
    cgpass.explain(model, x, training=False)
    model(x)  # asserts that they agree


def test_a_position_that_is_a_part_of_a_large_table():
    class Placed(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = torch.zeros(2**18, dtype=torch.long)
            self.position = self.table[:1]
            self.register_buffer("keys", torch.zeros(1, 8))

        def forward(self, x):
            self.keys.index_copy_(0, self.position, x)
            self.position.add_(1)
            return (self.keys.sum(0) * x).tanh().exp()

    cgpass.explain(Placed(), torch.randn(1, 8), training=False)


def test_what_lies_beside_a_position_goes_on():
    class Beside(nn.Module):
        def __init__(self):
            super().__init__()
            memory = torch.zeros(32, dtype=torch.uint8)
            self.total, self.position = (
                memory[:16].view(torch.float32),
                memory[16:].view(torch.long),
            )
            self.seen = []

        @torch.compiler.disable
        def note(self):
            self.total.add_(1)
            self.position.add_(1)
            seen.append((self.total[0].item(), self.position[0].item()))

        def forward(self, x):
            self.note()
            return x.sin().cos().exp()

    seen = []
    cgpass.explain(Beside(), X, training=False)
    assert seen == [(call + 1, 1) for call in range(len(seen))]


def test_what_counts():
    table = torch.ones(positions.MOST_BYTES // 4 + 1, dtype=torch.int32)
    assert not positions.counts(table)
    assert positions.counts(table[1:])
    for dtype in (torch.float32, torch.int8, torch.uint8, torch.bool):  # weights, flags, masks
        assert not positions.counts(torch.ones(4, dtype=dtype))


def test_what_is_set_up_in_the_first_call():
    """As ActNorm sets up its scale, with a flag that it keeps in a tensor."""

    class Initialised(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(8))
            self.register_buffer("is_set_up", torch.zeros((), dtype=torch.uint8))

        @torch.compiler.disable
        def set_up(self, x):
            if not self.is_set_up:
                self.scale.data.copy_(1 / (1 + x.std(0)))
                self.is_set_up.fill_(1)
                done.append(x)

        def forward(self, x):
            self.set_up(x)
            return (x * self.scale).sin().cos().exp()

    done = []
    model = Initialised()
    cgpass.explain(model, X)
    assert len(done) == 1
    assert not model.is_set_up
    assert torch.equal(model.scale, torch.ones(8))
