"""Graphed modules: their freeing and counts; threads, streams, compiled callables."""

import copy
import functools
import gc
import pickle
import threading
import weakref
from collections import Counter

import pytest
import torch

import cgpass
from cgpass.runtime.owner import release_all
from tests.graphed.steps import Layer, check, graphed_twins, net, same, same_grads, twins
from tests.usage.programs import in_threads


def test_the_module_given_is_left_alone(setting):
    module = setting.module(net())
    before = dict(vars(module))
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    assert dict(vars(module)) == before
    assert isinstance(graphed, type(module))
    assert graphed is not module
    assert list(graphed.state_dict()) == list(module.state_dict())
    for a, b in zip(graphed.parameters(), module.parameters(), strict=True):
        assert a is b
    graphed.eval()
    assert module.training
    holder = torch.nn.Module()
    holder.layer = module
    holder.layer = graphed
    assert len(list(holder.parameters())) == 4


def test_dropping_the_callable_frees_everything(setting):
    module = setting.module(net())
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    out = graphed(setting.randn(4, 8))
    expected = out.detach().clone()
    refs = [weakref.ref(graphed.graphed), weakref.ref(graphed.graphed._owner)]
    parameters = list(module.parameters())
    del graphed, module
    gc.collect()
    same(out, expected)
    out.sum().backward()  # keeps its graphs as long as it needs them
    del out
    gc.collect()
    assert all(ref() is None for ref in refs)
    assert parameters[0].grad is not None


@pytest.mark.parametrize("reset", [lambda graphed: graphed.reset(), lambda _: release_all()])
def test_reset_frees_graphs_and_the_next_call_records_again(setting, reset):
    module, plain = twins(setting, net())
    counts = []
    hooks = {"forward": lambda *args: counts.append(1)}
    graphed = setting.graphed(module, (setting.randn(4, 8),), capture_time_hooks=[hooks])
    x = setting.randn(4, 8)
    held = graphed(x).detach()
    expected = held.clone()
    pending = graphed(x)
    reset(graphed)
    assert not graphed.graphed._pairs
    same(held, expected)
    pending.square().sum().backward()  # without a graph
    plain(x).square().sum().backward()
    same_grads(module, plain)
    check(setting, graphed, plain, 2, grad=False)
    same(held, expected)
    assert len(counts) == 4 + 2
    assert graphed.graphed.stats.recordings == 4


def test_close_is_for_good(setting):
    modules = [twins(setting, net()) for _ in range(2)]
    graphed = setting.graphed(
        tuple(m for m, _ in modules), ((setting.randn(4, 8),), (setting.randn(4, 8),))
    )
    graphed[0].close()
    graphed[0].close()
    for fn, (_, plain) in zip(graphed, modules, strict=True):
        check(setting, fn, plain, grad=False)
    assert [fn.graphed.stats.plain_calls for fn in graphed] == [1, 0]


def test_inside_of_a_compiled_function(setting):
    graphed, _, plain = graphed_twins(setting, net())

    @torch.compile(backend="aot_eager")
    def fn(layer, x):
        return layer(x.sin()).cos()

    for _ in range(2):
        x = setting.randn(4, 8, grad=True)
        same(fn(graphed, x), plain(x.sin()).cos())
    assert graphed.graphed.stats.replays >= 2
    torch.compiler.reset()


def test_what_several_threads_get_is_no_memory_that_moves(setting):
    graphed, module, plain = graphed_twins(setting, net())
    owner, x = graphed.graphed._owner, setting.randn(4, 8, grad=True)
    first = graphed(x)
    others = []
    in_threads(lambda: others.append(graphed(x)))
    same(others[0], plain(x))
    second = graphed(x)
    assert owner.copies_results
    assert not owner.is_pool_storage(second)
    # a sum alone has an expanded gradient, which graphs get dense: cuBLAS has other kernels for it
    (first + second).square().sum().backward()
    (plain(x) + plain(x)).square().sum().backward()
    same_grads(module, plain)
    assert not any(owner.is_pool_storage(p.grad) for p in module.parameters())


