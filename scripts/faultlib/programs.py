"""Small programs for `faults.py`, each a few calls of what cgpass makes.

A program is run many times with one session, which makes modules, inputs and what is compiled in the first run alone. Each
run begins with `Session.begin`, gives the same values as the one before, and tells them with `note` and `hold`.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import torch
from benchlib.models import Attention, feed_forward
from torch import nn
from torch.nn import functional as F

import cgpass

T = TypeVar("T")
Program = Callable[["Session"], None]


class Session:
    """A program's objects, all state that a run begins with, and the values that it gave."""

    def __init__(self, driver: str, device: str = "cpu") -> None:
        self.device = device
        self.options = {"driver": driver, "compiler": "eager"}
        self.values: list[torch.Tensor] = []
        self._made: list[Any] = []
        self._used = 0
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._generator = torch.Generator("cpu").manual_seed(8)

    def begin(self) -> list[torch.Tensor]:
        """Put all back to where a run begins; returns the list of its values, empty yet."""
        self._used, self.values = 0, []
        self.restore()
        return self.values

    def restore(self) -> None:
        for tensor, value in self._tensors:
            tensor.detach().copy_(value)
            tensor.grad = None
        torch.manual_seed(7)

    def once(self, make: Callable[[], T]) -> T:
        """Make something in the first run; later ones get the same."""
        if self._used == len(self._made):
            self._made.append(make())
        self._used += 1
        return self._made[self._used - 1]

    def compile(self, fn: Callable[..., Any], **more: Any) -> Callable[..., Any]:
        return self.once(lambda: torch.compile(fn, backend="cgpass", options=self.options | more))

    def module(self, make: Callable[[], nn.Module]) -> nn.Module:
        def made() -> nn.Module:
            torch.manual_seed(7)
            module = make().to(self.device)
            self.keep(*module.parameters(), *module.buffers())
            return module

        return self.once(made)

    def compiled(self, make: Callable[[], nn.Module], **more: Any) -> tuple[Any, Any]:
        module = self.module(make)
        return module, self.compile(module, **more)

    def batches(self, *shape: int, count: int = 4) -> list[torch.Tensor]:
        def made() -> torch.Tensor:
            return torch.randn(*shape, generator=self._generator, device="cpu").to(self.device)

        return [self.once(made) for _ in range(count)]

    def keep(self, *tensors: torch.Tensor) -> None:
        """Have tensors be in each run what they are now."""
        self._tensors += [(t, t.detach().clone()) for t in tensors]

    def note(self, *tensors: torch.Tensor | None) -> None:
        """Copy what a tensor is now."""
        self.values += [t.detach().clone() for t in tensors if t is not None]

    def note_gradients(self, module: nn.Module) -> None:
        self.note(*(p.grad for p in module.parameters()))
        module.zero_grad()

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keep tensors, with their graphs: no later call may change them."""
        self.values += tensors


def mlp(*more: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *(m() for m in more), nn.Linear(4, 4))


dropped = mlp(lambda: nn.Dropout(0.5))


def loss_of(out: torch.Tensor) -> torch.Tensor:
    return out.square().mean()


def descend(s: Session, module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    s.note_gradients(module)


def train(s: Session, make: Callable[[], nn.Module], *shape: int, **options: Any) -> None:
    module, call = s.compiled(make, **options)
    train_on(s, module, [call], s.batches(*shape))


def train_on(s: Session, module: nn.Module, calls: list[Any], batches: list[torch.Tensor]) -> None:
    for x in batches:
        for call in calls:
            x = call(x)
        loss_of(x).backward()
        s.note(x)
        descend(s, module)
    s.note(*module.state_dict().values())


def backwards(
    s: Session, module: nn.Module, call: Any, batches: list[torch.Tensor], *orders: tuple[int, ...]
) -> None:
    """Call all forwards before their backwards, whose order is another one each time."""
    for order in orders:
        losses = [loss_of(call(x)) for x in batches]
        for k, n in enumerate(order):
            losses[n].backward(retain_graph=n in order[k + 1 :])
        s.note(*losses)
        s.note_gradients(module)


def hold_all(s: Session, make: Callable[[], nn.Module], **options: Any) -> None:
    call = s.compiled(make, **options)[1]
    for x in s.batches(3, 4, count=6):
        s.hold(call(x))


def more_sizes_than_recordings(s: Session) -> None:
    module, call = s.compiled(mlp(), max_recordings=2)
    train_on(s, module, [call], [x for n in (2, 3, 4) * 3 for x in s.batches(n, 4, count=1)])


@torch.no_grad()
def held_now_and_then(s: Session) -> None:
    call = s.compiled(mlp())[1]
    for n, x in enumerate(s.batches(3, 4, count=8)):
        out = call(x)
        if n % 3 == 2:
            s.hold(out[1:], out)
        else:
            s.note(out)


def mutated_inputs(s: Session) -> None:
    def fn(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x.sum(0))
        return (x * state).tanh()

    call, states = s.compile(fn), [torch.ones(4), torch.zeros(4)]
    for n, x in enumerate(s.batches(3, 4, count=6)):
        s.note(call(x, states[n % 2]), *states)


@torch.no_grad()
def moved_parameters(s: Session) -> None:
    module, call = s.compiled(mlp())
    others = s.once(
        lambda: [[nn.Parameter(p.detach() + n) for p in module.parameters()] for n in range(2)]
    )
    names = [(module[k], name) for k in (0, -1) for name in ("weight", "bias")]
    for n, x in enumerate(s.batches(3, 4, count=6)):
        for (layer, name), parameter in zip(names, others[n // 2 % 2], strict=True):
            layer._parameters[name] = parameter
        s.hold(call(x))


class ReadsValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp()(), mlp()()
        torch._dynamo.config.capture_scalar_outputs = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        count = (x.detach() > 0).sum().item()
        return self.second(x * (count + 1))


def views_of_inputs(s: Session) -> None:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 2).sin()
        return x[1:], y, y[0], x.t(), torch.empty(0)

    call = s.compile(fn)
    for x in s.batches(3, 4):
        s.hold(*call(x))


def threads(s: Session) -> None:
    call, batches = s.compiled(mlp())[1], s.batches(3, 4)
    for _ in range(2):
        for x in batches:
            with torch.no_grad():
                s.hold(call(x))
        with ThreadPoolExecutor(1) as pool:
            pool.submit(lambda: [s.hold(call(x).detach()) for x in batches]).result()


def reset_in_the_middle(s: Session) -> None:
    module, call = s.compiled(mlp())
    for n, x in enumerate(s.batches(3, 4) * 2):
        loss = loss_of(call(x))
        if n == 4:
            cgpass.reset()
        s.hold(loss.detach())
        loss.backward()
        s.note_gradients(module)


@torch.no_grad()
def wrapper(s: Session) -> None:
    (weight,) = s.batches(4, 4, count=1)

    def fn(x: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
        y = (x @ weight).tanh()
        return {"y": y, "part": y[:k], "x": x}

    call = s.once(lambda: cgpass.CUDAGraphWrapper(fn, options=s.options))
    for x in s.batches(3, 4) * 2:
        found = call(x, 2)
        s.hold(found["y"], found["x"])
        s.note(found["part"])


@torch.no_grad()
def wrapper_writes(s: Session) -> None:
    def fn(x: torch.Tensor, state: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum(0))
        cache.copy_(x[0])
        return x * torch.rand(4) + state

    wrap = cgpass.CUDAGraphWrapper
    call = s.once(lambda: wrap(fn, static_input_indices=[1], options=s.options))
    (state,), cache = s.batches(4, count=1), torch.zeros(4)
    s.once(lambda: s.keep(state))
    for x in s.batches(3, 4):
        s.note(call(x, state, cache), state, cache)


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = dropped()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return cgpass.checkpoint(self.body, x * 2)


def regional(s: Session) -> None:
    layers = s.module(lambda: nn.Sequential(*(mlp()() for _ in range(3))))
    train_on(s, layers, [s.compile(layer) for layer in layers], s.batches(3, 4))


def hooks(s: Session) -> None:
    module, call = s.compiled(mlp())
    s.once(lambda: [p.register_hook(lambda grad: grad * 2) for p in module.parameters()])
    for x in s.batches(3, 4):
        out = call(x)
        out.register_hook(lambda grad: grad + 1)
        with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
            more = call(out.detach())
        (loss_of(out) + more.mean()).backward()
        s.note(out)
        s.note_gradients(module)


def step(s: Session, kind: type[torch.optim.Optimizer], named: dict[str, Any], **more: Any) -> None:
    module = s.module(mlp())
    optimizer = s.once(lambda: kind(module.parameters(), 0.1, fused=True, **more))
    batches = list(zip(s.batches(3, 4, count=5), s.batches(3, 4, count=5), strict=True))

    def made() -> cgpass.TrainStep:
        def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(module(x), y)

        step = cgpass.train_step(loss_fn, optimizer, options=s.options, **named)
        step(*batches[0])  # which makes the optimizer's state
        states = [v for state in optimizer.state.values() for v in state.values()]
        s.keep(*[v for v in states if isinstance(v, torch.Tensor)])
        return step

    call = s.once(made)
    call.flush()  # what a run that was broken off had accumulated
    s.restore()
    for n, batch in enumerate(batches):
        optimizer.param_groups[0]["lr"] = 0.1 / (1 + n // 2)
        s.hold(call(*batch))
    call.flush()
    s.note(call.grad_norm, *module.state_dict().values(), *(p.grad for p in module.parameters()))


def graph(s: Session) -> tuple[nn.Module, Any, list[torch.Tensor]]:
    """A module that is graphed by hand, and its inputs."""
    module, inputs = s.module(dropped), s.batches(3, 4)
    sample, options = torch.ones(3, 4, requires_grad=True), {"driver": s.options["driver"]}
    call = s.once(lambda: cgpass.make_graphed_callables(module, (sample,), options=options))
    s.once(lambda: s.keep(*(x.requires_grad_() for x in inputs)))
    s.restore()
    return module, call, inputs


def graphed(s: Session) -> None:
    module, call, inputs = graph(s)
    for x in inputs:
        out = call(x)
        s.hold(out.detach())
        loss_of(out).backward()
        s.note(x.grad)
        s.note_gradients(module)


class Tokens(nn.Module):
    """Embedded tokens through two blocks, and a head that shares its weight with the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        layers = [layer for _ in "ab" for layer in (Attention(8, 0.1), feed_forward(8))]
        self.blocks = nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.mul(5).long().abs().clamp(max=15)
        return self.blocks(self.embedding(tokens)) @ self.embedding.weight.t()


