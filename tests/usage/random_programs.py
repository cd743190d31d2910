"""Random graphs, random ways of using them, and the comparison with the same compiler without CUDA graphs.

A graph is text and a program is a list of steps: what hypothesis prints of a failure can be pasted into a test. Both
runs interpret the same steps in a `World`; a step that does not apply is skipped in both.
"""

import contextlib
import functools
import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn import functional as F

import cgpass
from tests.generators import rng_state
from tests.usage.programs import SEED, _same, deterministic

WIDTH = 4
"""Columns of every input; rows are fewer, so that gradients of parameters do not fit as inputs."""

CONFIG = {
    "capture_dynamic_output_shape_ops": True,
    "capture_scalar_outputs": True,
    "recompile_limit": 4096,
    "accumulated_recompile_limit": 4096,
    "fail_on_recompile_limit_hit": True,  # rather than a silent run without compiling
}
"""Host reads are part of the graph, and no function is given up because it was called in many ways."""

_HEAD = "def forward(self, x, y):"


@dataclass(frozen=True, repr=False)
class Graph:
    """A module's forward: statements on `x` and `y`, both (rows, 4), and what is returned."""

    lines: tuple[str, ...]
    outputs: tuple[str, ...]
    changes: str = ""
    """Those of `x` and `y` that statements may change."""

    def __repr__(self):
        changes = f", changes={self.changes!r}" if self.changes else ""
        return f"Graph({self.lines!r}, {self.outputs!r}{changes})"

    def source(self):
        body = [*self.lines, f"return ({', '.join(self.outputs)},)"]
        return "\n".join(
            [_HEAD, *("    " + line for line in body), "def call(m, x, y):", "    return m(x, y)"]
        )


class Base(nn.Module):
    """The parameters and the buffer that every graph may use."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.5)
        self.b = nn.Parameter(torch.randn(WIDTH) * 0.5)
        self.register_buffer("n", torch.zeros(WIDTH))


@dataclass
class Compiled:
    """A graph's module class and the compiled function that calls a module of it."""

    make: type
    call: Callable


@functools.lru_cache(maxsize=64)
def compile_graph(graph, device, options):
    """Compile once for all programs that use this graph with these options."""
    names = {"torch": torch, "F": F}
    # a name in angle brackets would make Dynamo trace all graphs through one function of its own
    exec(compile(graph.source(), "random_graph.py", "exec"), names)
    make = type("Module", (Base,), {"forward": names["forward"]})
    settings = {"compiler": "eager", "min_partition_ops": 1, "on_skip": "silent", **dict(options)}
    call = torch.compile(names["call"], backend=cgpass.cgpass, options=settings, dynamic=False)
    return Compiled(make, call)


@dataclass
class Held:
    """Values of a call that a user holds."""

    tensors: list
    inputs: list = field(default_factory=list)
    spent: bool = False
    """True if a backward ran and freed what it needs."""


