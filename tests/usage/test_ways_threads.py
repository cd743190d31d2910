"""Several threads call one compiled function, and read what others called for."""

import queue
import threading

import torch

from tests.usage.programs import MLP, counted


def in_threads(*functions):
    threads = [threading.Thread(target=function) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_from_the_second_thread_on_results_are_copies(way):
    session = way.session()
    module, call = session.compiled(MLP)
    batches = session.batches(4, 8, count=12)
    results = {}

    def work(first):
        with torch.no_grad():
            for i in range(first, len(batches), 3):
                results[i] = call(batches[i])

    work(0)
    held = dict(results)
    in_threads(lambda: work(1), lambda: work(2))
    with counted() as counters:
        work(0)
    for i, batch in enumerate(batches):
        with torch.no_grad():
            assert torch.equal(results[i], module(batch))
    for i, result in held.items():
        assert torch.equal(result, results[i])
    assert counters["rescues"] == 0
    assert counters["replays"] == 4


def test_calls_of_one_thread_are_not_copied_though_backwards_run_on_another(way):
    session = way.session()
    _, call = session.compiled(MLP)
    batches = session.batches(4, 8, count=8)

    def copied_bytes(backward):
        with counted() as counters:
            for batch in batches:
                backward(call(batch).sum())
        return counters["copied_bytes"]

    copied_bytes(torch.Tensor.backward)
    here = copied_bytes(torch.Tensor.backward)
    assert copied_bytes(lambda loss: in_threads(loss.backward)) == here > 0


def test_one_thread_calls_and_another_reads(way):
    def program(session):
        _, call = session.compiled(MLP)
        batches, made, values = session.batches(4, 8, count=16), queue.Queue(2), []

        def produce():
            with torch.no_grad():
                for batch in batches:
                    made.put(call(batch))
            made.put(None)

        def consume():
            while (result := made.get()) is not None:
                values.append(result * 2)

        in_threads(produce, consume)
        return values

    assert way.compare(program)["plain_calls"] == 0


def test_training_steps_take_turns_between_threads(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(4, 8, count=9):

            def step(batch=batch, values=values):
                out = call(batch)
                out.square().mean().backward()
                values.append(out.detach())

            in_threads(step)
            values += [p.grad.clone() for p in module.parameters()]
        return values

    counters = way.compare(program)
    assert counters["replays"] > 0


def test_from_the_second_thread_on_gradients_are_copies(way):
    session = way.session()
    module, call = session.compiled(MLP)
    batches = session.batches(4, 8, count=12)
    parameters = list(module.parameters())
    held = {}

    def work(first):
        for i in range(first, len(batches), 2):
            held[i] = torch.autograd.grad(call(batches[i]).square().mean(), parameters)

    work(0)
    in_threads(lambda: work(1))
    work(0)
    kept, before = dict(held), {i: [g.data_ptr() for g in grads] for i, grads in held.items()}
    with counted() as counters:
        in_threads(lambda: work(1))
        work(0)
    assert counters["rescues"] == 0, "nobody's gradients move"
    assert counters["replays"] == 24
    for i, grads in kept.items():
        assert [g.data_ptr() for g in grads] == before[i]
        plain = torch.autograd.grad(module(batches[i]).square().mean(), parameters)
        torch.testing.assert_close(grads, plain)


def test_a_second_thread_comes_while_a_backward_is_pending(way):
    """What the first one holds stays where it lies, though saved tensors could not be moved."""
    session = way.session()
    module, call = session.compiled(MLP)
    batches = session.batches(4, 8, count=8)
    for batch in batches[:3]:
        call(batch).square().mean().backward()
    module.zero_grad()
    pending = call(batches[3])
    with torch.no_grad():
        outs = [call(batch) for batch in batches[4:]]
    before = [out.data_ptr() for out in outs]
    with counted() as counters:
        for batch in batches:
            in_threads(lambda batch=batch: call(batch).square().mean())
    assert counters["rescues"] == 0
    assert [out.data_ptr() for out in outs] == before
    pending.square().mean().backward()
    grads = [p.grad.clone() for p in module.parameters()]
    module.zero_grad()
    module(batches[3]).square().mean().backward()
    torch.testing.assert_close(grads, [p.grad for p in module.parameters()])
    for out, batch in zip(outs, batches[4:], strict=True):
        torch.testing.assert_close(out, module(batch))
