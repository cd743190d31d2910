"""Programs that use a compiled function, and how they are compared with the run without graphs.

A program is a function of a `Session`: it compiles, calls, and returns every tensor that a user could see, or yields
those of each step. It runs with a driver that records, and must give the same bits as without: as in eager PyTorch, which
is quick to run and is all that can be asked for, or else, where compiling changes numbers, as with `driver="none"`.
"""

import contextlib
import inspect
import os
import threading
from dataclasses import dataclass, field
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import cgpass
from cgpass import telemetry

SEED = 7


@dataclass
class Session:
    """Surroundings of a program: device, options, and inputs that are the same in every run."""

    device: torch.device
    options: dict
    generator: torch.Generator = field(
        default_factory=lambda: torch.Generator().manual_seed(SEED + 1)
    )

    @property
    def backend(self):
        return cgpass.cgpass

    def compile(self, fn, **kwargs):
        return torch.compile(fn, backend=self.backend, options=self.options, **kwargs)

    def module(self, make):
        torch.manual_seed(SEED)
        return make().to(self.device)

    def compiled(self, make, **kwargs):
        """A module with the same weights in every run, and its compiled form."""
        module = self.module(make)
        return module, self.compile(module, **kwargs)

    def wrap(self, fn, **kwargs):
        return cgpass.CUDAGraphWrapper(fn, options=self.options, **kwargs)

    def randn(self, *shape):
        return torch.randn(*shape, generator=self.generator, device="cpu").to(self.device)

    def batches(self, *shape, count=8):
        return [self.randn(*shape) for _ in range(count)]

    def tensor(self, *args, **kwargs):
        return torch.tensor(*args, device=self.device, **kwargs)


class PlainSession(Session):
    """Compiles nothing."""

    @property
    def backend(self):
        return lambda gm, inputs, **settings: gm.forward

    def compile(self, fn, **kwargs):
        return fn


@dataclass(frozen=True)
class Setting:
    """A device, the driver that records on it, and what makes the kernels unless a program says."""

    device: torch.device
    driver: str
    compiler: str = "eager"
    warn_only: bool = False
    """True if operators without a deterministic algorithm only warn."""

    def session(self, **options):
        return Session(self.device, {"driver": self.driver, "compiler": self.compiler, **options})

    def run(self, program, **options):
        """Results of a program that starts from nothing, with the RNG state afterwards."""
        return self._run(program, self.session(**options))

    def run_eagerly(self, program):
        """The same without compiling anything."""
        return self._run(program, PlainSession(self.device, {"driver": "none"}))

    def _run(self, program, session):
        torch.compiler.reset()
        torch.manual_seed(SEED)
        with deterministic(warn_only=self.warn_only):
            values = program(session)
            if inspect.isgenerator(values):
                values = [value for step in values for value in step]
        state = torch.cuda.get_rng_state() if self.device.type == "cuda" else torch.get_rng_state()
        return [*values, state]

    def compare(self, program, *, only_eager=False, **options):
        """Run a program with graphs and without; fails on any bit that differs. Gives the counters with graphs.

        With `only_eager` nothing but eager PyTorch's results will do.
        """
        with counted() as counters:
            ours = self.run(program, **options)
        aten = {"compiler": self.compiler, **options}["compiler"] == "eager"
        if only_eager or (aten and options.get("rng", "exact") == "exact"):
            found = self._differ_from_eager(program, ours, must_run=only_eager)
            assert not (found and only_eager), f"{len(found)} values not as in eager: {found[:5]}"
            if not found:
                return counters
        plain = self.run(program, **options | {"driver": "none"})
        found = differences(ours, plain)
        assert not found, f"{len(found)} values differ from the run without graphs: {found[:5]}"
        return counters

    def _differ_from_eager(self, program, ours, *, must_run):
        try:
            return differences(ours, self.run_eagerly(program))
        except (Exception, pytest.fail.Exception) as error:  # what only compiled functions refuse
            if must_run:
                raise
            return [repr(error)]


def differences(ours, plain):
    """Differences of two lists of values, bit for bit."""
    if len(ours) != len(plain):
        return [f"{len(ours)} values against {len(plain)}"]
    return [
        f"value {number}"
        for number, (a, b) in enumerate(zip(ours, plain, strict=True))
        if not _same(a, b)
    ]


def _same(a, b):
    if not isinstance(a, torch.Tensor):
        return a == b
    same_layout = a.dtype == b.dtype and a.shape == b.shape and a.stride() == b.stride()
    return (
        same_layout
        and torch.equal(a.isnan(), b.isnan())
        and torch.equal(a[~a.isnan()], b[~b.isnan()])
    )


