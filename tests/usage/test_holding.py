"""What you hold stays yours: outputs, gradients, storages and views of them keep their values."""

import pytest
import torch
from torch import nn

from tests.operators import tagged
from tests.usage.programs import MLP, Ways, assert_replays, assert_steady, gradients, learn, noting

ways = Ways()


def held_outputs(session):
    """Outputs, views of them and gradients are kept over all later calls."""
    module, call = session.compiled(MLP)
    held, kept = [], []
    for batch in session.batches(4, 8):
        out = call(batch)
        out.square().mean().backward()
        held += [out.detach(), out.detach()[1:]]
        held += [parameter.grad for parameter in module.parameters()]
        kept.append(out)
        module.zero_grad(set_to_none=True)
    return held


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_outputs_and_gradients_stay(setting, compiler):
    counters = setting.compare(held_outputs, compiler=compiler)
    assert_replays(counters)
    assert (counters["partitions_captured"], counters["rerecordings"]) == (2, 0), counters
    # gradients that are kept over a forward get a pool of their own: one recording more
    assert 2 <= counters["recordings"] <= 5, counters
    assert 0 < counters["rescues"] <= 2 * counters["calls"], "what is held is moved once"


@pytest.mark.parametrize("set_to_none", [True, False])
def test_gradient_accumulation(setting, set_to_none):
    def program(session):
        module, call = session.compiled(MLP)
        batches = iter(session.batches(4, 8, count=20))
        for four in zip(*[batches] * 4, strict=True):
            for batch in four:
                (call(batch).square().mean() / 4).backward()
            yield gradients(module)
            module.zero_grad(set_to_none=set_to_none)

    cycles = []
    counters = setting.compare(noting(program, setting.driver, cycles))
    assert_steady(counters, captured=2, recordings=2 + set_to_none)
    most = [1] * 5 if set_to_none else [1, 0, 0, 0, 0]
    rescues = [cycle["rescues"] for cycle in cycles]
    assert all(a <= b for a, b in zip(rescues, most, strict=True)), rescues


@ways()
def outputs_that_are_inputs_parameters_and_views_of_them(session):
    module = session.module(MLP)

    def fn(x):
        weight = module.layers[0].weight
        return x, x[1:], weight, weight.t(), module(x)

    call = session.compile(fn)
    for batch in session.batches(4, 8):
        same, part, weight, turned, out = call(batch)
        assert same is batch
        assert weight is module.layers[0].weight
        assert turned.data_ptr() == weight.data_ptr()
        assert part.data_ptr() == batch[1:].data_ptr()
        learned = learn(module, out.square().mean() + turned.sum())
        yield [same, part.clone(), turned.detach().clone(), out.detach(), *learned]
        with torch.no_grad():
            turned.add_(0.1)


def function(x):
    return (x.sin() * 2).cos(), x.exp() + 1


@ways()
def storages_are_held_and_the_tensors_dropped(session):
    call = session.compile(function)
    kept = [call(batch)[0].untyped_storage() for batch in session.batches(4, 8, count=8)]
    empty = torch.empty(0, dtype=torch.uint8, device=session.device)
    return [empty.set_(storage).clone() for storage in kept]


@ways(counts={"rescues": 0, "recordings": 1})
def looking_at_storages_holds_nothing(session):
    call = session.compile(function)
    for batch in session.batches(4, 8, count=30):
        assert {out.untyped_storage().nbytes() for out in call(batch)} == {128}
    return []


@ways()
def activations_are_emptied_and_filled_again_for_the_backward(session):
    module, call = session.compiled(MLP)
    last = session.module(lambda: nn.Linear(8, 8))
    for batch in session.batches(4, 8, count=8):
        out = call(batch)
        loss = last(out).square().mean()
        kept = out.detach().clone()
        out.untyped_storage().resize_(0)
        out.untyped_storage().resize_(kept.untyped_storage().nbytes())
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
            out.copy_(kept)
        yield learn(module, loss)


def changed_in_size_and_place(change, held):
    def program(session):
        call = session.compile(function)
        kept = []
        for number, batch in enumerate(session.batches(4, 8, count=10)):
            first, second = call(batch)
            yield [first.clone(), second.clone()]
            if number < 3 + held:
                kept.append(first)
                continue
            change(first)
            if change is not empty:
                yield [first.clone()]
                kept += [first] * (number % 2)
        yield kept

    return program


def enlarge(tensor):
    tensor.resize_(1000)[32:] = 3


def empty(tensor):
    tensor.untyped_storage().resize_(0)


def empty_and_fill(tensor):
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(128)
    tensor.fill_(5)


ways.add(
    {
        f"{change.__name__}, {held} held before": changed_in_size_and_place(change, held)
        for change in (enlarge, empty, empty_and_fill, torch.Tensor.share_memory_)
        for held in (0, 3)
    }
)


