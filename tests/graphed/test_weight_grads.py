"""Weights' gradients split off the backward, for callables that offer it."""

import pytest
import torch

import cgpass
from tests.graphed.steps import clear_grads, graphed_twins, same, same_grads, twins


class _Input(torch.autograd.Function):
    """A product whose backward leaves the weight's gradient for later."""

    @staticmethod
    def forward(ctx, x, weight, later):
        ctx.save_for_backward(x, weight)
        ctx.later = later
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        ctx.later.append((grad, x, weight))
        return grad @ weight, None, None


class Split(torch.nn.Module):
    """As Transformer Engine's linear layers with delayed weight gradients."""

    def __init__(self, split=True):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(8, 8))
        self.bias = torch.nn.Parameter(torch.randn(8))
        self.later = []
        self.split = split

    def forward(self, x):
        if not self.split:
            return (x @ self.weight.t() + self.bias).sin()
        return (_Input.apply(x, self.weight, self.later) + self.bias).sin()

    def need_backward_dw(self):
        return self.split

    def backward_dw(self):
        grad, x, _ = self.later.pop(0)
        made = grad.t() @ x
        self.weight.grad = made if self.weight.grad is None else self.weight.grad + made


class Later(Split):
    """Its input is made inside, and saved for longer than the backward."""

    def forward(self, x):
        return super().forward(x.cos())


class SeveralResults(Split):
    """A loss may use either result."""

    def forward(self, x):
        return x * 1, super().forward(x)


class View(Split):
    def forward(self, x):
        return super().forward(x).view(2, 2, 8)


class Unseen(Split):
    """No counter tells of its gradients."""

    def backward_dw(self):
        grad, x, _ = self.later.pop(0)
        if self.weight.grad is None:
            self.weight.grad = torch.zeros_like(self.weight)
        self.weight.grad.data.add_(grad.t() @ x)


class KeepsWeight(Split):
    """What is due holds the weight itself."""

    def backward_dw(self):
        grad, x, weight = self.later.pop(0)
        made = grad.t() @ x
        weight.grad = made if weight.grad is None else weight.grad + made


def take(fns, module, xs, steps):
    """Take steps with functions and inputs, and give the inputs' gradients after each.

    `f1` is a forward of the second, `b1` its backward, `retain1` one that retains, `stop1` one that stops at the result,
    `write1` a write to that; `w` makes weights' gradients; `move` and `home` are places of the weight.
    """
    inputs = [x.detach().clone().requires_grad_(x.requires_grad) for x in xs]
    outs, home = {}, module.weight.data
    for step in steps.split():
        kind, number = step.rstrip("012"), int(step[-1]) if step[-1].isdigit() else 0
        fn, out = fns[number], outs.get(number)
        if kind == "f":
            found = fn(inputs[number])
            outs[number] = found[-1] if isinstance(found, tuple) else found
        elif kind in ("b", "retain"):
            out.square().sum().backward(retain_graph=kind == "retain")
        elif kind == "stop":
            torch.autograd.grad(out.square().sum(), out)
        elif kind == "w" and module.split:
            fn.backward_dw()
        elif kind == "write":
            out += 1
        elif kind in ("move", "home"):
            module.weight.data = home.clone() if kind == "move" else home
        elif kind in ("train", "eval") or (kind in ("reset", "close") and hasattr(fn, kind)):
            getattr(fn, kind)()
        yield [x.grad for x in inputs]


TAKEN = {
    "a graph that is retained": (Split, "f0 retain0 w b0 w f1 retain1 w b1 w"),
    "what is saved for longer is retained": (Later, "f0 retain0 w b0 w f1 retain1 w b1 w"),
    "backwards without a graph take their turn": (Split, "f0 f1 b1 b0 w w"),
    "any result of a call without a graph counts": (SeveralResults, "eval f0 b0 train move f1 w"),
    "a backward that stops is none of the module's": (Split, "eval f0 stop0 b0 w train f0 b0 w"),
    "gradients that no counter tells of": (Unseen, "close f0 b0 f1 b1 w w"),
    "a view that is written has its turn": (View, "eval f0 write0 b0 train move f1 w"),
    "weights that moved before the backward": (KeepsWeight, "f0 move b0 w"),
    "weights of a backward that lost its graph": (KeepsWeight, "f0 move reset b0 w"),
    "a backward that moved there and back": (Split, "f0 move retain0 w home retain0 w"),
    "a recording leaves alone what is due": (Split, "f0 reset b0 f1 w f2"),
}
PLAIN_CALLS = {
    "a graph that is retained": 0,
    "what is saved for longer is retained": 0,
    "a recording leaves alone what is due": 2,
}


