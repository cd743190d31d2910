"""TorchScript modules, whose `forward` is no Python code."""

import pytest
import torch

from tests.graphed.steps import check, net, same_grads, step, twins

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
