"""Recomputation inside graphed callables, and layers graphed by hand trained as eager trains them."""

import contextlib
import functools
import gc
import types
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint as torchs
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import cgpass
from tests.generators import rng_state
from tests.graphed.steps import Layer, check, same, twins
from tests.recompute.steps import tracker_of

WAYS = {
    "none": None,
    "ours": cgpass.checkpoint,
    "ours reentrant": functools.partial(cgpass.checkpoint, use_reentrant=True),
}


@pytest.fixture(autouse=True)
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def twins_of_layers(setting, way, count=4):
    """A model whose layers are graphed, its twin, and the graphs."""
    layers = (Layer(dropout=0.3, checkpoint=WAYS[way]) for _ in range(count))
    model, plain = twins(setting, torch.nn.Sequential(*layers, torch.nn.Linear(8, 8)))
    samples = tuple((setting.randn(2, 4, 8, grad=True),) for _ in range(count))
    graphed = setting.graphed(tuple(model[:count]), samples)
    for number, layer in enumerate(graphed):
        model[number] = layer
    return model, plain, [layer.graphed for layer in graphed]


@pytest.mark.parametrize("way", WAYS)
def test_a_transformer_trained_as_eager_does(setting, way):
    model, plain, graphs = twins_of_layers(setting, way)
    losses = []
    for each in (model, plain):
        torch.manual_seed(5)
        optimizer = torch.optim.AdamW(each.parameters(), lr=1e-2)
        found = []
        for number in range(20 if setting.device.type == "cuda" else 9):
            for _ in range(1 + number % 3):  # microbatches
                x = setting.randn(2, 4, 8, grad=True)
                loss = F.mse_loss(each(x), x.detach().roll(1, -1))
                loss.backward()
                found.append(loss.detach())
            found += [p.grad.clone() for p in each.parameters()]
            optimizer.step()
            optimizer.zero_grad()
        losses.append([*found, *(p.detach() for p in each.parameters()), rng_state(setting.device)])
    same(*losses)
    assert {g.stats.plain_calls for g in graphs} == {0}
    assert {g.stats.recordings for g in graphs} == {2}
    assert losses[0][-2].isfinite().all()


class _Remembers(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, module):
        ctx.module = module
        return module.out(x)

    @staticmethod
    def backward(ctx, grad):
        return grad @ ctx.module.out.weight, None


WAYS_TO_HOLD = {
    "function": lambda module, x: _Remembers.apply(x, module),
    "checkpoint": lambda module, x: cgpass.checkpoint(module.feed, x),
}


@pytest.mark.parametrize("way", WAYS_TO_HOLD)
def test_what_a_graph_keeps_of_a_module_does_not_keep_the_graph(setting, way):
    """C++ holds the graph of a recording, where no garbage collector looks."""

    class Holder(Layer):
        def forward(self, x):
            return WAYS_TO_HOLD[way](self, x)

    module = setting.module(Holder())
    graphed = setting.graphed(module, (setting.randn(2, 4, 8, grad=True),))
    graphed.me = [graphed.graphed.stats]
    outs = [graphed(setting.randn(2, 4, 8, grad=True)) for _ in range(2)]
    for out in outs:
        out.sum().backward()
    gone = weakref.ref(graphed), weakref.ref(graphed.graphed), weakref.ref(module)
    del module, graphed, out, outs
    gc.collect()
    assert [ref() for ref in gone] == [None, None, None]


def trackers_of(setting):
    return [tracker_of(setting.device, a=3) for _ in range(2)]


def test_a_tracker_of_states(setting):
    def build(tracker):
        def inner(x):
            with tracker.fork("a"):
                x = F.dropout(x, 0.4)
            return F.dropout(x.sin(), 0.2)

        return lambda x: cgpass.checkpoint(inner, x, rng_tracker=tracker).cos()

    ours, others = trackers = trackers_of(setting)
    graphed = setting.graphed(build(ours), (setting.randn(4, 8, grad=True),), rng_tracker=ours)
    check(setting, graphed, build(others), 3)
    same(*([each.get_state() for each in t.generators.values()] for t in trackers))