@pytest.mark.parametrize("what", TAKEN)
def test_each_step_has_the_numbers_of_the_module_alone(setting, what):
    make, steps = TAKEN[what]
    options = {"max_rerecords": 0} if "take their turn" in what else {}
    grad = "retained" in what
    graphed, module, plain = graphed_twins(setting, make(), grad=grad, **options)
    xs = [setting.randn(4, 8, grad=grad) for _ in range(3)]
    both = [take([fn] * 3, own, xs, steps) for fn, own in ((graphed, module), (plain, plain))]
    for found, expected in zip(*both, strict=True):
        same_grads(module, plain)
        same(found, expected)
    stats = graphed.graphed.stats
    assert stats.plain_calls == PLAIN_CALLS.get(what, stats.plain_calls)


@pytest.mark.parametrize(
    "steps",
    [
        "f0 b0 w0 f1 f2 b1 w1 b2 w2",
        "f0 f1 f2 b0 b1 b2 w0 w1 w2",
        "f0 b0 f1 f2 b1 b2 w0 w1 w2",
    ],
    ids=["as recorded", "forwards first", "weights last"],
)
def test_weight_gradients_that_come_late(setting, steps):
    module, plain = twins(setting, Split())
    plain.split = False
    graphed = setting.graphed(
        (module,),
        tuple((setting.randn(4, 8, grad=True),) for _ in range(3)),
        order=[1, -1, 1, 1, -1, -1],
    )
    for _ in range(2):
        clear_grads(module, plain)
        xs = setting.randn(3, 4, 8, grad=True)
        *_, found = take(graphed, module, xs, steps)
        *_, expected = take([plain] * 3, plain, xs, steps)
        same(found, expected)
        same(module.bias.grad, plain.bias.grad)
        torch.testing.assert_close(module.weight.grad, plain.weight.grad)


def learn(graphed, module, plain, *args):
    """A step each."""
    for fn in (graphed, plain):
        fn(*args).square().sum().backward()
        fn.backward_dw()
    same_grads(module, plain)


class Tolerant(Split):
    """Leaves a gradient out only where its weight wants one."""

    def forward(self, x):
        if not self.weight.requires_grad:
            return (x @ self.weight.t() + self.bias).sin()
        return super().forward(x)


class TwoTolerant(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = Tolerant(), Tolerant()

    def forward(self, x):
        return self.b(self.a(x).tanh())

    def backward_dw(self):
        for each in (self.b, self.a):
            if each.later:
                each.backward_dw()


@pytest.mark.parametrize("frozen", [(), ("a",), ("b",), ("a", "b")])
def test_weights_that_were_frozen_at_first(setting, frozen):
    module, plain = twins(setting, TwoTolerant())
    for each in (module, plain):
        for name in frozen:
            getattr(each, name).weight.requires_grad_(False)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    x = setting.randn(4, 8, grad=True)
    for wanted in ("ab", "a", "b", "", "ab"):
        for fn in (graphed, plain):
            fn.a.weight.requires_grad_("a" in wanted)
            fn.b.weight.requires_grad_("b" in wanted)
        learn(graphed, module, plain, x)


class Fused(Tolerant):
    """Adds to `main_grad`, and leaves `.grad` alone."""

    def backward_dw(self):
        grad, x, _ = self.later.pop(0)
        self.weight.main_grad.addmm_(grad.t(), x)


@pytest.mark.parametrize("frozen", [False, True])
def test_gradients_that_are_added_elsewhere(setting, frozen):
    module, plain = twins(setting, Fused())
    for each in (module, plain):
        each.weight.main_grad = torch.zeros_like(each.weight)
        each.weight.requires_grad_(not frozen)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    for wanted in (True, True, False, True):
        x = setting.randn(4, 8)
        for fn in (graphed, plain):
            fn.weight.requires_grad_(wanted)
            fn(x).square().sum().backward()
            if wanted:
                fn.backward_dw()
        same(module.weight.main_grad, plain.weight.main_grad)
    same_grads(module, plain)


class OneOfTwo(TwoTolerant):
    def forward(self, x, first):
        return self.a(x) if first else self.b(x)


def test_a_flag_tells_which_weights_are_left_out(setting):
    module, plain = twins(setting, OneOfTwo())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True), True))
    for first in (True, False, True, False, False):
        learn(graphed, module, plain, setting.randn(4, 8), first)


class InTraining(TwoTolerant):
    """Leaves weights' gradients out while it trains."""

    def forward(self, x):
        if not self.training:
            return (x @ self.a.weight.t()).tanh()
        return self.a(x).tanh()