@ways()
def an_argument_emptied_inside(session):
    """By an operator that no graph can hold, and whose schema does not say that it writes."""

    def fn(x, w):
        y = (x * 2).sin() + x.cos()
        x.untyped_storage().resize_(0)
        return (y + w).sin() + w.cos()

    call = session.compile(fn)
    for batch in session.batches(4, 8, count=5):
        given = batch.clone()
        yield [call(given, batch + 1).clone(), given.untyped_storage().nbytes()]


def empty_results_are_enlarged(session):
    """As where a tensor is made in one graph, and is an operator's `out=` in the next."""
    call = session.compile(lambda x: ((x.sin() * 2).cos() + 1, torch.empty(0, device=x.device)))
    for batch in session.batches(4, 8, count=8):
        first, out = call(batch)
        torch.exp(batch, out=out)
        yield [first, out]


def output_and_later_part(x):
    y = (x * 2).sin().cos() + 1
    z = tagged(y)
    part = y[1:]
    return y, part, (part * z[1:]).sin().cos().tanh()


def part_and_later_whole(x):
    base = (x * 2).sin().cos() + 1
    z = tagged(base)
    whole = base.view(-1)
    return base[1:], whole, (whole.view(x.shape) * z).sin().cos().tanh()


def parts_of_what_is_not_returned(x):
    base = (x * 2).sin().cos() + 1
    z = tagged(base)
    return base[1:], base[:2], (base * z).sin().cos().tanh()


FUNCTIONS = [output_and_later_part, part_and_later_whole, parts_of_what_is_not_returned]


def shared_in_every_call(fn):
    def program(session):
        call = session.compile(fn)
        held = []
        with torch.no_grad():
            for batch in session.batches(3, 3, count=10):
                first, second, third = call(batch)
                same = first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()
                before = second.clone()
                first.add_(1)
                held = [*held[-1:], (first, second, third)]
                yield [same, second - before, *(t.clone() for tensors in held for t in tensors)]

    return program


class Remembers(torch.autograd.Function):
    """Its gradient is the very tensor that its forward saved."""

    @staticmethod
    def forward(ctx, x):
        y = x.sin() * 2 + 1
        ctx.save_for_backward(y)
        return y.cos()

    @staticmethod
    def backward(ctx, grad):
        (y,) = ctx.saved_tensors
        return y


def a_gradient_that_is_a_saved_tensor_is_kept(session):
    call = session.compile(lambda x: Remembers.apply(x + 1).exp().sin())
    for batch in session.batches(3, 3, count=8):
        x = batch.requires_grad_()
        yield torch.autograd.grad(call(x).sum(), x)


BOTH = {
    "empty_results_are_enlarged": empty_results_are_enlarged,
    "a_gradient_that_is_a_saved_tensor_is_kept": a_gradient_that_is_a_saved_tensor_is_kept,
    **{fn.__name__: shared_in_every_call(fn) for fn in FUNCTIONS},
}
for outputs in ("shared", "owned"):
    named = {f"{name}-{outputs}": program for name, program in BOTH.items()}
    ways.add(named, outputs=outputs, min_partition_ops=1)


# torch 2.11 instantiates the class of a function while it traces it
@pytest.mark.filterwarnings("ignore:.*should not be instantiated")
@ways.everywhere
def test_ways_to_hold(way, program):
    program.check(way)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_owned_outputs_never_lie_in_the_pool(setting, fn):
    """Whoever shares memory beyond torch's count of holders is not overwritten either."""
    call = setting.session(outputs="owned", min_partition_ops=1).compile(fn)
    kept = []
    with torch.no_grad():
        for batch in setting.session().batches(3, 3, count=8):
            tensors = call(batch)
            kept.append(([torch.from_dlpack(t) for t in tensors], [t.clone() for t in tensors]))
            del tensors
    for views, expected in kept:
        assert all(map(torch.equal, views, expected))


@pytest.mark.parametrize("of_what_came_in", [False, True])
def test_gradients_that_are_views_of_each_other_lie_apart(way, of_what_came_in):
    """An addition to one in place changes no other."""
    session = way.session()
    a, b, c = (
        nn.Parameter(torch.zeros(*size, device=session.device)) for size in ((2, 4), (2, 4), (4, 2))
    )
    incoming = torch.ones(4, 2, device=session.device)
    if of_what_came_in:
        leaves, sums, call = (a, c), 2.0, session.compile(lambda: a.t() + c)
    else:
        leaves, sums = (a, b, c), 4.0
        call = session.compile(lambda: ((a + b).view(4, 2) + c) * 2)
    for _ in range(2):
        for each in leaves:
            each.grad = None
        for _ in range(2):
            call().backward(incoming)
    assert [each.grad.unique().tolist() for each in leaves] == [[sums]] * len(leaves)
    assert len({each.grad.data_ptr() for each in leaves}) == len(leaves)
    assert incoming.unique().tolist() == [1.0]
