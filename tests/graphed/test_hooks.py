"""Hooks around warm-ups and captures: how often, in which order, with what."""

import pytest
import torch

import cgpass
from tests.generators import rng_state
from tests.graphed.steps import check, net, same, step, twins


class Log:
    """Notes calls of hooks."""

    def __init__(self):
        self.calls = []

    def hooks(self, label=""):
        def note(name):
            def hook(*args):
                self.calls.append((label + name, len(args)))

            return hook

        names = ("pre_forward", "forward", "pre_backward", "backward")
        return {name: note(name) for name in names}

    def names(self):
        return [name for name, _ in self.calls]


ITERATION = ["pre_forward", "forward", "pre_backward", "backward"]


@pytest.mark.parametrize("warmups", [1, 3])
def test_one_callable(setting, warmups):
    log = Log()
    module, plain = twins(setting, net())
    x = setting.randn(4, 8)
    graphed = setting.graphed(
        module, (x,), num_warmup_iters=warmups, capture_time_hooks=[log.hooks()]
    )
    assert log.names() == ITERATION * (warmups + 1)
    assert [n for _, n in log.calls[:4]] == [3, 4, 1, 1]
    check(setting, graphed, plain, 3, grad=False)
    assert len(log.calls) == 4 * (warmups + 1)


def test_what_hooks_are_given(setting):
    seen = []
    module = setting.module(net())
    x = setting.randn(4, 8)

    def fn(x, *, scale):
        return {"out": module(x) * scale, "n": 3}

    def forward(called, args, kwargs, output):
        seen.append((called, args, kwargs, output))

    hooks = {"forward": forward}
    setting.graphed(
        fn, (x,), {"scale": 2}, num_warmup_iters=1, capture_time_hooks=[hooks], modules=(module,)
    )
    assert len(seen) == 2
    for called, args, kwargs, output in seen:
        assert called is fn
        assert args[0].shape == x.shape
        assert kwargs == {"scale": 2}
        assert output.keys() == {"out", "n"}
        assert output["out"].shape == (4, 8)
        assert output["n"] == 3


def test_warmup_hooks_once_for_all(setting):
    seen, log = [], Log()
    modules = tuple(setting.module(net()) for _ in range(2))
    samples = ((setting.randn(4, 8),), (setting.randn(4, 8),))
    hooks = {
        "pre_warmup": lambda: seen.append(len(log.calls)),
        "post_warmup": lambda: seen.append(len(log.calls)),
    }
    setting.graphed(
        modules, samples, warmup_hooks=hooks, capture_time_hooks=[log.hooks(), log.hooks()]
    )
    assert seen == [0, 2 * 3 * 4]
    with pytest.raises(ZeroDivisionError):
        setting.graphed(lambda x: x / (1 // 0), samples[0], warmup_hooks=hooks)
    assert len(seen) == 4  # what the first one set up is undone


@pytest.mark.parametrize("name", ITERATION)
def test_a_hook_that_returns_something_is_an_error(setting, name):
    module, x = setting.module(net()), setting.randn(4, 8)
    before = rng_state(setting.device)
    with pytest.raises(
        cgpass.errors.HookError,
        match=rf"the hook '{name}' returned a int\. .* return None",
    ):
        setting.graphed(
            module,
            (x,),
            capture_time_hooks=[{name: lambda *a: 1}],
        )
    same(rng_state(setting.device), before)
    assert all(p.grad is None for p in module.parameters())


@pytest.mark.parametrize(
    ("hooks", "message"),
    [
        (
            {"capture_time_hooks": {"forward": print}},
            "'capture_time_hooks' must be a list of None or",
        ),
        (
            {"capture_time_hooks": [{"fowrard": print}]},
            "some of the names pre_forward, forward, pre_b",
        ),
        ({"capture_time_hooks": [{"forward": 3}]}, r"must be a list .* got .*'forward': 3"),
        ({"capture_time_hooks": [[print]]}, "must be a list of None or functions in a dict"),
        (
            {"warmup_hooks": {"pre": print}},
            r"'warmup_hooks' must be .* pre_warmup, post_warmup, got",
        ),
        ({"warmup_hooks": [None]}, "'warmup_hooks' must be functions in a dict"),
    ],
)
def test_hooks_that_can_not_be(setting, hooks, message):
    with pytest.raises(cgpass.errors.OptionError, match=message):
        setting.graphed(setting.module(net()), (setting.randn(4, 8),), **hooks)


@pytest.mark.parametrize("number", [0, 2])
def test_hooks_that_are_not_as_many_as_callables(setting, number):
    message = f"capture_time_hooks has {number} entries for 1 callables"
    with pytest.raises(cgpass.errors.GraphedArgumentError, match=message):
        setting.graphed(torch.sin, (setting.randn(4),), capture_time_hooks=[None] * number)


def sharded(setting):
    """A module whose first layer's weight has memory only while it runs, and its twin."""
    return twins(setting, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()))


def by_data(weight, shard):
    """Unshards into other memory each time."""
    places = []  # none is freed, so none comes back

    def unshard(*args):
        if not weight.numel():
            weight.data = shard.clone()
            places.append(weight.data)

    def reshard(*args):
        weight.data = torch.empty(0, device=shard.device)

    return unshard, reshard


def by_storage(weight, shard):
    storage = weight.untyped_storage()
    size, fillers = storage.nbytes(), []  # which take what is freed, so that it doesn't come back

    def unshard(*args):
        if not storage.nbytes():
            storage.resize_(size)
            weight.data.copy_(shard)

    def reshard(*args):
        storage.resize_(0)
        fillers.append(torch.empty_like(shard))

    return unshard, reshard


@pytest.mark.parametrize("moves", [by_data, by_storage])
@pytest.mark.parametrize("between", [True, False])
def test_a_call_that_records_again_has_its_parameters_afterwards(setting, moves, between):
    """Hooks that free parameters run while it records, and what the user gathered for the call is there after it."""
    module, plain = sharded(setting)
    weight = module[0].weight
    unshard, reshard = moves(weight, weight.detach().clone())
    hooks = {"pre_forward": unshard, "backward": reshard}
    if between:
        hooks |= {"forward": reshard, "pre_backward": unshard}
    reshard()
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),), capture_time_hooks=[hooks])
    for _ in range(4):
        unshard()
        x = setting.randn(4, 8, grad=True)
        same(step(graphed, x)[0], step(plain, x)[0])
        same(weight, plain[0].weight)
        reshard()
        weight.grad = None


def test_parameters_that_hooks_put_elsewhere_after_a_reset(setting):
    """A recording reads where hooks had them; the call has its own."""
    module, plain = sharded(setting)
    weight = module[0].weight
    own = weight.data

    def elsewhere(*args):
        weight.data = own.clone()

    def free(*args):
        weight.data.zero_()  # as what comes to lie there would

    hooks = {"pre_forward": elsewhere, "backward": free}
    graphed = setting.graphed(module, (setting.randn(4, 8),), capture_time_hooks=[hooks])
    weight.data = own
    graphed.reset()
    for _ in range(2):
        for each in (module, plain):
            with torch.no_grad():
                each[0].weight.add_(1)
        x = setting.randn(4, 8)
        same(graphed(x), plain(x))
        assert weight.data_ptr() == own.data_ptr()
