"""Tensors that a forward sets as attributes, which no replay does."""

import logging

import pytest
import torch

from tests.graphed.steps import net


class Stashes(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.inner = net()
        self.way = way
        self.found = []
        self.seen = {"last": None}
        self.aux = self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(8, device=x.device)
        y = self.inner(x) * self.table
        self.way(self, y)
        return y


def as_attribute(module, y):
    module.aux = y.square().mean()


def in_list(module, y):
    module.found.append(y.detach())


def in_dict(module, y):
    module.seen["last"] = y


def warnings(caplog):
    return [each.getMessage() for each in caplog.records if "puts a tensor" in each.getMessage()]


@pytest.mark.parametrize(
    ("way", "name"), [(as_attribute, "aux"), (in_list, "found"), (in_dict, "seen")]
)
def test_tensors_that_a_forward_sets_as_attributes_are_warned_about(setting, way, name, caplog):
    module = setting.module(torch.nn.Sequential(Stashes(way)))
    sample = (setting.randn(4, 8),)
    with caplog.at_level(logging.WARNING):
        setting.graphed((module,), (sample, sample), order=(1, 1, -1, -1))
    (message,) = warnings(caplog)
    assert message.startswith(
        f"callable 0 (Sequential) puts a tensor into 0.{name} of Sequential when it runs"
    )
    assert message.endswith("don't read it there, return it.")


def drops_it_again(module, y):
    module.aux = y
    module.aux = None


def test_what_only_the_first_call_sets_or_is_gone_afterwards_is_no_trouble(setting, caplog):
    module = setting.module(Stashes(drops_it_again))
    with caplog.at_level(logging.WARNING):
        setting.graphed(module, (setting.randn(4, 8),), num_warmup_iters=1)
    assert warnings(caplog) == []