def test_threads_that_go_backward_at_once(setting):
    """Captures run a backward of their own, and autograd has one thread for all that a device does."""
    graphed, _, plain = graphed_twins(setting, net())
    inputs = [[setting.randn(4, 8, grad=True) for _ in range(6)] for _ in range(3)]
    start, found = threading.Barrier(3), {}

    def work():
        number = start.wait()
        found[number] = []
        for x in inputs[number]:
            out = graphed(x)
            found[number].append((out.detach(), *torch.autograd.grad(out.square().sum(), x)))

    in_threads(work, work, work)
    for number, results in found.items():
        for x, (out, grad) in zip(inputs[number], results, strict=True):
            expected = plain(x)
            same(out, expected)
            same(grad, *torch.autograd.grad(expected.square().sum(), x))


@pytest.mark.gpu
def test_a_side_stream():
    device = torch.device("cuda", 0)
    layer = Layer().to(device)
    plain = copy.deepcopy(layer)
    stream, own = torch.cuda.Stream(), torch.cuda.Stream()
    options = cgpass.GraphedOptions(stream=own, pool=torch.cuda.graph_pool_handle())
    with torch.cuda.stream(stream):
        x = torch.randn(2, 4, 8, device=device, requires_grad=True)
        graphed = cgpass.make_graphed_callables(layer, (x,), options=options)
    for number in range(4):
        x = torch.randn(2, 4, 8, device=device)
        if number % 2:
            torch.cuda.current_stream().wait_stream(stream)
            same(graphed(x), plain(x))
        else:
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                same(graphed(x), plain(x))


@pytest.mark.gpu
def test_inside_a_capture_of_the_users():
    device = torch.device("cuda", 0)
    layer = Layer().to(device)
    x = torch.randn(2, 4, 8, device=device)
    graphed = cgpass.make_graphed_callables(layer, (x.clone(),))
    expected = layer(x)
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        out = graphed(x)
    graph.replay()
    same(out, expected)
    assert graphed.graphed.stats.plain_calls == 1


class Doubled:
    """A `forward` over a module's, as accelerate's hooks do."""

    def __init__(self, module):
        module.kept_forward = module.forward
        module.forward = functools.partial(Doubled.forward, module)

    @staticmethod
    def forward(module, x):
        return module.kept_forward(x) * 2


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
@pytest.mark.parametrize("before", [True, False])
def test_copies_keep_what_was_put_over_a_forward(setting, copied, before):
    module, x = setting.module(torch.nn.Linear(4, 4)), setting.randn(2, 4)
    if before:
        Doubled(module)
    graphed = setting.graphed(module, (x,))
    if not before:
        Doubled(graphed)
    other = copied(graphed)
    expected = graphed(x).detach().clone()
    same(other(x), expected)
    with torch.no_grad():
        graphed.weight.zero_()
    same(other(x), expected)  # of its own weights
    assert not hasattr(other, "graphed")


def ours():
    """Counts of the objects of each of our classes."""
    gc.collect()
    kinds = [type(each) for each in gc.get_objects()]
    return Counter(kind.__qualname__ for kind in kinds if kind.__module__.startswith("cgpass."))


def in_use(device):
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def again(setting, graphed, plain):
    graphed.reset()
    check(setting, graphed, plain, 2, grad=False)


def test_resets_leave_nothing_behind(setting):
    graphed, _, plain = graphed_twins(setting, net(), grad=False)
    again(setting, graphed, plain)
    before, memory = ours(), in_use(setting.device)
    for _ in range(5):
        again(setting, graphed, plain)
    assert not ours() - before  # it may have less: what other tests left goes when it likes
    assert in_use(setting.device) <= memory


class Named(torch.nn.Linear):
    pass


def listed():
    return [line for line in cgpass.summary().splitlines() if "Named" in line]


def test_the_summary_lists_graphed_callables(setting):
    module, x = setting.module(Named(8, 8)), setting.randn(4, 8)
    graphed = setting.graphed((module, torch.sin), ((x,), (x,)))
    for each in graphed:
        each(x)
    graphed[0].eval()(x)
    assert listed() == [
        "callable 0 (Named), graphed by hand: 2 recordings, 2 calls, 1 of them without a graph",
        "  1 without a graph: the mode of Named changed since it was recorded (reset() makes it record again)",
    ]
    cgpass.reset()
    assert listed() == []
