"""Attention with dropout whose forward and backward do not both run in graphs."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.usage import programs

FORWARD = (
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16, 16))

    def forward(self, x):
        q = (x @ self.weight).view(2, 6, 2, 8).transpose(1, 2).sin()
        mixed = F.scaled_dot_product_attention(q, q, q, dropout_p=0.3)
        return x + mixed.transpose(1, 2).reshape(2, 6, 16).cos()


@pytest.mark.parametrize(
    "unsafe",
    [FORWARD, tuple(f"{name}_backward" for name in FORWARD)],
    ids=["forward is eager", "backward is eager"],
)
def test_one_half_runs_between_graphs(way, unsafe):
    program = programs.train(Attention, programs.rows(2, 6, 16))
    way.compare(program, unsafe_ops=unsafe, on_skip="silent", min_partition_ops=1)


def test_backwards_of_more_forwards_than_there_is_memory_for(way):
    """Past the limit calls run plainly, their backwards and forwards not always alike."""

    def program(session):
        module, call = session.compiled(Attention)
        values = []
        for count in (3, 20, 2, 1):
            outs = [call(x) for x in session.batches(2, 6, 16, count=count)]
            for out in reversed(outs):
                out.square().mean().backward()
            values += [*outs, *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program, on_skip="silent")


def test_new_parameters_now_and_then(way):
    def program(session):
        module, call = session.compiled(Attention)
        values = []
        for number, x in enumerate(session.batches(2, 6, 16, count=14)):
            if number % 5 == 3:
                module.weight = nn.Parameter(module.weight.detach() * 0.9)
            call(x).square().mean().backward()
            values += programs.gradients(module)
            module.zero_grad()
        return values

    way.compare(program)
