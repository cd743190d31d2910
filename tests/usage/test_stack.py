"""It works in your stack: optimizers, layers that share code, threads, transforms of torch, a mixture of experts."""

import functools
import itertools
import threading

import pytest
import torch
from benchlib.models import SPECS
from torch import nn
from torch.autograd import forward_ad

import cgpass
from cgpass.errors import InputError
from cgpass.runtime import owner as owners
from tests.usage.programs import (
    MLP,
    Block,
    Checkpointed,
    Ways,
    assert_replays,
    counted,
    gradients,
    in_threads,
    runners,
    sgd,
    sgd_step,
    state,
)

# what torch says in any thread that begins with a matrix product
pytestmark = pytest.mark.filterwarnings("ignore:Attempting to run cuBLAS")

ways = Ways()


@ways()
def a_gradient_scaler_that_skips_steps(session):
    """Two steps whose gradients are not finite are skipped, and the scale falls."""
    module, call = session.compiled(MLP)
    optimizer = sgd(module)
    scaler = torch.amp.GradScaler(session.device.type, init_scale=1024.0, growth_interval=2)
    values = []
    for number, batch in enumerate(session.batches(4, 8, count=10)):
        if number in (3, 6):
            batch[0, 0] = float("inf")
        optimizer.zero_grad()
        with torch.autocast(session.device.type, torch.bfloat16):
            out = call(batch)
            loss = out.float().square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        values.append(nn.utils.clip_grad_norm_(module.parameters(), 1.0))
        scaler.step(optimizer)
        scaler.update()
        values += [out.detach(), scaler.get_scale()]
    scales = [value for value in values if isinstance(value, float)]
    assert any(after < before for before, after in itertools.pairwise(scales))
    return values + state(module)


@ways(replays="some", on_skip="silent")
def a_compiled_optimizer_step(session):
    """Its rate falls, and is a tensor."""
    module, call = session.compiled(MLP)
    optimizer = torch.optim.AdamW(module.parameters(), lr=session.tensor(0.1))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    step = session.compile(optimizer.step)
    for number, batch in enumerate(session.batches(4, 8, count=8)):
        call(batch).square().mean().backward()
        step()
        optimizer.zero_grad(set_to_none=number % 2 == 0)
        schedule.step()
        yield state(module)
    moments = [each for kept in optimizer.state.values() for each in kept.values()]
    yield [moment for moment in moments if isinstance(moment, torch.Tensor)]


@ways.everywhere
def test_ways_to_train(way, program):
    program.check(way)


@pytest.mark.parametrize("training", [False, True])
def test_layers_that_share_code_have_no_placeholders_for_weights(way, training):
    """In their first calls neither."""
    copied, inputs = [], []

    def program(session):
        others = runners()
        layers = session.module(lambda: nn.ModuleList(MLP(16, 1) for _ in range(80)))
        calls = [session.compile(layer) for layer in layers]
        for _ in range(6):
            x = session.randn(4, 16)
            with counted() as counters:
                with torch.set_grad_enabled(training):
                    for call in calls:
                        x = call(x)
                    loss = x.square().mean()
                if training:
                    loss.backward()
                    yield gradients(layers)
                    layers.zero_grad()
            yield [loss.detach()]
            if session.options["driver"] == way.driver:
                copied.append((counters["copied_bytes"], counters["replays"]))
        for runner in runners(others):
            for recording in runner.table.all():
                inputs.append({*recording.copied_inputs} & {*runner.layout.checked})

    counters = way.compare(program)
    assert copied[-1][1] == 80 * (1 + training), copied
    for num_bytes, replays in copied:  # a layer's input and its gradient, never 16 x 16 weights
        assert num_bytes <= replays * 2 * 4 * 16 * 4, copied
    assert not any(inputs), inputs
    assert counters["recordings"] == 80 * (1 + training), counters


def dropping():
    return nn.Sequential(MLP(), nn.Dropout(0.5))


