"""Modules whose parameters are tied, copied to a new layout or replaced, and whose submodules, modes or hooks change."""

import copy
import functools

import pytest
import torch

import cgpass
from tests.graphed.steps import (
    check,
    clear_grads,
    graphed_twins,
    net,
    same,
    same_grads,
    step,
    twins,
)


def pair():
    return torch.nn.Sequential(
        torch.nn.Linear(8, 8, bias=False), torch.nn.Tanh(), torch.nn.Linear(8, 8, bias=False)
    )


def check_recorded(setting, graphed, module, plain, rerecordings):
    clear_grads(module, plain)
    check(setting, graphed, plain)
    same_grads(module, plain)
    stats = getattr(graphed, "graphed", graphed).stats
    assert (stats.rerecordings, stats.plain_calls) == (rerecordings, 0)


def test_another_layout_at_the_same_address(setting):
    graphed, module, plain = graphed_twins(setting, pair())
    check_recorded(setting, graphed, module, plain, 0)
    for each in (module, plain):
        each[0].weight.data = each[0].weight.data.t()
    check_recorded(setting, graphed, module, plain, 1)
    for each in (module, plain):
        each[0].weight.data = each[0].weight.data.t()
    check_recorded(setting, graphed, module, plain, 1)


def test_weights_tied_and_untied_after_recording(setting):
    graphed, module, plain = graphed_twins(setting, pair())
    kept = module[2].weight  # what comes to lie in its place would be where it was recorded
    for each in (module, plain):
        each[2].weight = each[0].weight
    for _ in range(2):
        check_recorded(setting, graphed, module, plain, 1)
    untied = torch.randn(8, 8, device=setting.device)
    for each in (module, plain):
        each[2].weight = torch.nn.Parameter(untied.clone())
    for _ in range(2):
        check_recorded(setting, graphed, module, plain, 2)
    del kept


class Recomputed(torch.nn.Module):
    """Has two parameters of one shape, and recomputes with them."""

    def __init__(self):
        super().__init__()
        self.a, self.b = (torch.nn.Parameter(torch.randn(8)) for _ in range(2))

    def inner(self, x):
        return torch.tanh(x * self.a + self.b).sin()

    def forward(self, x):
        return cgpass.checkpoint(self.inner, x)


def register_again(module):
    a = module.a
    del module.a
    module.a = a


def untie(module):
    module[0].weight.data = module[0].weight.data.clone()
    module[2].weight = torch.nn.Parameter(module[2].weight.detach().clone())


def remove(module):
    module[2].weight = None


def tied():
    module = pair()
    module[2].weight = module[0].weight
    return module


@pytest.mark.parametrize("resets", [False, True])
@pytest.mark.parametrize(
    ("make", "change"), [(Recomputed, register_again), (tied, untie), (pair, remove)]
)
def test_a_pending_backward_has_the_members_of_its_forward(setting, make, change, resets):
    graphed, module, plain = graphed_twins(setting, make(), grad=True)
    x, y = (setting.randn(4, 8, grad=True) for _ in range(2))
    y.data = x.data.clone()
    members = [list(each.parameters()) for each in (module, plain)]
    outs = graphed(x), plain(y)
    for each in (module, plain):
        change(each)
    if resets:
        graphed.graphed.reset()
        if change is not remove:
            same(graphed(x.detach()), plain(y.detach()))
    for out in outs:
        out.square().sum().backward()
    same(x.grad, y.grad)
    same(*([each.grad for each in own] for own in members))


def test_another_flag_is_recorded_though_one_is_refused(setting, caplog):
    def fn(x, reads):
        if reads:
            float(x.sum())
        return x * 2

    x = setting.randn(4, 8)
    graphed = setting.graphed(fn, (x, False))
    same(graphed(x, True), x * 2)
    same(graphed(x, True), x * 2)
    same(graphed(x, False), x * 2)
    assert graphed.stats.plain_calls == 2
    assert caplog.text.count("can't be captured") == 1


def test_replaced_submodules(setting, caplog):
    graphed, module, plain = graphed_twins(setting, pair())
    first, x = (module[1], plain[1]), setting.randn(4, 8, grad=True)
    module[1] = plain[1] = torch.nn.ReLU()
    same(step(graphed, x)[0], step(plain, x)[0])
    module[1], plain[1] = first
    same(step(graphed, x)[0], step(plain, x)[0])
    for each in (module, plain):
        each.append(torch.nn.Tanh())
    same(step(graphed, x)[0], step(plain, x)[0])
    assert caplog.text.count("a member of Sequential changed since it was recorded (reset()") == 1
    assert graphed.graphed.stats.plain_calls == 2
    graphed.reset()
    for _ in range(2):
        same(step(graphed, x)[0], step(plain, x)[0])
    same_grads(module, plain)
    assert graphed.graphed.stats.plain_calls == 2


