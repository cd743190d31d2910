"""TorchScript modules, whose `forward` is no Python code."""

import pytest
import torch

from tests.graphed.steps import check, net, same, same_grads, step, twins

FORMS = {
    "script": lambda setting, module: torch.jit.script(module),
    "trace": lambda setting, module: torch.jit.trace(module, setting.randn(4, 8)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["itself", "submodule", "function"])
def test_torchscript_modules(setting, form, place):
    module, plain = twins(setting, net())
    scripted = FORMS[form](setting, module)
    fn = {
        "itself": scripted,
        "submodule": torch.nn.Sequential(scripted),
        "function": lambda x: scripted(x),
    }[place]
    graphed = setting.graphed(
        fn, (setting.randn(4, 8, grad=True),), modules=(scripted,) if place == "function" else ()
    )
    check(setting, graphed, plain, setting.randn(4, 8, grad=True))
    same_grads(module, plain)
    assert getattr(graphed, "graphed", graphed).stats.replays == 6


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("which", ["another", "the scripted one"])
def test_a_submodule_beside_or_in_place_of_a_scripted_one(setting, which):
    scripted = torch.jit.script(torch.nn.Linear(8, 8))
    module = setting.module(torch.nn.Sequential(scripted, torch.nn.Linear(8, 8)))
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(module, (x,))
    step(graphed, x)
    number = 1 if which == "another" else 0
    module[number] = setting.module(torch.nn.Linear(8, 8))
    for _ in range(2):
        same(step(graphed, x)[0], module(x))
    assert graphed.graphed.stats.rerecordings == 1
    assert graphed.graphed.stats.plain_calls == 0


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
def test_frozen_modules_have_no_mode(setting):
    module = setting.module(net()).eval()
    frozen = torch.jit.freeze(torch.jit.script(module))
    x = setting.randn(4, 8, grad=True)
    graphed = setting.graphed(frozen, (x,))
    for _ in range(2):
        x = setting.randn(4, 8, grad=True)
        out, grads = step(graphed, x)
        want, wanted = step(module, x)
        torch.testing.assert_close(out, want)
        torch.testing.assert_close(grads, wanted)
    assert graphed.graphed.stats.replays == 4
