"""Callables that move their own parameters, which no replay does, are refused."""

import pytest
import torch

from cgpass.errors import CaptureError
from tests.graphed.steps import check, same, same_grads


class First(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)[0]


def rnn():
    return torch.nn.Sequential(
        First(torch.nn.utils.weight_norm(torch.nn.LSTM(8, 8), "weight_hh_l0"))
    )


@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated:FutureWarning")
def test_an_rnn_with_a_weight_norm(setting):
    """On CUDA it moves its weights in every call."""
    module = setting.module(rnn())
    plain = setting.module(rnn())
    plain.load_state_dict(module.state_dict())
    x = setting.randn(4, 8, grad=True)
    if setting.device.type == "cuda":
        with pytest.raises(CaptureError, match=r"moves its own parameters .*weight_ih_l0.*flatten"):
            setting.graphed(module, (x,))
        same(module(x), plain(x))
        return
    graphed = setting.graphed(module, (x,))
    check(setting, graphed, plain, x)
    same_grads(module, plain)


class Moves(torch.nn.Linear):
    def forward(self, x):
        self.weight.data = self.weight.data.clone()
        return super().forward(x)


def test_a_module_that_moves_its_own_parameters_is_refused(setting):
    module = setting.module(Moves(8, 8))
    x = setting.randn(4, 8)
    before, weight = module(x), module.weight.detach().clone()
    with pytest.raises(
        CaptureError, match=r"Moves moves its own parameters or buffers .*weight.*write in place"
    ):
        setting.graphed(module, (x,))
    same(module.weight, weight)
    same(module(x), before)