@pytest.mark.parametrize("make", [dropping, lambda: Checkpointed(dropping)])
def test_compiled_autograd(setting, make):
    def program(session):
        module = session.module(make)

        def step(x):
            loss = module(x).square().mean()
            loss.backward()
            return loss.detach()

        call = session.compile(step)
        with torch._dynamo.config.patch(compiled_autograd=True):
            for x in session.batches(4, 8, count=6):
                yield [call(x).clone(), *gradients(module)]
                module.zero_grad()

    counters = setting.compare(program, on_skip="silent")
    assert counters["replays"] > 0


@pytest.mark.parametrize(
    ("compiler", "outputs"), [("eager", "shared"), ("inductor", "shared"), ("eager", "owned")]
)
def test_calls_from_several_threads(setting, compiler, outputs):
    def program(session):
        _, call = session.compiled(MLP)
        batches = session.batches(4, 8, count=32)
        with torch.no_grad():
            call(batches[0])
            call(batches[0])
        results = [None] * len(batches)

        def work(first):
            # on a stream of its own where there are streams
            stream = torch.cuda.Stream() if session.device.type == "cuda" else None
            with torch.no_grad(), torch.cuda.stream(stream):
                for i in range(first, len(batches), 4):
                    results[i] = call(batches[i])
                if stream is not None:
                    stream.synchronize()

        if session.device.type == "cuda":
            torch.cuda.synchronize()
        in_threads(*(functools.partial(work, i) for i in range(4)))
        return results

    counters = setting.compare(program, compiler=compiler, outputs=outputs)
    assert counters["replays"] >= 32
    assert counters["plain_calls"] == 0
    assert counters["recordings"] == (1 if outputs == "owned" else 2)


@pytest.mark.parametrize("first", [True, False])
def test_backwards_run_in_the_calling_thread_or_in_autograds(way, first):
    def program(session):
        module, call = session.compiled(lambda: Block(dropout=0.1))
        for number, batch in enumerate(session.batches(2, 4, 16, count=9)):
            # first recorded in one of them, then in turn
            own = first if number < 4 else number % 2 == 0
            with torch.autograd.set_multithreading_enabled(own):
                yield sgd_step(module, call, batch)

    counters = way.compare(program)
    assert_replays(counters)
    assert counters["recordings"] == 2


def test_training_steps_take_turns_between_threads(way):
    def program(session):
        module, call = session.compiled(MLP)
        for batch in session.batches(4, 8, count=9):
            outs = []

            def step(batch=batch, outs=outs):
                outs.append(call(batch))
                outs[0].square().mean().backward()

            in_threads(step)
            yield [outs[0].detach(), *gradients(module)]

    counters = way.compare(program)
    assert counters["replays"] > 0


def test_from_the_second_thread_on_gradients_are_copies(way):
    session = way.session()
    others = set(owners._owners)
    module, call = session.compiled(MLP)
    batches = session.batches(4, 8, count=12)
    parameters = list(module.parameters())

    def work(first):
        """Steps whose gradients are dropped; whether each step's lay in the pool."""
        found = []
        for batch in batches[first::3]:
            grads = torch.autograd.grad(call(batch).square().mean(), parameters)
            (owner,) = set(owners._owners) - others
            found.append(any(map(owner.is_pool_storage, grads)))
            plain = torch.autograd.grad(module(batch).square().mean(), parameters)
            torch.testing.assert_close(grads, plain)
            del grads
        return found

    assert work(0)[-1]
    in_threads(lambda: work(1))
    with counted() as counters:
        assert not any(work(2))
    assert counters["replays"] == counters["calls"]