class World:
    """All that a user has: modules, held results, and what was seen so far."""

    def __init__(self, graph, compiled, device, num_modules):
        torch.manual_seed(SEED)
        self.graph = graph
        self.call = compiled.call
        self.device = device
        self.generator = torch.Generator().manual_seed(SEED + 1)
        self.modules = [compiled.make().to(device) for _ in range(num_modules)]
        self.held = []
        self.buffers = {}
        self.seen = []
        self.step = ""

    def see(self, name, value):
        if isinstance(value, torch.Tensor):
            facts = (value.requires_grad, value.is_leaf, value.is_inference(), type(value).__name__)
            self.seen.append((self.step, f"facts of {name}", facts))
            value = value.detach().clone()
        self.seen.append((self.step, name, value))

    def see_all(self):
        for number, held in enumerate(self.held):
            for part, tensor in enumerate(held.tensors):
                self.see(f"held[{number}].tensors[{part}]", tensor)
            for part, tensor in enumerate(held.inputs):
                self.see(f"held[{number}].inputs[{part}]", tensor)
        for number, module in enumerate(self.modules):
            for name, value in module.state_dict(keep_vars=True).items():
                self.see(f"modules[{number}].{name}", value)
        self.see_gradients()

    def see_gradients(self):
        leaves = {
            f"modules[{number}].{name}": p
            for number, module in enumerate(self.modules)
            for name, p in module.named_parameters()
        }
        for number, held in enumerate(self.held):
            leaves |= {f"held[{number}].inputs[{i}]": x for i, x in enumerate(held.inputs)}
        for name, leaf in leaves.items():
            if leaf.is_leaf and leaf.grad is not None:
                self.see(f"{name}.grad", leaf.grad)

    def run(self, steps):
        """Interpret a program, then use up what is left."""
        for number, step in enumerate(steps):
            self.attempt(f"step {number} {step!r}", lambda step=step: step.run(self))
        self.attempt("end", self.see_all)
        for held in list(self.held):
            self.attempt("backward at the end", lambda held=held: self.backward(held))
        self.attempt("end after backward", self.see_all)
        self.see("RNG state", rng_state(self.device))

    def attempt(self, name, action):
        """Run a step; an error of autograd is something that the user sees."""
        self.step = name
        try:
            action()
        except RuntimeError as error:
            self.seen.append((name, f"error: {str(error).splitlines()[0]}", type(error).__name__))

    def pick(self, number):
        """A held result, or None; 0 is the youngest."""
        return self.held[-1 - number % len(self.held)] if self.held else None

    def module(self, number):
        return self.modules[number % len(self.modules)]

    def parameters(self):
        return [p for module in self.modules for p in module.parameters()]

    def new_input(self, rows, *, grad):
        value = torch.randn(rows, WIDTH, generator=self.generator).to(self.device)
        return value.requires_grad_(grad)

    def buffer(self, name, rows):
        """A tensor that stays where it is, with new values."""
        value = self.new_input(rows, grad=False)
        return self.buffers.setdefault((name, rows), value.clone()).copy_(value)

    def backward(self, held, *, retain=False, part=None):
        if held.spent:
            return
        roots = [t for t in held.tensors if t.grad_fn is not None]
        if not roots:
            return
        if part is not None:
            roots = [roots[part % len(roots)]]
        held.spent = not retain
        sum((t * t).sum() for t in roots).backward(retain_graph=retain)
        self.see_gradients()


# ---- steps: what a user does with a compiled function and with what it returned


@dataclass(frozen=True)
class Step:
    do: Callable
    given: tuple

    def __repr__(self):
        given = ", ".join(f"{name}={value!r}" for name, value in self.given)
        return f"{self.do.__name__}({given})"

    def run(self, world):
        self.do(world, **dict(self.given))


def step(do):
    """Decorate what a step does to a world; gives a function that makes steps."""
    return functools.wraps(do)(lambda **given: Step(do, tuple(given.items())))


@dataclass(frozen=True)
class Program:
    """Steps, and how many modules share the compiled function."""

    steps: tuple = ()
    modules: int = 1


MODES = {
    "grad": contextlib.nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
}

KEPT = {
    "all": list,
    "first": lambda outputs: outputs[:1],
    "last": lambda outputs: outputs[-1:],
    "detached": lambda outputs: [t.detach() for t in outputs],
    "views": lambda outputs: [t[..., :1] if t.dim() else t.view(1) for t in outputs],
    "loss": lambda outputs: [sum((t * t).sum() for t in outputs)],
    "nothing": lambda _: None,
}


@step
def call(world, *, keep="all", mode="grad", backward=False, twice=False, module=0, **first):
    """Call a module on new inputs, on a held result, on inputs of before or on buffers; keep some of what comes back."""
    x = first_input(world, **first)
    if x is None:
        return
    y = x if twice else second_input(world, x.shape[0], first.get("on"))
    with MODES[mode]():
        outputs = list(world.call(world.module(module), x, y))
    for number, tensor in enumerate(outputs):
        world.see(f"outputs[{number}]", tensor)
    for name, tensor in (("x", x), ("y", y)):
        world.see(name, tensor)
    kept = KEPT[keep](outputs)
    result = Held(outputs, [x, y])
    if backward:
        world.backward(result)
    if kept is not None:
        world.held.append(Held(kept, [x, y], spent=result.spent))


def second_input(world, rows, on):
    return world.buffer("y", rows) if on == "buffer" else world.new_input(rows, grad=False)


def first_input(world, *, rows=3, grad=False, on="new", pick=0, part=0):
    if on == "buffer":
        return world.buffer(f"x{pick % 2}", rows)
    if on == "new":
        x = world.new_input(rows, grad=grad)
        # autograd lets nobody change a leaf that wants a gradient
        return x * 1 if grad and "x" in world.graph.changes else x
    held = world.pick(pick)
    if held is None:
        return None
    values = held.inputs if on == "input" else held.tensors
    fitting = [t for t in values if t.dim() == 2 and t.shape[1] == WIDTH > t.shape[0]]
    if not fitting:
        return None
    x = fitting[part % len(fitting)]
    return x if grad or x.is_inference() else x.detach()


@step
def check_all(world):
    world.see_all()


