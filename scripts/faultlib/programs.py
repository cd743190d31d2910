"""Small programs for `faults.py`, each a few calls of what cgpass makes.

A program is made once: that compiles. What it returns is run many times; each run begins with `Session.restore`, gives
the same values as the one before, and hands them to `Values`.
"""

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import cgpass

Run = Callable[["Values"], None]
PROGRAMS: dict[str, Callable[["Session"], Run]] = {}


class Values:
    """What a run gave: copies, and tensors that are still held."""

    def __init__(self) -> None:
        self.found: list[torch.Tensor] = []

    def note(self, *tensors: torch.Tensor | None) -> None:
        """Copy what a tensor is now."""
        self.found += [t.detach().clone() for t in tensors if t is not None]

    def hold(self, *tensors: torch.Tensor) -> None:
        """Keep tensors, with their graphs: no later call may change them."""
        self.found += tensors


class Session:
    """The options that a program compiles with, and all state that a run begins with."""

    def __init__(self, driver: str, device: str = "cpu") -> None:
        self.driver = driver
        self.device = device
        self.options = {"driver": driver, "compiler": "eager"}
        self._tensors: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._modules: list[tuple[nn.Module, dict[str, Any], dict[str, Any]]] = []
        self._groups: list[tuple[dict[str, Any], float]] = []
        self._generator = torch.Generator("cpu").manual_seed(8)

    def compile(self, fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        return torch.compile(fn, backend="cgpass", options=self.options | options)

    def module(self, make: Callable[[], nn.Module]) -> nn.Module:
        torch.manual_seed(7)
        module = make().to(self.device)
        for each in module.modules():
            self._modules.append((each, dict(each._parameters), dict(each._buffers)))
        self.keep(*module.parameters(), *module.buffers())
        return module

    def keep(self, *tensors: torch.Tensor) -> None:
        """Have tensors be in each run what they are now."""
        self._tensors += [(t, t.detach().clone()) for t in tensors]

    def keep_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        for group in optimizer.param_groups:
            self._groups.append((group, float(group["lr"])))
        states = [v for state in optimizer.state.values() for v in state.values()]
        self.keep(*[v for v in states if isinstance(v, torch.Tensor)])

    def randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=self._generator, device="cpu").to(self.device)

    def batches(self, *shape: int, count: int = 4) -> list[torch.Tensor]:
        return [self.randn(*shape) for _ in range(count)]

    def restore(self) -> None:
        for module, parameters, buffers in self._modules:
            module._parameters.update(parameters)
            module._buffers.update(buffers)
        for tensor, value in self._tensors:
            tensor.detach().copy_(value)
            tensor.grad = None
        for group, lr in self._groups:
            group["lr"] = lr
        torch.manual_seed(7)


def program(make: Callable[[Session], Run]) -> Callable[[Session], Run]:
    PROGRAMS[make.__name__] = make
    return make


def mlp(*more: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), *(m() for m in more), nn.Linear(4, 4))


