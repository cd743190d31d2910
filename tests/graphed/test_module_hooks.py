"""Hooks and `forward`s that are set again, moved or taken away with all that keeps them."""

import collections
import functools
import gc
import weakref

import pytest
import torch

from cgpass.graphed.module_hooks import NEVER, ModuleHooks
from cgpass.runtime import fast
from tests.graphed.steps import check, same, twins


def three():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


def scaled(module, args, output):
    return output * 2


def shifted(module, args, output):
    return output + 1


def statics_of(graphed):
    return graphed.graphed._pass.statics


class Doubles:
    def hook(self, module, args, output):
        return output * 2


def set_back(module):
    module.forward = module.forward


def set_back_as_accelerate_does(module):
    before = module.forward
    module.forward = functools.update_wrapper(functools.partial(before), before)
    module.forward = before


@pytest.mark.parametrize("way", [set_back, set_back_as_accelerate_does])
@pytest.mark.parametrize("own", [False, True])
def test_a_forward_that_is_set_back_is_no_other(setting, way, own):
    module, plain = twins(setting, three())
    if own:
        for each in (module, plain):
            each[0].forward = lambda x, layer=each[0]: torch.nn.Linear.forward(layer, x) * 2
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for inner in module:
        way(inner)
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 0
    assert statics_of(graphed).unchanged()


def test_a_forward_of_another_module_or_class_is_another(setting):
    module, plain = twins(setting, three())
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for each in (module, plain):
        each[0].forward = each[2].forward
    check(setting, graphed, plain, x, 1)
    for each in (module, plain):
        each[0].forward = functools.partial(torch.nn.functional.linear, weight=each[0].weight)
    check(setting, graphed, plain, x, 1)
    assert graphed.graphed.stats.plain_calls == 2


@pytest.mark.parametrize("around", [False, True])
def test_a_wrapper_of_a_graphed_forward_is_another(setting, around):
    """`functools.update_wrapper` gives it the attributes of what it wraps."""
    module, plain = twins(setting, three())
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    setting.graphed(module[0], (x.clone(),), patch_modules=True)
    for each in (module, plain):
        before = each[0].forward
        each[0].forward = functools.partial(lambda f, x: f(x) * 2, before)
        functools.update_wrapper(each[0].forward, before)
    if around:
        check(setting, module[0], plain[0], x, 1)
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 2


