"""Ways to use the storage under a result: hold it, enlarge it, empty it, share it."""

import pytest
import torch

from tests.usage.programs import MLP, assert_replays, state


def function(x):
    return (x.sin() * 2).cos(), x.exp() + 1


def contents(storage, device):
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage).clone()


def test_storages_are_held_and_the_tensors_dropped(way):
    def program(session):
        call = session.compile(function)
        kept = []
        for batch in session.batches(4, 8, count=8):
            kept.append(call(batch)[0].untyped_storage())
        return [contents(storage, session.device) for storage in kept]

    assert_replays(way.compare(program))


def test_gradients_storages_are_held(way):
    def program(session):
        module, call = session.compiled(MLP)
        kept = []
        for batch in session.batches(4, 8, count=8):
            call(batch).square().mean().backward()
            kept += [p.grad.untyped_storage() for p in module.parameters()]
            module.zero_grad()
        return [contents(storage, session.device) for storage in kept]

    assert_replays(way.compare(program))


def test_looking_at_storages_holds_nothing(way):
    def program(session):
        call = session.compile(function)
        for batch in session.batches(4, 8, count=30):
            assert {out.untyped_storage().nbytes() for out in call(batch)} == {128}
        return []

    counters = way.compare(program)
    assert_replays(counters)
    assert (counters["rescues"], counters["recordings"]) == (0, 1)


def enlarge(tensor):
    tensor.resize_(1000)[32:] = 3


def empty(tensor):
    tensor.untyped_storage().resize_(0)


def empty_and_fill(tensor):
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(128)
    tensor.fill_(5)


CHANGES = {
    "enlarged": enlarge,
    "emptied": empty,
    "emptied and filled": empty_and_fill,
    "shared": torch.Tensor.share_memory_,
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("held", [0, 1, 3], ids="{} held before".format)
def test_results_are_changed_in_size_and_place(way, change, held):
    def program(session):
        call = session.compile(function)
        values, kept = [], []
        for number, batch in enumerate(session.batches(4, 8, count=10)):
            first, second = call(batch)
            values += [first.clone(), second.clone()]
            if number < 3 + held:
                kept.append(first)
                continue
            CHANGES[change](first)
            if change != "emptied":
                values.append(first.clone())
                if number % 2:
                    kept.append(first)
        return values + kept

    assert_replays(way.compare(program))


def test_activations_are_emptied_and_filled_again_for_the_backward(way):
    def program(session):
        module, call = session.compiled(MLP)
        last = session.module(lambda: torch.nn.Linear(8, 8))
        values = []
        for batch in session.batches(4, 8, count=8):
            out = call(batch)
            loss = last(out).square().mean()
            kept = out.detach().clone()
            out.untyped_storage().resize_(0)
            out.untyped_storage().resize_(kept.untyped_storage().nbytes())
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(kept)
            loss.backward()
            values += [loss.detach(), *(p.grad.clone() for p in module.parameters())]
            module.zero_grad()
        return values + state(module)

    assert_replays(way.compare(program))


def empties_what_it_read(x, w):
    y = (x * 2).sin() + x.cos()
    x.untyped_storage().resize_(0)
    return (y + w).sin() + w.cos()


def replaces_what_it_empties(x, w):
    x.untyped_storage().resize_(0)
    with torch.no_grad():
        x.set_(torch.ones(2, device=x.device))
    return w.sin() * 2 + w.cos()


@pytest.mark.parametrize("fn", [empties_what_it_read, replaces_what_it_empties])
def test_an_argument_is_emptied_inside(way, fn):
    """By an operator that no graph can hold, and whose schema does not say that it writes."""

    def program(session):
        call = session.compile(fn)
        values = []
        for batch in session.batches(4, 8, count=5):
            given = batch.clone()
            out = call(given, batch + 1)
            values += [out.clone(), torch.tensor(given.untyped_storage().nbytes())]
        return values

    assert_replays(way.compare(program))


def with_an_empty_result(x):
    return (x.sin() * 2).cos() + 1, torch.empty(0, device=x.device)


@pytest.mark.parametrize("outputs", ["shared", "owned"])
def test_empty_results_are_enlarged(way, outputs):
    """As where a tensor is made in one graph, and is an operator's `out=` in the next."""

    def program(session):
        call = session.compile(with_an_empty_result)
        kept = []
        for batch in session.batches(4, 8, count=8):
            first, out = call(batch)
            torch.exp(batch, out=out)
            kept += [first, out]
        return kept

    assert_replays(way.compare(program, outputs=outputs))