@step
def drop(world, *, pick=0, part=-1):
    """Forget a result, or one tensor of it."""
    held = world.pick(pick)
    if held is None:
        return
    if part < 0 or len(held.tensors) < 2:
        world.held.remove(held)
    else:
        del held.tensors[part % len(held.tensors)]


@step
def drop_all(world):
    world.held.clear()


@step
def backward(world, *, pick=0, part=None, retain=False, again=False):
    """Backward through a held result, late; `again` though what it needs was freed."""
    held = world.pick(pick)
    if held is None:
        return
    if again:
        held.spent = False
    world.backward(held, retain=retain, part=part)


@step
def gradients(world, *, pick=0, part=0, retain=False):
    """`torch.autograd.grad` of one held tensor; the gradients are held."""
    held = world.pick(pick)
    roots = [t for t in held.tensors if t.grad_fn is not None] if held else []
    if not roots or held.spent:
        return
    held.spent = not retain
    leaves = [*world.parameters(), *(x for x in held.inputs if x.requires_grad and x.is_leaf)]
    root = roots[part % len(roots)].sum()
    found = torch.autograd.grad(root, leaves, retain_graph=retain, allow_unused=True)
    found = [t for t in found if t is not None]
    for number, tensor in enumerate(found):
        world.see(f"gradients[{number}]", tensor)
    world.held.append(Held(found))


@step
def take_gradients(world):
    taken = [p.grad for p in world.parameters() if p.grad is not None]
    for p in world.parameters():
        p.grad = None
    if taken:
        world.held.append(Held(taken))


@step
def zero_grad(world, *, set_to_none=True):
    for module in world.modules:
        module.zero_grad(set_to_none=set_to_none)


@step
def scale_gradients(world):
    """Change every `.grad` in place, as clipping does."""
    for p in world.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


@step
def optimize(world):
    with torch.no_grad():
        for p in world.parameters():
            if p.grad is not None:
                p -= 0.1 * p.grad


@step
def move_data(world, *, module=0, name="w"):
    """`p.data = ...`; nobody may read the old memory after."""
    tensor = getattr(world.module(module), name)
    old = tensor.data
    tensor.data = old.clone()
    old.fill_(float("nan"))


@step
def replace(world, *, module=0, name="w"):
    module = world.module(module)
    new = getattr(module, name).detach().clone() * 0.5
    setattr(module, name, new if name == "n" else nn.Parameter(new))


@step
def edit(world, *, pick=0, part=0, of_inputs=False):
    held = world.pick(pick)
    tensors = held and (held.inputs if of_inputs else held.tensors)
    if tensors:
        with torch.no_grad():
            tensors[part % len(tensors)].mul_(0.5).add_(1)


@step
def collect(world):
    gc.collect(1)  # what is young; the whole heap takes half a second


@step
def reset(world):
    cgpass.reset()


def observe(graph, device, options, program):
    compiled = compile_graph(graph, device, options)
    world = World(graph, compiled, device, program.modules)
    world.run(program.steps)
    return world.seen


REFUSED = "has been modified by an inplace operation"
"""Without graphs autograd refuses a backward whose saved tensors the user edited. With graphs the user may have got a
copy of what was saved; then the backward goes through, and there is nothing to compare its gradients with."""


def first_difference(ours, plain, *, refused_too=False):
    """Text of the first thing that a user sees differently, or None.

    With `refused_too` a backward that autograd refuses must be refused with graphs as well.
    """
    for (step, name, value), (_, other_name, expected) in zip(ours, plain, strict=False):
        mine_fails, other_fails = name.startswith("error"), other_name.startswith("error")
        if (name == other_name or (mine_fails and other_fails)) and _same(value, expected):
            continue
        if REFUSED in other_name and not mine_fails and not refused_too:
            return None
        return f"{step}: {name}: {value}; without graphs {other_name}: {expected}"
    if len(ours) != len(plain):
        return f"{len(ours)} observations, {len(plain)} without graphs"
    return None


def check(setting, graph, programs, *, refused_too=False, **options):
    """Run programs with graphs and without; fails on any bit that a user sees differently."""
    recorded = tuple(sorted({**options, "driver": setting.driver}.items()))
    with torch._dynamo.config.patch(**CONFIG), deterministic():
        for program in programs:
            cgpass.reset()
            ours = observe(graph, setting.device, recorded, program)
            plain = observe(graph, setting.device, (("driver", "none"),), program)
            found = first_difference(ours, plain, refused_too=refused_too)
            assert found is None, f"differ from the run without graphs: {found}"