def test_a_forward_that_goes_through_its_own(setting):
    """As Lightning has a strategy's wrapper call `training_step`: set, and set back in the call."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = three()

        def forward(self, x):
            return self.net(x)

        def loss(self, x):
            return self(x).square().mean()

    model = setting.module(Model())
    graphed = setting.graphed(model.loss, (setting.randn(4, 8),))
    for _ in range(3):
        x, before = setting.randn(4, 8), model.forward

        def redirected(x, before=before):
            model.forward = before
            return graphed(x)

        model.forward = redirected
        same(model(x), model.loss(x))
    assert graphed.stats.plain_calls == 0


@pytest.mark.parametrize("own", [False, True])
def test_a_submodule_that_is_graphed_later_costs_nothing_more(setting, own):
    module, plain = twins(setting, three())
    if own:
        for each in (module, plain):
            each[0].forward = lambda x, layer=each[0]: torch.nn.Linear.forward(layer, x) * 2
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    setting.graphed(module[0], (x.clone(),), patch_modules=True)
    assert not statics_of(graphed).unchanged()
    check(setting, graphed, plain, x, 2)
    assert statics_of(graphed).unchanged()
    assert graphed.graphed.stats.plain_calls == 0


def test_all_hooks_taken_away_at_once(setting):
    module, plain = twins(setting, three())
    for each in (module, plain):
        each[0].register_forward_hook(scaled)
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    before = [each[0]._forward_hooks for each in (module, plain)]
    for each in (module, plain):
        each[0]._forward_hooks = collections.OrderedDict()
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 2
    for each, hooks in zip((module, plain), before, strict=True):
        each[0]._forward_hooks = hooks
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 2
    assert statics_of(graphed).unchanged()


@pytest.mark.parametrize(
    ("kind", "hook"),
    [
        ("_forward_hooks", scaled),
        ("_forward_pre_hooks", lambda module, args: args[0] * 2),
        ("_backward_hooks", lambda module, grads, given: (grads[0] * 2,)),
        ("_backward_pre_hooks", lambda module, given: (given[0] * 2,)),
    ],
)
def test_a_hook_in_another_dictionary(setting, kind, hook):
    module, plain = twins(setting, three())
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for each in (module, plain):
        setattr(each[1], kind, collections.OrderedDict({1: hook}))
        each[1]._is_full_backward_hook = True
    check(setting, graphed, plain, x, 2)
    assert graphed.graphed.stats.plain_calls == 2


@pytest.mark.parametrize("hook", [scaled, Doubles().hook, functools.partial(scaled)])
def test_a_hook_that_is_registered_again_is_no_other(setting, hook):
    module, plain = twins(setting, three())
    plain[0].register_forward_hook(hook)
    handle = module[0].register_forward_hook(hook)
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for _ in range(2):
        handle.remove()
        handle = module[0].register_forward_hook(hook)
        check(setting, graphed, plain, x, 2)
        assert statics_of(graphed).unchanged()
    assert graphed.graphed.stats.plain_calls == 0


def test_hooks_in_another_order_are_others(setting):
    module, plain = twins(setting, three())
    handles = []
    for each in (module, plain):
        handles.append(each[0].register_forward_hook(scaled))
        each[0].register_forward_hook(shifted)
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for each, handle in zip((module, plain), handles, strict=True):
        handle.remove()
        each[0].register_forward_hook(scaled)
    check(setting, graphed, plain, x, 1)
    assert graphed.graphed.stats.plain_calls == 1


def test_a_hook_that_is_called_in_another_way_is_another(setting):
    def hook(module, args, *rest):
        return rest[-1] * len(rest)

    module, plain = twins(setting, three())
    handles = [each[0].register_forward_hook(hook) for each in (module, plain)]
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for each, handle in zip((module, plain), handles, strict=True):
        handle.remove()
        each[0].register_forward_hook(hook, with_kwargs=True)
    check(setting, graphed, plain, x, 1)
    assert graphed.graphed.stats.plain_calls == 1


@pytest.mark.parametrize("way", ["hook", "method", "dictionary", "forward"])
def test_what_was_taken_away_is_let_go_at_the_next_call(setting, way):
    class Held(Doubles):
        pass

    held, module = Held(), setting.module(three())
    gone = weakref.ref(held)
    undo = None
    if way == "hook":
        undo = module[0].register_forward_hook(lambda *args, held=held, kept=[held]: None).remove
    elif way == "forward":
        module[0].forward = lambda x, held=held: torch.nn.Linear.forward(module[0], x)
    else:
        undo = module[0].register_forward_hook(held.hook).remove
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    graphed(x)
    del held
    if way == "dictionary":
        module[0]._forward_hooks = collections.OrderedDict()
    elif way == "forward":
        del module[0].forward
    else:
        undo()
    undo = None
    graphed(x)
    gc.collect()
    assert gone() is None


def test_what_has_no_weak_references_is_compared_all_the_same():
    class Hook:
        __slots__ = ()

        def __call__(self, module, args, output):
            return output

    hook, module, hooks = Hook(), torch.nn.Tanh(), ModuleHooks()
    handle = module.register_forward_hook(hook)
    hooks.watch(module, "path")
    hooks.note()
    handle.remove()
    assert hooks.changed() == ["path"]
    assert hooks.entries is NEVER
    assert not fast.unchanged(*hooks.entries)
    handle = module.register_forward_hook(hook)
    assert hooks.changed() == []
    assert fast.unchanged(*hooks.entries)
    handle.remove()
    module.register_forward_hook(Hook())
    assert hooks.changed() == ["path"]


def test_parameters_that_became_none_are_recorded_with_other_hooks(setting):
    module, plain = twins(setting, three())
    x = setting.randn(4, 8)
    graphed = setting.graphed(module, (x,), patch_modules=True)
    for each in (module, plain):
        each[0].bias = None
        each[1].register_forward_hook(scaled)
    check(setting, graphed, plain, x, 2)
    stats = graphed.graphed.stats
    assert (stats.rerecordings, stats.plain_calls) == (1, 0)


def test_hooks_of_a_module_whose_forward_is_called_are_not_looked_at(setting):
    module, plain = twins(setting, three())
    graphed = setting.graphed(module.forward, (setting.randn(4, 8),))
    for each in (module, plain):
        each.register_forward_hook(scaled)
    for _ in range(2):
        x = setting.randn(4, 8)
        same(graphed(x), plain.forward(x))
    assert graphed.stats.plain_calls == 0
    module[1].register_forward_hook(scaled)
    plain[1].register_forward_hook(scaled)
    same(graphed(x), plain.forward(x))
    assert graphed.stats.plain_calls == 1
