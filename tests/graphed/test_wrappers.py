"""Modules that reduce gradients by hooks of their own are refused, wherever a callable reaches them."""

import functools

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel

import cgpass
from tests.graphed.steps import net, same, step


@pytest.fixture
def process_group(tmp_path):
    store = torch.distributed.FileStore(str(tmp_path / "store"), 1)
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


class Trainer:
    """Has a wrapper, and the module inside."""

    def __init__(self, wrapper):
        self.model = wrapper
        self.layers = {"all": [wrapper]}
        self.inner = getattr(wrapper, "module", wrapper)

    def __call__(self, x):
        return self.run_in_list(x)

    def run(self, x):
        return self.model(x)

    def run_in_list(self, x):
        return self.layers["all"][0](x)

    def run_inner(self, x):
        return self.inner(x)


class Aside(torch.nn.Module):
    """Has a wrapper that is no submodule."""

    def __init__(self, wrapper):
        super().__init__()
        self.aside = [wrapper]

    def forward(self, x):
        return self.aside[0](x)


def reaching(wrapper):
    trainer = Trainer(wrapper)

    def calls(x):
        return wrapper(x).square().mean()

    def calls_another(x):
        return calls(x)

    return {
        "itself": (wrapper, ""),
        "closure": (calls, ""),
        "closure of a closure": (calls_another, ""),
        "default": (lambda x, model=wrapper: model(x), ""),
        "decorated": (torch.no_grad()(calls), ""),
        "method": (wrapper.forward, ""),
        "submodule": (torch.nn.Sequential(torch.nn.Tanh(), wrapper), " at '1'"),
        "no submodule": (torch.nn.Sequential(Aside(wrapper)), ""),
        "partial": (functools.partial(torch.nn.Module.__call__, wrapper), ""),
        "method of an object": (trainer.run, ""),
        "attribute of an object": (lambda x: trainer.model(x), ""),
        "list in an object": (trainer.run_in_list, ""),
        "object": (trainer, ""),
    }


FORMS = list(reaching(torch.nn.Identity()))


def refused(setting, fn, *args, where="", kind):
    with pytest.raises(
        cgpass.errors.GraphedArgumentError,
        match=rf"is already wrapped, a {kind}{where}, whose hooks .*Record the module inside",
    ):
        setting.graphed(fn, args)


@pytest.mark.parametrize("form", FORMS)
def test_wrapped_modules_are_refused(setting, form):
    fn, where = reaching(torch.nn.DataParallel(net()).to(setting.device))[form]
    refused(setting, fn, setting.randn(4, 8), where=where, kind="DataParallel")


@pytest.mark.parametrize("form", FORMS)
def test_distributed_modules_are_refused(setting, form, process_group):
    module = setting.module(net())
    wrapper = DistributedDataParallel(module)
    x = setting.randn(4, 8)
    fn, where = reaching(wrapper)[form]
    refused(setting, fn, x, where=where, kind="DistributedDataParallel")
    same(step(setting.graphed(wrapper.module, (x,)), x)[0], step(module, x)[0])


def test_a_wrapper_among_the_arguments_is_refused(setting):
    wrapper = torch.nn.DataParallel(net()).to(setting.device)
    refused(setting, lambda m, x: m(x), wrapper, setting.randn(4, 8), kind="DataParallel")


def test_fully_sharded_modules_are_refused(setting):
    """Told by their classes: making them takes a device."""
    for base in (
        torch.distributed.fsdp.FSDPModule,
        torch.distributed.fsdp.FullyShardedDataParallel,
    ):
        made = type("Sharded", (base, torch.nn.Module), {})
        module = object.__new__(made)
        torch.nn.Module.__init__(module)
        module._modules["_fsdp_wrapped_module"] = torch.nn.Linear(8, 8)
        fn = torch.nn.Sequential(setting.module(net()), module)
        with pytest.raises(
            cgpass.errors.GraphedArgumentError,
            match=rf"wrapped, a Sharded at '1', whose hooks \({base.__name__}\)",
        ):
            setting.graphed(fn, (setting.randn(4, 8),))


def test_what_is_not_named_is_not_reached(setting):
    trainer = Trainer(torch.nn.DataParallel(net()).to(setting.device))
    x = setting.randn(4, 8)
    for fn in (trainer.run_inner, lambda x: trainer.inner(x)):
        same(setting.graphed(fn, (x,))(x), trainer.inner(x))
