"""The steps of random programs: what a user does with a compiled function and with what it returned."""

import contextlib
import gc
from dataclasses import dataclass, field, fields

import torch
from torch import nn

import cgpass

WIDTH = 4
"""Columns of every input; rows are fewer, so that gradients of parameters do not fit as inputs."""


@dataclass
class Held:
    """What the user still has of one call."""

    tensors: list
    inputs: list = field(default_factory=list)
    spent: bool = False
    """Whether a backward went through it and freed what it needs."""


@dataclass(frozen=True, repr=False)
class Step:
    """Something that a user does."""

    def __repr__(self):
        given = (
            f"{spec.name}={getattr(self, spec.name)!r}"
            for spec in fields(self)
            if getattr(self, spec.name) != spec.default
        )
        return f"{type(self).__name__}({', '.join(given)})"


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


@dataclass(frozen=True, repr=False)
class Call(Step):
    """Call a module on new inputs, on a held result, on inputs of before or on buffers; keep some of what comes back."""

    keep: str = "all"
    mode: str = "grad"
    backward: bool = False
    module: int = 0
    rows: int = 3
    grad: bool = False
    on: str = "new"
    pick: int = 0
    part: int = 0
    twice: bool = False
    """Whether the second input is the first."""

    def run(self, world):
        x = self._first(world)
        if x is None:
            return
        y = x if self.twice else self._second(world, x.shape[0])
        with MODES[self.mode]():
            outputs = list(world.call(world.module(self.module), x, y))
        for number, tensor in enumerate(outputs):
            world.see(f"outputs[{number}]", tensor)
        for name, tensor in (("x", x), ("y", y)):
            world.see(name, tensor)
        kept = KEPT[self.keep](outputs)
        if self.backward:
            result = Held(outputs, [x, y])
            world.backward(result)
            if kept is not None:
                world.held.append(Held(kept, [x, y], spent=result.spent))
        elif kept is not None:
            world.held.append(Held(kept, [x, y]))

    def _second(self, world, rows):
        if self.on == "buffer":
            return world.buffer("y", rows)
        return world.new_input(rows, grad=False)

    def _first(self, world):
        if self.on == "buffer":
            return world.buffer(f"x{self.pick % 2}", self.rows)
        if self.on == "new":
            x = world.new_input(self.rows, grad=self.grad)
            # autograd lets nobody change a leaf that wants a gradient
            return x * 1 if self.grad and "x" in world.graph.changes else x
        held = world.pick(self.pick)
        if held is None:
            return None
        values = held.inputs if self.on == "input" else held.tensors
        fitting = [t for t in values if t.dim() == 2 and t.shape[1] == WIDTH > t.shape[0]]
        if not fitting:
            return None
        x = fitting[self.part % len(fitting)]
        return x if self.grad or x.is_inference() else x.detach()


@dataclass(frozen=True, repr=False)
class Check(Step):
    """Look at everything."""

    def run(self, world):
        world.see_all()


@dataclass(frozen=True, repr=False)
class Drop(Step):
    """Forget a result, or one tensor of it."""

    pick: int = 0
    part: int = -1

    def run(self, world):
        held = world.pick(self.pick)
        if held is None:
            return
        if self.part < 0 or len(held.tensors) < 2:
            world.held.remove(held)
        else:
            del held.tensors[self.part % len(held.tensors)]


@dataclass(frozen=True, repr=False)
class DropAll(Step):
    """Forget every result."""

    def run(self, world):
        world.held.clear()


@dataclass(frozen=True, repr=False)
class Backward(Step):
    """Backward through a held result, late."""

    pick: int = 0
    part: int | None = None
    retain: bool = False
    again: bool = False
    """Whether to try though what it needs was freed."""

    def run(self, world):
        held = world.pick(self.pick)
        if held is None:
            return
        if self.again:
            held.spent = False
        world.backward(held, retain=self.retain, part=self.part)


@dataclass(frozen=True, repr=False)
class Gradients(Step):
    """`torch.autograd.grad` of one held tensor; the gradients are held."""

    pick: int = 0
    part: int = 0
    retain: bool = False

    def run(self, world):
        held = world.pick(self.pick)
        roots = [t for t in held.tensors if t.grad_fn is not None] if held else []
        if not roots or held.spent:
            return
        held.spent = not self.retain
        leaves = [*world.parameters(), *(x for x in held.inputs if x.requires_grad and x.is_leaf)]
        root = roots[self.part % len(roots)].sum()
        found = torch.autograd.grad(root, leaves, retain_graph=self.retain, allow_unused=True)
        found = [t for t in found if t is not None]
        for number, tensor in enumerate(found):
            world.see(f"gradients[{number}]", tensor)
        world.held.append(Held(found))


@dataclass(frozen=True, repr=False)
class TakeGradients(Step):
    """Keep the tensors in `.grad` and clear the fields."""

    def run(self, world):
        taken = [p.grad for p in world.parameters() if p.grad is not None]
        for p in world.parameters():
            p.grad = None
        if taken:
            world.held.append(Held(taken))


@dataclass(frozen=True, repr=False)
class ZeroGrad(Step):
    """`zero_grad`, both ways."""

    set_to_none: bool = True

    def run(self, world):
        for module in world.modules:
            module.zero_grad(set_to_none=self.set_to_none)


@dataclass(frozen=True, repr=False)
class ScaleGradients(Step):
    """Change every `.grad` in place, as clipping does."""

    def run(self, world):
        for p in world.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)


@dataclass(frozen=True, repr=False)
class Optimize(Step):
    """Change parameters in place."""

    def run(self, world):
        with torch.no_grad():
            for p in world.parameters():
                if p.grad is not None:
                    p -= 0.1 * p.grad


@dataclass(frozen=True, repr=False)
class MoveData(Step):
    """`p.data = ...`; nobody may read the old memory after."""

    module: int = 0
    name: str = "w"

    def run(self, world):
        tensor = getattr(world.module(self.module), self.name)
        old = tensor.data
        tensor.data = old.clone()
        old.fill_(float("nan"))


@dataclass(frozen=True, repr=False)
class Replace(Step):
    """Put a new parameter or buffer in the place of the old one."""

    module: int = 0
    name: str = "w"

    def run(self, world):
        module = world.module(self.module)
        new = getattr(module, self.name).detach().clone() * 0.5
        setattr(module, self.name, new if self.name == "n" else nn.Parameter(new))


@dataclass(frozen=True, repr=False)
class Edit(Step):
    """Change a held tensor, or an input of its call, in place under no_grad."""

    pick: int = 0
    part: int = 0
    input: bool = False

    def run(self, world):
        held = world.pick(self.pick)
        tensors = held and (held.inputs if self.input else held.tensors)
        if tensors:
            with torch.no_grad():
                tensors[self.part % len(tensors)].mul_(0.5).add_(1)


@dataclass(frozen=True, repr=False)
class Collect(Step):
    """A garbage collection."""

    def run(self, world):
        gc.collect(1)  # what is young; the whole heap takes half a second


@dataclass(frozen=True, repr=False)
class Reset(Step):
    """`cgpass.reset()`."""

    def run(self, world):
        cgpass.reset()


@dataclass(frozen=True, repr=False)
class Program(Step):
    """Steps, and how many modules share the compiled function."""

    steps: tuple = ()
    modules: int = 1
