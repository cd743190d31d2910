"""Hooks of submodules, and patched `forward`s of theirs, that come or go after the recording."""

import types

import pytest
import torch

from tests.graphed.steps import check, same, twins


def three():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def scaled(module, args, output):
    return output * 2


def shifted(module, args, output):
    return output + 1


CHANGES = {
    "hook": lambda module: module[1].register_forward_hook(scaled).remove,
    "pre-hook": lambda module: module[1].register_forward_pre_hook(lambda m, a: a[0] * 2).remove,
    "backward hook": lambda module: (
        module[1].register_full_backward_hook(lambda m, gi, go: (gi[0] * 2,)).remove
    ),
    "forward": lambda module: patched(module[1]),
}


def patched(module):
    module.forward = lambda x: x * 3
    return lambda: delattr(module, "forward")


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_they_run_and_then_the_graph_again(setting, change, caplog):
    module, plain = twins(setting, three())
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (x,))
    check(setting, graphed, plain, x, 1)
    undo = [change(each) for each in (module, plain)]
    check(setting, graphed, plain, x, 2)
    stats = graphed.graphed.stats
    assert stats.plain_calls == 2
    assert caplog.text.count("1 changed since it was recorded") == 1
    for each in undo:
        each()
    check(setting, graphed, plain, x, 2)
    assert (stats.plain_calls, stats.rerecordings) == (2, 0)


def test_one_for_another(setting, caplog):
    module, plain = twins(setting, three())
    x = setting.randn(4, 8)
    before = [each[1].register_forward_hook(scaled) for each in (module, plain)]
    graphed = setting.graphed(module, (x,))
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 0
    for each, hook in zip((module, plain), before, strict=True):
        hook.remove()
        each[1].register_forward_hook(shifted)
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 2
    graphed.graphed.reset()
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 2
    assert "reset() has it recorded again" in caplog.text


@pytest.mark.parametrize("change", ["hook", "forward"])
@pytest.mark.parametrize("of", ["closure", "method"])
def test_of_modules_that_a_function_calls(setting, of, change, caplog):
    module = setting.module(three())
    module.score = types.MethodType(lambda self, x: self(x) * 1, module)
    x = setting.randn(4, 8)
    fn, args = {
        "closure": (lambda x: module(x) * 1, (x,)),
        "method": (module.score, (x,)),
    }[of]
    graphed = setting.graphed(fn, args, modules=(module,) if of == "closure" else ())
    same(graphed(*args), fn(*args))
    if change == "hook":
        undo = module.register_forward_hook(scaled).remove
    else:
        undo = patched(module)
    same(graphed(*args), fn(*args))
    assert graphed.stats.plain_calls == 1
    assert "of Sequential changed since" in caplog.text
    undo()
    same(graphed(*args), fn(*args))
    assert (graphed.stats.plain_calls, graphed.stats.rerecordings) == (1, 0)


def test_hooks_that_a_first_run_sets(setting):
    class Sets(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(8, 8)
            self.hooked = False

        def forward(self, x):
            if not self.hooked:
                self.hooked = True
                self.inner.register_forward_hook(scaled)
            return self.inner(x)

    module, plain = twins(setting, Sets())
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,))
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 0
