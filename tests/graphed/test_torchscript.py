"""TorchScript modules, whose `forward` is no Python code."""

import pytest
import torch

from tests.graphed.steps import check, net, same_grads, twins

FORMS = {
    "script": lambda setting, module: torch.jit.script(module),
    "trace": lambda setting, module: torch.jit.trace(module, setting.randn(4, 8)),
}


@pytest.mark.filterwarnings("ignore:`torch.jit:FutureWarning")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["itself", "submodule", "closure"])
def test_torchscript_modules(setting, form, place):
    module, plain = twins(setting, net())
    scripted = FORMS[form](setting, module)
    fn = {
        "itself": scripted,
        "submodule": torch.nn.Sequential(scripted),
        "closure": lambda x: scripted(x),
    }[place]
    graphed = setting.graphed(fn, (setting.randn(4, 8, grad=True),))
    check(setting, graphed, plain, setting.randn(4, 8, grad=True))
    same_grads(module, plain)
    assert getattr(graphed, "graphed", graphed).stats.replays == 6
