"""Modules whose parameters are tied, laid out anew or replaced, and whose submodules, modes or hooks change."""

import concurrent.futures
import copy
import functools
import threading

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
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),), num_warmup_iters=1)
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


class Counts(torch.nn.Module):
    """Makes what it counts in when it first runs, in one of several ways, and counts its backwards, too."""

    def __init__(self, way):
        super().__init__()
        self.inner, self.way = torch.nn.Linear(8, 8), way
        if way == "assigned":
            self.register_buffer("count", None)

    def counter(self, x):
        if getattr(self, "count", None) is None:
            count = torch.zeros(1, device=x.device)
            if self.way == "registered":
                self.register_buffer("count", count)
            elif self.way == "parameter":
                self.count = torch.nn.Parameter(count, requires_grad=False)
            else:
                self.count = count
        return self.count

    def forward(self, x):
        count = self.counter(x)
        with torch.no_grad():
            count.add_(1)
        return CountsBackwards.apply(self.inner(x) * count.clone(), count)


class CountsBackwards(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        ctx.count.add_(10)
        return grad, None


@pytest.mark.parametrize("order", [None, (1, 1, -1, -1), (1, -1, 1, -1)])
@pytest.mark.parametrize("warmups", [1, 3])
@pytest.mark.parametrize("way", ["assigned", "registered", "parameter"])
def test_what_the_first_call_makes_and_writes(setting, way, warmups, order):
    module, plain = setting.module(Counts(way)), setting.module(Counts(way))
    plain.load_state_dict(module.state_dict())
    sample = setting.randn(4, 8, grad=True)
    if order is None:
        fns = [setting.graphed(module, (sample,), num_warmup_iters=warmups)] * 2
    else:
        samples = ((sample,), (sample,))
        fns = setting.graphed((module,), samples, order=order, num_warmup_iters=warmups)
    assert module.count.item() == 0
    for fn in (*fns, *fns):
        check(setting, fn, plain)
        same(module.count, plain.count)
        same_grads(module, plain)
    for fn in fns:
        stats = getattr(fn, "graphed", fn).stats
        assert (stats.plain_calls, stats.rerecordings) == (0, 0)


class Makes(torch.nn.Module):
    """Makes something when it first runs."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(8, 8)
        self.register_buffer("known", torch.zeros(8))


class MakesLayers(Makes):
    def forward(self, x):
        if not hasattr(self, "layers"):
            self.layers = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)).to(x)
        return self.layers(self.inner(x))


class MakesAWeight(Makes):
    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = torch.nn.Parameter(torch.empty(8, device=x.device))
            torch.nn.init.ones_(self.weight)
        return self.inner(x) * self.weight


class MakesAWeightByData(Makes):
    def forward(self, x):
        if not hasattr(self, "weight"):
            self.weight = torch.nn.Parameter(torch.empty(8, device=x.device))
            self.weight.data.fill_(2)
        return self.inner(x) * self.weight


class MakesViews(Makes):
    def forward(self, x):
        if not hasattr(self, "a"):
            both = torch.zeros(2, 8, device=x.device)
            self.register_buffer("a", both[0])
            self.register_buffer("b", both[1])
        self.a.add_(1)
        self.b.add_(self.a)
        return self.inner(x) + self.b


class MakesACounter(Makes):
    def forward(self, x):
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(8, device=x.device))
        self.count += 1
        return self.inner(x) + self.count


class MakesACounterByData(Makes):
    def forward(self, x):
        if not hasattr(self, "count"):
            self.register_buffer("count", torch.zeros(8, device=x.device))
        self.count.data.add_(1)
        return self.inner(x) + self.count


class TiesABuffer(Makes):
    def forward(self, x):
        if not hasattr(self, "tied"):
            self.register_buffer("tied", self.known)
        self.known.add_(1)
        return self.inner(x) + self.tied


@pytest.mark.parametrize("warmups", [1, 3])
@pytest.mark.parametrize("kind", Makes.__subclasses__())
def test_what_the_first_call_makes_and_initializes(setting, kind, warmups):
    module, plain = twins(setting, kind())
    torch.manual_seed(7)
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),), num_warmup_iters=warmups)
    if kind is MakesLayers:  # with random numbers of its own
        plain.layers = copy.deepcopy(module.layers)
        plain.layers[1].reset_running_stats()
    for _ in range(3):
        check(setting, graphed, plain)
        for name, buffer in module.named_buffers():
            same(buffer, plain.get_buffer(name))
        same_grads(module, plain)
    assert graphed.graphed.stats.plain_calls == 0


def test_threads_that_make_modules_meanwhile(setting):
    module, sample = setting.module(MakesACounter()), (setting.randn(4, 8),)
    setting.graphed(module, sample)
    begun, go = threading.Event(), threading.Event()

    def wait(module, name, buffer):
        if name == "other":
            begun.set()
            assert go.wait(60)

    register = torch.nn.modules.module.register_module_buffer_registration_hook
    # the thread is amid torch's hooks
    with (
        concurrent.futures.ThreadPoolExecutor(1) as pool,
        register(wait),
        register(lambda *args: None),
    ):
        made = pool.submit(torch.nn.Module().register_buffer, "other", torch.ones(1))
        assert begun.wait(60)
        setting.graphed(setting.module(MakesACounter()), sample)
        go.set()
        made.result()


def test_callables_that_share_what_the_first_call_makes(setting):
    module, plain = setting.module(Counts("registered")), setting.module(Counts("registered"))
    plain.load_state_dict(module.state_dict())
    sample = (setting.randn(4, 8, grad=True),)
    for fn in setting.graphed((module, module.forward), (sample, sample)) * 2:
        check(setting, fn, plain)
        same(module.count, plain.count)


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


def three():
    return torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))


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
    module, plain = twins(setting, three())
    graphed = setting.graphed(module, (setting.randn(4, 8, grad=True),))
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