@contextlib.contextmanager
def deterministic(*, warn_only=False):
    """Deterministic algorithms; nothing in these programs lacks one."""
    torch.use_deterministic_algorithms(True, warn_only=warn_only)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextlib.contextmanager
def counted():
    """Yields a dict that holds the differences of the counters at exit."""
    before = cgpass.counters()
    found = {}
    yield found
    found.update({key: value - before[key] for key, value in cgpass.counters().items()})


def noting(program, driver, found):
    """The same program of steps; what each adds to the counters is noted where it runs with that driver."""

    def noted(session):
        steps = program(session)
        while True:
            with counted() as counters:
                values = next(steps, None)
            if values is None:
                return
            if session.options["driver"] == driver:
                found.append(counters)
            yield [value.detach().clone() for value in values]

    return noted


def assert_steady(counters, *, captured, eager=0, **more):
    """All that could be captured was captured, and every call but the warm-ups was a replay."""
    expected = steady(captured, eager=eager, **more)
    assert {name: counters[name] for name in expected} == expected, counters
    assert_replays(counters)


def runners(others=()):
    """Of the partitions that are captured now, but for those of earlier tests."""
    ran = [graph.live() for graph in telemetry.graphs()]
    plans = [live.plan for live in ran if hasattr(live, "plan")]
    runs = [step.run for plan in plans for step in plan.steps]
    return [run for run in runs if hasattr(run, "table") and run not in others]


def in_threads(*functions):
    """Call functions at the same time, each in a thread of its own, and wait for all."""
    threads = [threading.Thread(target=function, daemon=True) for function in functions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "timed out after 120 s, waiting for a thread"


def steady(captured, *, eager=0, recordings=None, warmups=None):
    """Counters of a program as `assert_steady` wants them, for a table of which all replay."""
    return {
        "partitions_captured": captured,
        "partitions_eager": eager,
        "recordings": recordings or captured,
        "warmups": warmups or captured,
        "rerecordings": 0,
    }


def assert_replays(counters, *, plain=0):
    """Every call but the warm-ups was a replay, however many recordings that took."""
    assert counters["partitions_captured"] > 0, counters
    assert counters["plain_calls"] == plain, counters
    assert counters["replays"] == counters["calls"] - counters["warmups"] - plain > 0, counters


ON_CUDA = (("cuda", "eager"), ("cuda", "inductor"))
USUAL = (("simulated", "eager"), *ON_CUDA)
"""On CPU aten alone, for Inductor takes seconds a graph there."""
ALL = (("simulated", "inductor"), *USUAL)
ATEN = (("simulated", "eager"), ("cuda", "eager"))


@dataclass(frozen=True)
class Way:
    """A program, options, and what its calls must have been."""

    program: Any
    replays: str
    counts: dict
    most: dict
    options: dict

    def check(self, setting, **more):
        """Run it with graphs and without; gives the counters."""
        counters = setting.compare(self.program, **self.options, **more)
        if self.replays == "all":
            assert_replays(counters)
        assert self.replays == "none" or counters["replays"] > 0, counters
        assert {name: counters[name] for name in self.counts} == self.counts, counters
        assert all(counters[name] <= most for name, most in self.most.items()), counters
        return counters


class Ways:
    """A table of programs, most of which are functions that it decorates."""

    def __init__(self, *settings):
        self._cases = []
        self._settings = settings or USUAL

    def __call__(self, *, replays="all", counts=(), most=(), settings=(), **options):
        """Take in a program: how many calls are replays (all, some, none), exact counters, their limits, drivers."""

        def take(program, name=None):
            way = Way(program, replays, dict(counts), dict(most), options)
            for setting in settings or self._settings:
                marks = [pytest.mark.gpu] * (setting[0] == "cuda")
                name = name or program.__name__
                self._cases.append(
                    pytest.param(setting, way, id="-".join((name, *setting)), marks=marks)
                )
            return program

        return take

    def add(self, programs, **settings):
        """Take in a dict of programs."""
        for name, program in programs.items():
            self(**settings)(program, name.replace(" ", "_"))

    @property
    def everywhere(self):
        """Decorate a test that takes each of the programs with each of its drivers and compilers."""
        return pytest.mark.parametrize(("way", "program"), self._cases, indirect=["way"])


def one_of_each_on_cpu(setting, *, another):
    """Skips, on CPU, `another` pair of two parameters whose values all have a pair already; CUDA has all pairs."""
    if another and setting.device.type == "cpu":
        pytest.skip("each value is in another pair, and CPUs take long to compile")


class MLP(nn.Module):
    def __init__(self, width=8, depth=2):
        super().__init__()
        layers = [m for _ in range(depth) for m in (nn.Linear(width, width), nn.GELU())]
        self.layers = nn.Sequential(*layers)

    def forward(self, x):
        return self.layers(x)


class Block(nn.Module):
    """A transformer block."""

    def __init__(self, width=16, dropout=0.0):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)
        self.dropout = dropout

    def forward(self, x):
        shape = (*x.shape[:2], 3, 4, x.shape[2] // 4)
        q, k, v = self.qkv(self.norm(x)).view(shape).permute(2, 0, 3, 1, 4).unbind()
        scores = (q @ k.transpose(-1, -2)).softmax(-1)
        mixed = (scores @ v).transpose(1, 2).flatten(2)
        return x + F.dropout(self.out(mixed), self.dropout, self.training)


class ConvNet(nn.Module):
    """Batch norm: buffers that the forward changes."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4)
        )

    def forward(self, x):
        return self.body(x)


class Tied(nn.Module):
    """Embedding and head are one parameter."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.body = MLP()
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.body(self.embedding(ids)))