def descend(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter -= 0.1 * parameter.grad
    module.zero_grad()


def trained(
    s: Session, make: Callable[[], nn.Module], batches: list[torch.Tensor], **options: Any
) -> Run:
    module = s.module(make)
    call = s.compile(module, **options)

    def run(values: Values) -> None:
        for x in batches:
            out = call(x)
            out.square().mean().backward()
            values.note(out, *(p.grad for p in module.parameters()))
            descend(module)
        values.note(*module.state_dict().values())

    return run


@program
def inference(s: Session) -> Run:
    call, batches = s.compile(s.module(mlp())), s.batches(3, 4, count=5)

    def run(values: Values) -> None:
        with torch.no_grad():
            for x in batches:
                values.note(call(x))

    return run


@program
def held_outputs(s: Session) -> Run:
    call, batches = s.compile(s.module(mlp())), s.batches(3, 4, count=6)

    def run(values: Values) -> None:
        with torch.no_grad():
            for x in batches:
                values.hold(call(x))

    return run


@program
def held_now_and_then(s: Session) -> Run:
    call, batches = s.compile(s.module(mlp())), s.batches(3, 4, count=8)

    def run(values: Values) -> None:
        with torch.no_grad():
            for n, x in enumerate(batches):
                out = call(x)
                if n % 3 == 2:
                    values.hold(out[1:], out)
                else:
                    values.note(out)

    return run


@program
def training(s: Session) -> Run:
    return trained(s, mlp(), s.batches(3, 4))


@program
def held_gradients(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            call(x).square().mean().backward()
            values.hold(*(p.grad for p in module.parameters() if p.grad is not None))
            module.zero_grad()

    return run


@program
def accumulation(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4)

    def run(values: Values) -> None:
        for _ in range(2):
            for x in batches:
                call(x).square().mean().backward()
            values.note(*(p.grad for p in module.parameters()))
            descend(module)

    return run


@program
def forwards_before_backwards(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4, count=3)

    def run(values: Values) -> None:
        for order in ((0, 1, 2), (2, 1, 0), (1, 0, 2)):
            losses = [call(x).square().mean() for x in batches]
            for n in order:
                losses[n].backward()
            values.note(*losses, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


@program
def pending_calls(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module, max_pending_calls=2), s.batches(3, 4)

    def run(values: Values) -> None:
        for _ in range(3):
            losses = [call(x).square().mean() for x in batches]
            sum(losses).backward()
            values.note(*losses, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


@program
def forgotten_forwards(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4, count=6)

    def run(values: Values) -> None:
        for n, x in enumerate(batches):
            loss = call(x).square().mean()
            values.hold(loss.detach())
            if n % 2:
                loss.backward()
        values.note(*(p.grad for p in module.parameters()))

    return run


@program
def several_sizes(s: Session) -> Run:
    batches = [s.randn(n, 4) for n in (2, 3, 2, 5, 3, 2, 5)]
    return trained(s, mlp(), batches)


@program
def more_sizes_than_recordings(s: Session) -> Run:
    batches = [s.randn(n, 4) for n in (2, 3, 4, 2, 3, 4, 2, 3, 4)]
    return trained(s, mlp(), batches, max_recordings=2)


@program
def dropout(s: Session) -> Run:
    return trained(s, mlp(lambda: nn.Dropout(0.5)), s.batches(8, 4))


@program
def random_numbers(s: Session) -> Run:
    call, batches = s.compile(lambda x: x * torch.rand_like(x) + torch.randn(4)), s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            values.note(call(x), torch.rand(2))

    return run


@program
def paired_rng(s: Session) -> Run:
    make = checkpointed(lambda: nn.Dropout(0.5))
    return trained(s, make, s.batches(8, 4), rng="paired")


@program
def mutated_buffers(s: Session) -> Run:
    return trained(s, mlp(lambda: nn.BatchNorm1d(4)), s.batches(6, 4))


@program
def mutated_inputs(s: Session) -> Run:
    def fn(x: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        state.mul_(0.5).add_(x.sum(0))
        return (x * state).tanh()

    call, batches = s.compile(fn), s.batches(3, 4, count=6)

    def run(values: Values) -> None:
        states = [torch.ones(4), torch.zeros(4)]
        for n, x in enumerate(batches):
            values.note(call(x, states[n % 2]), *states)

    return run


@program
def moved_parameters(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4, count=6)
    others = [[nn.Parameter(p.detach() + n) for p in module.parameters()] for n in range(2)]

    def run(values: Values) -> None:
        with torch.no_grad():
            for n, x in enumerate(batches):
                linear = [module[0], module[-1]]
                names = [(layer, name) for layer in linear for name in ("weight", "bias")]
                for (layer, name), parameter in zip(names, others[n // 2 % 2], strict=True):
                    layer._parameters[name] = parameter
                values.hold(call(x))

    return run


@program
def loaded_weights(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4, count=6)

    def run(values: Values) -> None:
        first = [p.data for p in module.parameters()]
        try:
            for n, x in enumerate(batches):
                if n == 3:
                    for p in module.parameters():
                        p.data = p.data * 2
                loss = call(x).square().mean()
                loss.backward()
                values.note(loss, *(p.grad for p in module.parameters()))
                module.zero_grad()
        finally:
            for p, data in zip(module.parameters(), first, strict=True):
                p.data = data

    return run


@program
def retain_graph(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            loss = call(x).square().mean()
            loss.backward(retain_graph=True)
            loss.backward()
            values.note(loss, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


class ReadsValue(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = mlp()(), mlp()()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        count = (x.detach() > 0).sum().item()
        return self.second(x * (count + 1))


@program
def host_sync(s: Session) -> Run:
    torch._dynamo.config.capture_scalar_outputs = True
    return trained(s, ReadsValue, s.batches(3, 4))


@program
def host_sync_held(s: Session) -> Run:
    torch._dynamo.config.capture_scalar_outputs = True
    call, batches = s.compile(s.module(ReadsValue)), s.batches(3, 4, count=5)

    def run(values: Values) -> None:
        for x in batches:
            values.hold(call(x))

    return run


@program
def owned_outputs(s: Session) -> Run:
    call, batches = s.compile(s.module(mlp()), outputs="owned"), s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            values.hold(call(x))

    return run


@program
def views_of_inputs(s: Session) -> Run:
    def fn(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = (x * 2).sin()
        return x[1:], y, y[0], x.t(), torch.empty(0)

    call, batches = s.compile(fn), s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            values.hold(*call(x))

    return run


@program
def threads(s: Session) -> Run:
    call, batches = s.compile(s.module(mlp())), s.batches(3, 4)

    def run(values: Values) -> None:
        for _ in range(2):
            for x in batches:
                with torch.no_grad():
                    values.hold(call(x))
            in_a_thread(lambda: [values.hold(call(x).detach()) for x in batches])

    return run


def in_a_thread(work: Callable[[], Any]) -> None:
    errors: list[BaseException] = []

    def target() -> None:
        try:
            work()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=target)
    thread.start()
    thread.join()
    if errors:
        raise errors.pop()


@program
def reset_in_the_middle(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4)

    def run(values: Values) -> None:
        for n, x in enumerate(batches * 2):
            loss = call(x).square().mean()
            if n == 4:
                cgpass.reset()
            values.hold(loss.detach())
            loss.backward()
            values.note(*(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


@program
def wrapper(s: Session) -> Run:
    weight = s.randn(4, 4)

    def fn(x: torch.Tensor, k: int) -> dict[str, torch.Tensor]:
        y = (x @ weight).tanh()
        return {"y": y, "part": y[:k], "x": x}

    call = cgpass.CUDAGraphWrapper(fn, options=s.options)
    batches = s.batches(3, 4)

    def run(values: Values) -> None:
        with torch.no_grad():
            for x in batches * 2:
                found = call(x, 2)
                values.hold(found["y"], found["x"])
                values.note(found["part"])

    return run


@program
def wrapper_writes(s: Session) -> Run:
    state = torch.ones(4)
    s.keep(state)

    def fn(x: torch.Tensor, state: torch.Tensor, cache: torch.Tensor) -> torch.Tensor:
        state.add_(x.sum(0))
        cache.copy_(x[0])
        return x * torch.rand(4) + state

    call = cgpass.CUDAGraphWrapper(fn, static_input_indices=[1], options=s.options)
    batches = s.batches(3, 4)

    def run(values: Values) -> None:
        cache = torch.zeros(4)
        with torch.no_grad():
            for x in batches:
                values.note(call(x, state, cache), state, cache)

    return run


def checkpointed(*more: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = mlp(*more)()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return cgpass.checkpoint(self.body, x * 2)

    return Checkpointed


@program
def checkpoint(s: Session) -> Run:
    return trained(s, checkpointed(lambda: nn.Dropout(0.5)), s.batches(8, 4))


@program
def checkpoint_around(s: Session) -> Run:
    module = s.module(mlp(lambda: nn.Dropout(0.5)))
    call, batches = s.compile(module), s.batches(8, 4)

    def run(values: Values) -> None:
        for x in batches:
            loss = cgpass.checkpoint(call, x).square().mean()
            loss.backward()
            values.note(loss, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


@program
def regional(s: Session) -> Run:
    layers = s.module(lambda: nn.Sequential(*(mlp()() for _ in range(3))))
    calls = [s.compile(layer) for layer in layers]
    batches = s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            for call in calls:
                x = call(x)
            x.square().mean().backward()
            values.note(x, *(p.grad for p in layers.parameters()))
            layers.zero_grad()

    return run


@program
def hooks(s: Session) -> Run:
    module = s.module(mlp())
    call, batches = s.compile(module), s.batches(3, 4)
    for p in module.parameters():
        p.register_hook(lambda grad: grad * 2)

    def run(values: Values) -> None:
        for x in batches:
            out = call(x)
            out.register_hook(lambda grad: grad + 1)
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, torch.clone):
                more = call(out.detach())
            (out.square().mean() + more.mean()).backward()
            values.note(out, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


def stepped(s: Session, make: Callable[[nn.Module], torch.optim.Optimizer], **named: Any) -> Run:
    module = s.module(mlp())
    optimizer = make(module)

    def loss_fn(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(module(x), y)

    step = cgpass.train_step(loss_fn, optimizer, options=s.options, **named)
    batches = [(s.randn(3, 4), s.randn(3, 4)) for _ in range(5)]
    step(*batches[0])  # which makes the optimizer's state
    s.keep_optimizer(optimizer)

    def run(values: Values) -> None:
        step.flush()  # what a run that was broken off had accumulated
        s.restore()
        for n, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.1 / (1 + n // 2)
            values.hold(step(*batch))
        step.flush()
        values.note(step.grad_norm, *module.state_dict().values())
        values.note(*(p.grad for p in module.parameters()))

    return run


@program
def train_step_sgd(s: Session) -> Run:
    return stepped(s, lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, fused=True))


@program
def train_step_adamw(s: Session) -> Run:
    return stepped(s, lambda m: torch.optim.AdamW(m.parameters(), 0.1, fused=True), max_norm=1.0)


@program
def train_step_pieces(s: Session) -> Run:
    return stepped(s, lambda m: torch.optim.SGD(m.parameters(), 0.1, fused=True), accumulate=2)


def graphed_with(s: Session, **options: Any) -> tuple[nn.Module, Any]:
    module = s.module(mlp(lambda: nn.Dropout(0.5)))
    x = s.randn(3, 4).requires_grad_()
    made = cgpass.make_graphed_callables(module, (x,), options={"driver": s.driver, **options})
    s.restore()
    return module, made


@program
def graphed(s: Session) -> Run:
    module, call = graphed_with(s)
    batches = [x.requires_grad_() for x in s.batches(3, 4)]

    def run(values: Values) -> None:
        for x in batches:
            x.grad = None
            out = call(x)
            values.hold(out.detach())
            out.square().mean().backward()
            values.note(x.grad, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


@program
def graphed_pending(s: Session) -> Run:
    module, call = graphed_with(s)
    batches = [x.requires_grad_() for x in s.batches(3, 4)]

    def run(values: Values) -> None:
        for a, b in zip(batches[::2], batches[1::2], strict=True):
            losses = [call(x).square().mean() for x in (a, b)]
            for loss in losses:
                loss.backward()
            values.note(*losses, *(p.grad for p in module.parameters()))
            module.zero_grad()

    return run


@program
def optimizer_and_autocast(s: Session) -> Run:
    module = s.module(mlp())
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    call, update = s.compile(module), s.compile(optimizer.step)
    batches = s.batches(3, 4)

    def run(values: Values) -> None:
        for x in batches:
            with torch.autocast(s.device, torch.bfloat16):
                loss = call(x).float().square().mean()
            loss.backward()
            update()
            values.note(loss, *module.parameters())
            optimizer.zero_grad()

    return run