@pytest.mark.parametrize("reentrant", [False, True])
def test_torchs_checkpoints_are_refused(setting, reentrant):
    def forward(x):
        return torchs(torch.sin, x, use_reentrant=reentrant, preserve_rng_state=False).cos()

    match = "forward uses torch.utils.checkpoint, .* Use cgpass.checkpoint"
    with pytest.raises(cgpass.errors.GraphedArgumentError, match=match):
        setting.graphed(forward, (setting.randn(4, grad=True),))


def drawing(setting, x):
    """Trackers and functions that draw in their forks, the first of them graphed."""

    def draws(tracker):
        def fn(x):
            with tracker.fork("a"):
                return F.dropout(x, 0.5)

        return fn

    trackers = trackers_of(setting)
    graphed = setting.graphed(draws(trackers[0]), (x,), rng_tracker=trackers[0])
    return trackers, (graphed, draws(trackers[1]))


def test_a_call_inside_of_the_fork_that_it_has_inside(setting, caplog):
    x = setting.randn(4, 8, grad=True)
    trackers, fns = drawing(setting, x)
    for inside in (False, True, False):
        found = []
        for fn, tracker in zip(fns, trackers, strict=True):
            torch.manual_seed(5)
            with tracker.fork("a") if inside else contextlib.nullcontext():
                found.append((fn(x), torch.rand(3, device=setting.device)))
        same(*found)
    assert caplog.text.count("the fork of its rng_tracker, is another") == 1


def test_states_that_replace_those_of_a_tracker(setting, caplog):
    """As Megatron does to seed a training anew."""
    x = setting.randn(4, 8, grad=True)
    trackers, fns = drawing(setting, x)
    for change in ("", "replaced", "reset"):
        for tracker in trackers if change == "replaced" else ():
            tracker.reset()
            tracker.add("a", 7)
        if change == "reset":
            fns[0].reset()
        same(fns[0](x), fns[1](x))
        same(*(tracker.generators["a"].get_state() for tracker in trackers))
    assert caplog.text.count("states of its rng_tracker were replaced") == 1
    assert (fns[0].stats.plain_calls, fns[0].stats.replays) == (1, 2)


def test_each_backward_rewinds_to_its_own_forward(setting):
    x = setting.randn(4, grad=True)
    graphed = setting.graphed(torch.sin, (x,))
    ((pair,),) = graphed._pairs.values()
    positions, rewound = iter(range(3)), []
    pair._states = types.SimpleNamespace(
        recorded=True, position=lambda: next(positions), rewind=rewound.append
    )
    for _ in range(3):
        out = graphed(x)
        out.sum().backward(retain_graph=True)
        out.sum().backward()
    assert rewound == [0, 0, 1, 1, 2, 2]


def test_a_selective_checkpoint_whose_graph_is_lost(setting):
    """Torch allows one recomputation, and the recording made it."""
    policy = [torch.ops.aten.mm.default]
    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    layer = setting.module(torch.nn.Linear(4, 4))

    def fn(x):
        return cgpass.checkpoint(lambda h: layer(h).sin(), x, context_fn=contexts)

    graphed = setting.graphed(fn, (setting.randn(3, 4, grad=True),), modules=(layer,))
    out = graphed(setting.randn(3, 4))
    out.sum().backward(retain_graph=True)
    with pytest.raises(
        cgpass.errors.GraphedBackwardError, match=r"a second backward .* lets go of what it needs"
    ):
        out.sum().backward()
    out = graphed(setting.randn(3, 4))
    graphed.reset()
    with pytest.raises(cgpass.errors.GraphedBackwardError, match="its graphs were freed between"):
        out.sum().backward()
    x = setting.randn(3, 4)
    same(graphed(x), fn(x))