class Counter(nn.Module):
    """Changes a buffer and an input."""

    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x, state):
        self.seen.add_(x.mean(0))
        state.mul_(0.5).add_(x.sum())
        return (x * self.seen).sum(-1) + state.sum()


class ReadsValue(nn.Module):
    """Reads a number on the host between two parts."""

    def __init__(self):
        super().__init__()
        self.first = MLP()
        self.second = MLP()

    def forward(self, x):
        x = self.first(x)
        count = (x.detach() > 0).sum().item()
        return self.second(x * (count + 1))


class FindsRows(ReadsValue):
    """A size that depends on data between two parts."""

    def forward(self, x):
        x = self.first(x)
        rows = torch.nonzero(x.detach().sum(-1) > 0).shape[0]
        return self.second(x) * (rows + 1)


class Adapted(nn.Module):
    """A frozen matrix, and two small ones that can be switched off."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(8, 8).requires_grad_(False)
        self.down, self.up, self.is_on = nn.Linear(8, 2), nn.Linear(2, 8), True

    def forward(self, x):
        y = self.frozen(x)
        return torch.tanh(y + self.up(self.down(x)) if self.is_on else y)


class Checkpointed(nn.Module):
    """Recomputes its layers in the backward, their dropout among it."""

    def __init__(self, layer=MLP):
        super().__init__()
        self.layers = nn.ModuleList(layer() for _ in range(2))

    def forward(self, x):
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return x


class AssignedBuffer(nn.Module):
    """Has a buffer that is a new tensor after each call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("prev", torch.zeros(8))

    def forward(self, x):
        y = torch.tanh(self.linear(x) + self.prev.to(x.device))
        self.prev = y.detach().mean(0)
        return y


def gradients(module):
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def state(module):
    return [value.clone() for value in module.state_dict().values()]


def learn(module, loss, optimizer=None):
    """Run a backward, and a step if there is an optimizer; gives the loss and the gradients."""
    loss.backward()
    values = [loss.detach(), *gradients(module)]
    if optimizer is not None:
        optimizer.step()
    module.zero_grad()
    return values


def sgd(module, lr=0.1, **settings):
    return torch.optim.SGD(module.parameters(), lr=lr, **settings)


def rows(*shape):
    return lambda session, count: session.batches(*shape, count=count)


def tokens(vocab, *shape):
    def make(session, count):
        return [
            torch.randint(0, vocab, shape, generator=session.generator).to(session.device)
            for _ in range(count)
        ]

    return make


def sgd_step(module, call, batch):
    """One step of training; gives the output, the loss, the gradients and the parameters after it."""
    out = call(batch)
    learned = learn(module, out.square().mean(), sgd(module))
    return [out.detach(), *learned, *state(module)]


def trained(make, make_batch=None, *, change=None, count=6):
    """A program: steps of plain SGD, and before every third what is done to the module."""

    def program(session):
        module, call = session.compiled(make)
        for number, batch in enumerate((make_batch or rows(4, 8))(session, count)):
            if change is not None and number % 3 == 2:
                change(session, module)
            yield sgd_step(module, call, batch)

    return program


def trained_on(make, shapes, **kwargs):
    """A program: a step of training on a batch of each of these shapes."""

    def program(session):
        module, call = session.compiled(make, **kwargs)
        optimizer = sgd(module)
        for shape in shapes:
            loss = call(session.randn(*shape)).square().mean()
            yield learn(module, loss, optimizer) + state(module)

    return program


def long_enough(x):
    return (x.sin() + 1).cos().exp()


def called_with(fn, *makers, count=8, **kwargs):
    """A program that calls a function with new inputs for each call; gives inputs and outputs."""

    def program(session):
        call = session.compile(fn, **kwargs)
        for number in range(count):
            inputs = makers[number % len(makers)](session)
            outputs = call(*inputs)
            yield inputs
            yield outputs if isinstance(outputs, (tuple, list)) else [outputs]

    return program