class Lazily(torch.nn.Module):
    """Makes a buffer when it first runs."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
        self.register_buffer("table", None)

    def forward(self, x):
        if self.table is None:
            self.table = torch.arange(8.0, device=x.device)
        return self.inner(x) * self.table


def test_what_the_first_call_makes(setting):
    module = Lazily().to(setting.device)
    before = []
    hooks = [{"pre_forward": lambda *args: before.append(args)}]
    sample = (setting.randn(4, 8, grad=True),)
    graphed = setting.graphed(module, sample, num_warmup_iters=1, capture_time_hooks=hooks)
    assert len(before) == 2
    plain = Lazily().to(setting.device)
    plain(setting.randn(4, 8))
    plain.load_state_dict(module.state_dict())
    check_recorded(setting, graphed, module, plain, 0)
    module.table = module.table * 2
    plain.table = plain.table * 2
    check_recorded(setting, graphed, module, plain, 1)
    module.table = plain.table = None
    graphed.reset()
    for _ in range(2):
        check_recorded(setting, graphed, module, plain, 1)


# ---- functions


def forms_of(module):
    return {
        "method": module.forward,
        "closure": lambda x: module(x) * 1,
        "partial": functools.partial(torch.nn.Module.__call__, module),
    }


FORMS = ["method", "closure", "partial"]


@pytest.mark.parametrize("form", FORMS)
def test_functions_with_the_modules_that_they_use(setting, form):
    module, plain = twins(
        setting, torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8))
    )
    graphed = setting.graphed(
        forms_of(module)[form], (setting.randn(4, 8, grad=True),), modules=(module,)
    )
    same(module[1].running_mean, plain[1].running_mean)
    check_recorded(setting, graphed, module, plain, 0)
    same(module[1].running_mean, plain[1].running_mean)
    for each in (module, plain):
        each.load_state_dict({k: v * 2 for k, v in each.state_dict().items()}, assign=True)
    check_recorded(setting, graphed, module, plain, 1)
    for each in (module, plain):
        each[0].bias.requires_grad_(False)
    check_recorded(setting, graphed, module, plain, 2)
    for each in (module, plain):
        each.eval()
    x = setting.randn(4, 8)
    same(graphed(x), plain(x))
    assert graphed.stats.plain_calls == 1


def test_functions_that_use_what_they_do_not_name_are_refused(setting):
    module, sample = setting.module(net()), (setting.randn(4, 8),)
    with pytest.raises(
        cgpass.errors.GraphedArgumentError,
        match=r"shape \[8, 8\] .* neither an argument nor read as .* modules=\(model,\)",
    ):
        setting.graphed(lambda x: module(x), sample)
    weight = module[0].weight
    with pytest.raises(cgpass.errors.GraphedArgumentError, match="read it there"):
        setting.graphed(lambda x: x @ weight, sample, modules=(module,))


def test_a_graph_that_a_function_reaches_into_stays_usable(setting):
    weight = setting.randn(4, grad=True)
    outside = weight.exp()
    with pytest.raises(
        cgpass.errors.GraphedArgumentError, match=r"result of ExpBackward0 .* outside of it"
    ):
        setting.graphed(lambda x: (x * outside).sin(), (setting.randn(4, grad=True),))
    outside.sum().backward()
    same(weight.grad, outside.detach())


def test_modules_that_are_given_in_another_form(setting):
    module, sample = setting.module(net()), (setting.randn(4, 8),)
    for modules, message in (
        (module, "modules must be a tuple, got Sequential"),
        (sample, r"sin was given with Tensor among its modules. .* modules=\(model,\)"),
    ):
        with pytest.raises(cgpass.errors.GraphedArgumentError, match=message):
            setting.graphed(torch.sin, sample, modules=modules)


# ---- modes


def scaled(module, args, output):
    return output * 2


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
    graphed, module, plain = graphed_twins(setting, pair())
    check(setting, graphed, plain)
    undo = [change(each) for each in (module, plain)]
    check(setting, graphed, plain, 2)
    stats = graphed.graphed.stats
    assert stats.plain_calls == 2
    assert caplog.text.count("1 changed since it was recorded") == 1
    for each in undo:
        each()
    check(setting, graphed, plain, 2)
    assert (stats.plain_calls, stats.rerecordings) == (2, 0)


def test_a_graphed_module_that_is_parametrized(setting, caplog):
    module, plain = twins(setting, torch.nn.Linear(8, 8))
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (x,))
    for each in (graphed, plain):
        torch.nn.utils.parametrizations.weight_norm(each)
    check(setting, graphed, plain, 2)
    same_grads(graphed, plain)
    assert graphed.graphed.stats.plain_calls == 2
    (said,) = caplog.messages
    why = "its class changed after recording (parametrize it before)"
    assert said == f"Linear runs without a graph: {why}."
    clear_grads(plain)
    check(setting, copy.deepcopy(graphed), plain)
    for each in (graphed, plain):
        torch.nn.utils.parametrize.remove_parametrizations(each, "weight")
    clear_grads(graphed, plain)
    check(setting, graphed, plain, 2)