@pytest.mark.parametrize("resets", [False, True])
def test_gradients_that_are_left_out_in_training_alone(setting, resets):
    graphed, module, plain = graphed_twins(setting, InTraining(), grad=True)
    for trains in (True, False, True):
        for fn in (graphed, plain):
            fn.train(trains)
        if resets:
            graphed.reset()
        learn(graphed, module, plain, setting.randn(4, 8))


class Offers(torch.nn.Linear):
    """Has the method, as Megatron's layers do, and leaves nothing out."""

    def backward_dw(self):
        pass


def test_a_method_that_does_nothing_need_not_be_called(setting):
    module = setting.module(Offers(8, 8))
    module.weight.main_grad = torch.zeros_like(module.weight)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
    for _ in range(4):
        graphed(setting.randn(4, 8)).sum().backward()
    assert not graphed.graphed.due
    assert graphed.graphed.stats.rerecordings == 0


class AddsInPlace(Split):
    def backward_dw(self):
        grad, x, _ = self.later.pop(0)
        self.weight.grad.add_(grad.t() @ x)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_method_that_fails_in_a_warm_up_fails(setting, frozen):
    module = setting.module(AddsInPlace())
    module.register_buffer("table", setting.randn(2))
    module.bias.requires_grad_(not frozen)
    if not frozen:
        with pytest.raises(AttributeError, match="add_"):
            setting.graphed(module, (setting.randn(4, 8),))
        return
    graphed = setting.graphed(module, (setting.randn(4, 8),))
    graphed(setting.randn(4, 8)).sum().backward()
    with pytest.raises(cgpass.errors.GraphedBackwardError, match=r"raised AttributeError: .*add_"):
        graphed.backward_dw()


class OfAChild(torch.nn.Module):
    """Has the method among its attributes."""

    def __init__(self):
        super().__init__()
        self.child = Split()
        self.backward_dw = self.child.backward_dw

    def forward(self, x):
        return self.child(x)


def test_a_method_among_the_attributes(setting):
    graphed, module, plain = graphed_twins(setting, OfAChild())
    learn(graphed, module, plain, setting.randn(4, 8))


def test_an_error_of_the_modules_own_is_raised(setting):
    graphed, module, plain = graphed_twins(setting, Split(), grad=False)
    graphed.close()
    x = setting.randn(4, 8)
    for fn in (graphed, plain):
        fn(x).sum().backward()
        fn(x * 2).sum().backward()
    module.later.insert(0, "no activation")
    with pytest.raises(ValueError, match="unpack"):
        graphed.backward_dw()
    for fn in (graphed, plain):
        fn.backward_dw()
    same_grads(module, plain)


def test_a_module_inside_that_leaves_gradients_out_is_refused(setting):
    module, plain = twins(setting, Split())
    for fn, modules in ((torch.nn.Sequential(module), ()), (lambda x: module(x) * 2, (module,))):
        with pytest.raises(cgpass.errors.GraphedArgumentError, match="Record that one alone"):
            setting.graphed(fn, (setting.randn(4, 8),), modules=modules)
    graphed = setting.graphed(module.forward, (setting.randn(4, 8, grad=True),))
    learn(graphed, module, plain, setting.randn(4, 8))


def test_another_module_of_its_class_makes_its_own(setting):
    graphed, module, _ = graphed_twins(setting, Split(), grad=False)
    other, plain = twins(setting, type(graphed)())
    x = setting.randn(4, 8)
    graphed(x).sum().backward()
    learn(other, other, plain, x)
    assert module.weight.grad is None
    graphed.backward_dw()
    assert module.weight.grad is not None


def test_a_second_backward_comes_after_what_the_first_left(setting):
    graphed, module, plain = graphed_twins(setting, Split())
    plain.split = False
    x = setting.randn(4, 8)
    found = graphed(x)
    found.square().sum().backward(retain_graph=True)
    with pytest.raises(cgpass.errors.GraphedBackwardError, match="before the backward_dw"):
        found.sum().backward(retain_graph=True)
    graphed.backward_dw()
    plain(x).square().sum().backward()
    same_grads(module, plain)


def test_graphs_that_are_freed_before_the_weights_gradients(setting):
    """Only the graphs had what those are made of: an error, and no numbers of another call."""
    graphed, module, plain = graphed_twins(setting, Split(), grad=False)
    graphed(setting.randn(4, 8)).sum().backward()
    graphed.reset()
    with pytest.raises(
        cgpass.errors.GraphedBackwardError, match="freed between a backward and its backward_dw"
    ):
        graphed.backward_dw()
    module.zero_grad()
    learn(graphed, module, plain, setting.randn(4, 8))