def test_a_reset_waits_for_no_call_of_another_thread():
    """Called by torch's it has Dynamo's lock, which that call may want; what it has goes with the next call."""
    inside, is_reset = threading.Event(), threading.Event()

    def fn(x):
        inside.set()
        assert is_reset.wait(60)
        return x.sin() + 1

    def reset():
        assert inside.wait(60)
        cgpass.reset()
        is_reset.set()

    call, ones = cgpass.CUDAGraphWrapper(fn, options={"driver": "simulated"}), torch.ones(3)
    is_reset.set()
    for _ in range(3):
        call(ones)
    assert call.stats.recordings == 1
    inside.clear()
    is_reset.clear()
    thread = threading.Thread(target=reset, daemon=True)
    thread.start()
    assert torch.equal(call(torch.ones(2)), torch.ones(2).sin() + 1)
    thread.join(60)
    for _ in range(2):
        assert torch.equal(call(ones), ones.sin() + 1)
    assert call.stats.recordings == 2


def function(x):
    return (x.sin() * 2).cos()


@pytest.mark.parametrize("order", ["ppppb", "pbppp", "bpppp", "ppbbpp"])
@pytest.mark.parametrize("outputs", ["shared", "owned"])
def test_gradients_are_batched(way, order, outputs, caplog):
    def program(session):
        call = session.compile(function)
        for kind in order + "pp":
            x = session.randn(4).requires_grad_()
            if kind == "b":
                rows = torch.eye(4, device=session.device)
                yield torch.autograd.grad(call(x), x, rows, is_grads_batched=True)
            else:
                yield torch.autograd.grad(call(x).sum(), x)

    if way.compiler == "inductor":
        pytest.skip("Inductor's kernels take no batched tensors, graphs or not")
    assert way.compare(program, outputs=outputs, min_partition_ops=1)["replays"] > 0
    assert "can't be captured" not in caplog.text
    told = [r for r in caplog.messages if "made inside a transform" in r]
    assert len(told) == 1


def test_a_wrapper_inside_a_transform(setting, caplog):
    call = setting.session().wrap(lambda x: x.sin() + 1)
    x = setting.session().randn(3, 4)
    with counted() as counters:
        for _ in range(3):
            assert torch.equal(call(x), x.sin() + 1)
            assert torch.equal(torch.func.vmap(call)(x), x.sin() + 1)
    assert (counters["replays"], counters["plain_calls"]) == (2, 3)
    with pytest.raises(InputError, match="requires grad"):
        torch.func.grad(lambda x: call(x).sum())(x)
    assert caplog.text.count("made inside a transform") == 1


def test_forward_mode_derivatives_of_a_function_that_is_recorded(setting):
    session = setting.session(compiler="eager")
    x, call = session.randn(3, 4), session.compile(lambda x: x.sin().cos() * 2)
    for _ in range(3):
        call(x)
    with counted() as counters, forward_ad.dual_level():
        found = forward_ad.unpack_dual(call(forward_ad.make_dual(x, torch.ones_like(x)))).tangent
    torch.testing.assert_close(found, -2 * x.sin().sin() * x.cos())
    assert counters["plain_calls"] == 1


def step(model, call, tokens):
    loss = call(input_ids=tokens, labels=tokens, use_cache=False).loss
    loss.backward()
    grads = [parameter.grad for parameter in model.parameters()]
    model.zero_grad(set_to_none=True)
    return loss.detach(), grads


@pytest.mark.filterwarnings("ignore")  # transformers' and torch's own
@pytest.mark.parametrize("compiler", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_mixtral_trains_as_in_eager(compiler):
    torch.manual_seed(0)
    try:
        model = SPECS["mixtral"].build(True).model
    except ImportError as error:
        pytest.skip(f"transformers can't load Mixtral here: {error}")
    tokens = torch.randint(64, (2, 8), generator=torch.Generator().manual_seed(1))
    expected = step(model, model, tokens)
    options = {"driver": "simulated", "compiler": compiler, "on_skip": "silent"}
    call = torch.compile(model, backend=cgpass.cgpass, options=options)
    for _ in range(3):
        torch.testing.assert_close(step(model, call, tokens), expected)
    torch.compiler.reset()
