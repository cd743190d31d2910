"""Captures that fail, callables that are refused, options that can't be."""

import gc

import pytest
import torch

import cgpass
from cgpass.graphed.modules import Statics
from cgpass.runtime import simulated
from cgpass.runtime.recording import Recording
from tests.generators import rng_state
from tests.graphed.steps import net, same, step, twins


class Reads(torch.nn.Module):
    """Waits for the device in the forward."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(8, 8)
        self.dropout = torch.nn.Dropout(0.5)

    def forward(self, x):
        y = self.dropout(self.linear(x))
        if y.sum().item() > 1e9:
            return -y
        return y


class _ReadsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, grad):
        return grad * 2 if grad.sum().item() < 1e9 else grad


def refuse(setting, fn, args, message, **options):
    """Nothing changed after a failed capture."""
    state, enabled = rng_state(setting.device), gc.isenabled()
    with pytest.raises(cgpass.errors.CaptureError, match=message) as caught:
        setting.graphed(fn, args, **options)
    same(rng_state(setting.device), state)
    assert gc.isenabled() is enabled
    return caught


def test_a_forward_that_reads_data(setting):
    module, plain = twins(setting, Reads())
    for p in module.parameters():
        p.grad = torch.ones_like(p)
    kept = [p.grad for p in module.parameters()]
    seen = []
    hooks = {name: lambda *a, n=name: seen.append(n) for name in ("pre_forward", "forward")}
    refuse(
        setting,
        (net().to(setting.device), module),
        ((setting.randn(4, 8),), (setting.randn(4, 8),)),
        r"the forward of callable 1 \(Reads\) can't be captured, at "
        r"test_failures\.py:\d+ in forward: if y\.sum\(\)\.item\(\) > 1e9",
        capture_time_hooks=[None, hooks],
    )
    assert seen == ["pre_forward", "forward"] * 3 + ["pre_forward"]
    for p, grad in zip(module.parameters(), kept, strict=True):
        assert p.grad is grad
        assert bool((grad == 1).all())
        p.grad = None
    x = setting.randn(4, 8, grad=True)
    same(step(module, x)[0], step(plain, x)[0])
    graphed = setting.graphed(module.linear, (setting.randn(4, 8),))
    same(graphed(x.detach()), plain.linear(x))


def test_a_module_of_torch_that_reads_data(setting):
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(8, momentum=None)).to(setting.device)
    line = r"at torch/nn/modules/batchnorm\.py:\d+ in forward: .*float\(self\.num_batches_tracked\)"
    refuse(setting, module, (setting.randn(4, 8),), line)
    assert module[0].num_batches_tracked == 0


def test_a_backward_that_reads_data(setting):
    def fn(x):
        return _ReadsInBackward.apply(x.sin()).cos()

    x = setting.randn(3, grad=True)
    refuse(
        setting,
        fn,
        (x,),
        r"the backward of .*fn can't be captured, at "
        r"test_failures\.py:\d+ in backward: return grad \* 2 if",
    )
    assert x.grad is None
    same(step(setting.graphed(torch.sin, (x,)), x)[0], torch.sin(x))


def test_modules_with_hooks_are_refused(setting):
    def register(name):
        module = setting.module(net())
        getattr(module, name)(lambda *args: None)
        return module

    for name in (
        "register_forward_hook",
        "register_forward_pre_hook",
        "register_full_backward_hook",
        "register_full_backward_pre_hook",
    ):
        with pytest.raises(
            cgpass.errors.GraphedArgumentError, match=r"Sequential has hooks \(.*capture_time_hooks"
        ):
            setting.graphed(register(name), (setting.randn(4, 8),))


@pytest.mark.parametrize(
    ("wrap", "message"),
    [
        (torch.nn.DataParallel, "a DataParallel at '0', whose hooks"),
        (torch.jit.script, "TorchScript module, .* at '0'. Give the original"),
        (lambda module: torch.nn.LazyLinear(8), "lazy module .* at '0': call it once"),
    ],
)
def test_modules_that_are_refused(setting, wrap, message):
    wrapped = torch.nn.Sequential(wrap(setting.module(net())))
    with pytest.raises(cgpass.errors.GraphedArgumentError, match=message):
        setting.graphed(wrapped, (setting.randn(4, 8),))


def test_arguments_that_can_not_be(setting):
    module, x = setting.module(net()), setting.randn(4, 8)
    refused = {
        "callable 0 is a int; give a module": ((3,), ((x,),), None),
        "sample_args must be a tuple, got Tensor": (module, x, None),
        "sample_args must be a tuple for each .*, got tuple, Tensor": (
            (module,) * 2,
            ((x,), x),
            None,
        ),
        "sample_kwargs must be a mapping, got list": (module, (x,), [1]),
        "sample_kwargs must be a mapping for each .*, got dict": (
            (module,) * 2,
            ((x,), (x,)),
            [{}],
        ),
        "sample_kwargs must be a mapping .*, got int": ((module,), ((x,),), 5),
        "callable 0 is a list; give a module, a function or a tuple": ([module], (x,), None),
        "neither samples nor modules have a tensor": (lambda: None, (), None),
    }
    for message, args in refused.items():
        with pytest.raises(cgpass.errors.GraphedArgumentError, match=message):
            setting.graphed(*args)
    elsewhere = torch.zeros(3, device="meta")
    with pytest.raises(cgpass.errors.InputError, match=r"args\[1\] lies on meta, the recording on"):
        setting.graphed(lambda x, y: x, (x, elsewhere))
    assert setting.graphed((), ()) == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_warmup_iters": 0}, "'num_warmup_iters' must be an int >= 1, got 0"),
        ({"driver": "no"}, "must be one of 'auto', 'cuda', 'simulated', 'none', got 'no'"),
        ({"rng_tracker": {}}, "'rng_tracker' must be a cgpass.RNGStatesTracker or None"),
        (
            {"num_warmup_iter": 3},
            "with some of the names num_warmup_iters, pool, .* got {'num_warmu",
        ),
        (3, "options must be a GraphedOptions or a dict .* got 3"),
    ],
)
def test_options_that_can_not_be(options, message):
    with pytest.raises(cgpass.errors.OptionError, match=message):
        cgpass.make_graphed_callables(torch.sin, (torch.zeros(3),), options=options)


def test_a_driver_that_can_not_record_there(setting):
    other = "cuda" if setting.driver == "simulated" else "simulated"
    with pytest.raises(cgpass.errors.DriverUnavailableError, match=f'driver="{other}" can\'t'):
        cgpass.make_graphed_callables(
            torch.sin, (setting.randn(3),), options=cgpass.GraphedOptions(driver=other)
        )


def test_sparse_gradients_are_refused(setting):
    module = setting.module(torch.nn.Embedding(5, 3, sparse=True))
    with pytest.raises(
        cgpass.errors.GraphedArgumentError,
        match=r"Embedding has gradients of layout torch\.sparse_coo\. Make them dense",
    ):
        setting.graphed(module, (torch.tensor([1, 2], device=setting.device),))


def recordings_alive():
    gc.collect()
    return sum(isinstance(each, Recording) for each in gc.get_objects())


class Changing(torch.nn.Linear):
    """Does from some call on what no recording takes."""

    refused = ""

    def forward(self, x):
        y = super().forward(x)
        if self.refused == "assigns":
            self.bias = torch.nn.Parameter(self.bias.detach().clone())
        if self.refused == "reads":
            float(y.detach().sum())
        if self.refused == "reads in the backward":
            y = _ReadsInBackward.apply(y) / 2
        return (y, object()) if self.refused == "returns" else y


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize("refused", ["assigns", "reads", "reads in the backward", "returns"])
def test_a_refusal_in_a_training_runs_without_a_graph(setting, caplog, refused, resets):
    """And leaves no recordings behind; the graph that there was replays afterwards."""
    module, without = setting.module(Changing(8, 8)), recordings_alive()
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    same(graphed(x := setting.randn(4, 8)), module(x))
    before = recordings_alive()
    graphed.refused = refused
    home, graphed.weight.data = graphed.weight.data, graphed.weight.data.clone()
    if resets:
        graphed.graphed.reset()
    for n in range(1, 3):
        found = graphed(x := setting.randn(4, 8))
        found = found[0] if refused == "returns" else found
        same(found, torch.nn.functional.linear(x, graphed.weight, graphed.bias))
        found.sum().backward()
        assert graphed.graphed.stats.plain_calls == n
    assert recordings_alive() <= (without if resets else before)
    why = {
        "assigns": "a new tensor to bias",
        "reads": "can't be captured, at test_failures",
        "reads in the backward": "runs without a graph: make_graphed_callables: the backward of",
        "returns": "a object that",
    }
    assert caplog.text.count("runs without a graph: make_graphed_callables") == 1
    assert why[refused] in caplog.text
    graphed.refused, graphed.weight.data = "", home
    if resets:
        graphed.graphed.reset()
    same(
        graphed(x := setting.randn(4, 8)),
        torch.nn.functional.linear(x, graphed.weight, graphed.bias),
    )
    assert graphed.graphed.stats.plain_calls == 2


@pytest.mark.parametrize("at", [0, 1])
def test_an_interrupted_recording_leaves_modules_as_they_were(setting, monkeypatch, at):
    module, x = setting.module(torch.nn.Linear(4, 4)), setting.randn(2, 4)
    before, put, calls = list(module.parameters()), Statics.put, []

    def interrupted(statics, tensors):
        calls.append(tensors)
        if len(calls) == at + 1:
            holder, key = statics._dicts[0], statics._keys[0]
            holder[key] = tensors[0]
            raise KeyboardInterrupt
        put(statics, tensors)

    monkeypatch.setattr(Statics, "put", interrupted)
    with pytest.raises(KeyboardInterrupt):
        setting.graphed(module, (x,))
    assert all(a is b for a, b in zip(module.parameters(), before, strict=True))
    same(setting.graphed(module, (x,))(x), module(x))


def test_random_numbers_after_a_capture_that_could_not_be_undone(monkeypatch):
    """What is undone late must not have numbers of the middle of it come back."""
    undo, calls = simulated._Tape.undo, []

    def fails_once(self):
        calls.append(self)
        if len(calls) == 1:
            raise MemoryError
        undo(self)

    monkeypatch.setattr(simulated._Tape, "undo", fails_once)
    state = torch.get_rng_state()
    with pytest.raises(MemoryError):
        cgpass.make_graphed_callables(
            torch.nn.Dropout(0.5), (torch.ones(4),), options={"driver": "simulated"}
        )
    assert len(calls) > 1
    assert torch.equal(torch.get_rng_state(), state)
