"""Memory kept, and for how long."""

import gc
import weakref

import pytest
import torch

import cgpass
from tests.recompute.steps import tensor


class Watch(torch.utils._python_dispatch.TorchDispatchMode):
    """Knows which results of an operator are alive."""

    def __init__(self, op=torch.ops.aten.sin.default):
        super().__init__()
        self.op, self.refs, self.most = op, [], 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.most = max(self.most, self.alive())
        out = func(*args, **kwargs or {})
        if func is self.op:
            self.refs.append(weakref.ref(out.untyped_storage()))
        return out

    def alive(self):
        return sum(ref() is not None for ref in self.refs)


def waves(x):
    for _ in range(4):
        x = x.sin()
    return x


@pytest.fixture(autouse=True)
def no_cycles():
    """Reference counts alone have to free everything."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_but_arguments_and_results_outlives_the_forward():
    x = tensor(3, requires_grad=True)
    with Watch() as watch:
        y = cgpass.checkpoint(waves, x)
        assert watch.alive() == 1
        z = cgpass.checkpoint(lambda y: cgpass.checkpoint(waves, y.sin()), y)
        assert watch.alive() == 2
        del z  # its backward never comes
        assert watch.alive() == 1
    y.sum().backward()
    assert x.grad is not None
    del y
    assert watch.alive() == 0


def test_a_backward_holds_one_checkpoints_tensors_at_a_time():
    x = tensor(3, requires_grad=True)
    with Watch() as watch:
        y = x
        for _ in range(5):
            y = cgpass.checkpoint(waves, y)
        y = y.sum()
        assert watch.alive() <= 5
        watch.most = 0
        y.backward()
        assert watch.most <= 5 + 4
        del y
        assert watch.alive() == 0


def test_the_function_and_its_arguments_are_let_go():
    class Big:
        pass

    class Fn(torch.nn.Module):
        def forward(self, x, other, big):
            return x.sin() * other.exp()

    fn, big = Fn(), Big()
    x, other = tensor(3, requires_grad=True), tensor(3).cos()
    refs = [weakref.ref(fn), weakref.ref(big), weakref.ref(other.untyped_storage())]
    y = cgpass.checkpoint(fn, x, other, big=big)
    del fn, big, other
    assert all(ref() is not None for ref in refs)
    y.sum().backward()
    assert [ref() for ref in refs] == [None] * 3
    y = None


def test_what_a_partial_backward_does_not_use_is_dropped_after_it():
    x, w = tensor(3, requires_grad=True), tensor(3, seed=1, requires_grad=True)
    with Watch() as watch:
        y = cgpass.checkpoint(lambda x, w: x.sin().sin() * w.sin().sin(), x, w).sum()
        watch.refs.clear()
        for _ in range(2):
            torch.autograd.grad(y, w, retain_graph=True)
            assert watch.alive() == 0
        torch.autograd.grad(y, x)
        assert watch.alive() == 0


def test_reading_a_saved_tensor_outside_of_a_backward():
    x = tensor(3, requires_grad=True)
    with Watch() as watch:
        y = cgpass.checkpoint(waves, x)
        watch.refs.clear()
        saved = y.grad_fn._saved_self
        assert torch.equal(saved, x.detach().sin().sin().sin())
        assert watch.alive() == 1
        del saved
        assert watch.alive() == 0
    y.sum().backward()