def convolutions() -> nn.Module:
    def block(i: int, o: int) -> list[nn.Module]:
        return [nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), nn.ReLU()]

    layers = [*block(3, 4), nn.MaxPool2d(2), *block(4, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(4, 4))


PROGRAMS: dict[str, Program] = {
    "held_now_and_then": held_now_and_then,
    "forwards_before_backwards": lambda s: backwards(
        s, *s.compiled(mlp()), s.batches(3, 4, count=3), (0, 1, 2), (2, 1, 0), (1, 0, 2)
    ),
    "pending_calls": lambda s: backwards(
        s, *s.compiled(mlp(), max_pending_calls=2), s.batches(3, 4), *[(0, 1, 2, 3)] * 3
    ),
    "retain_graph": lambda s: backwards(
        s, *s.compiled(mlp()), s.batches(3, 4, count=1), *[(0, 0)] * 4
    ),
    "graphed_pending": lambda s: backwards(s, *graph(s), (0, 1, 3, 2), (3, 0, 1, 2)),
    "more_sizes_than_recordings": more_sizes_than_recordings,
    "mutated_inputs": mutated_inputs,
    "moved_parameters": moved_parameters,
    "views_of_inputs": views_of_inputs,
    "threads": threads,
    "reset_in_the_middle": reset_in_the_middle,
    "wrapper": wrapper,
    "wrapper_writes": wrapper_writes,
    "regional": regional,
    "hooks": hooks,
    "graphed": graphed,
    "gpt": lambda s: train(s, Tokens, 2, 6),
    "convolutions": lambda s: train(s, convolutions, 2, 3, 8, 8),
    "attention": lambda s: train(
        s, lambda: nn.Sequential(Attention(8, 0.1), Attention(8, 0.1)), 2, 6, 8
    ),
    "dropout": lambda s: train(s, dropped, 8, 4),
    "mutated_buffers": lambda s: train(s, mlp(lambda: nn.BatchNorm1d(4)), 6, 4),
    "host_sync": lambda s: train(s, ReadsValue, 3, 4),
    "checkpoint": lambda s: train(s, Checkpointed, 8, 4),
    "paired_rng": lambda s: train(s, Checkpointed, 8, 4, rng="paired"),
    "owned_outputs": lambda s: hold_all(s, mlp(), outputs="owned"),
    "owned_training": lambda s: train(s, dropped, 8, 4, outputs="owned"),
    "static_unchecked": lambda s: train(s, mlp(), 3, 4, static_input_check="off"),
    "host_sync_held": lambda s: hold_all(s, ReadsValue),
    "train_step_sgd": lambda s: step(s, torch.optim.SGD, {}, momentum=0.9),
    "train_step_adamw": lambda s: step(s, torch.optim.AdamW, {"max_norm": 1.0}),
    "train_step_pieces": lambda s: step(s, torch.optim.SGD, {"accumulate": 2}),
}
