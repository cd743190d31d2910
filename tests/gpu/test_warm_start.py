"""Graphs that AOTAutograd's cache keeps, captured on CUDA: the same bits, and nothing traced."""

import copy

import torch
from torch._inductor.utils import fresh_cache
from torch.nn import functional as F

import cgpass
from tests.gpu import harness
from tests.usage.programs import counted, learn, state

pytestmark = harness.MARKS


class Attention(torch.nn.Module):
    """A layer with attention, random numbers and autocast, as most models have."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = torch.nn.Linear(64, 192), torch.nn.Linear(64, 64)

    def forward(self, x):
        q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 16).permute(2, 0, 3, 1, 4)
        x = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return F.dropout(self.out(x.transpose(1, 2).flatten(2)), 0.1).relu()


def train(module):
    torch.compiler.reset()
    torch.manual_seed(0)
    call = torch.compile(module, backend=cgpass.cgpass)
    optimizer = torch.optim.AdamW(module.parameters(), fused=True)
    losses = []
    with counted() as counters:
        for _ in range(6):
            with torch.autocast("cuda", torch.bfloat16):
                loss = call(torch.randn(4, 32, 64, device="cuda")).square().mean()
            losses += learn(module, loss, optimizer)
    return [*losses, *state(module)], counters


def test_a_second_compilation_is_the_same():
    torch.manual_seed(1)
    module = Attention().cuda()
    again = copy.deepcopy(module)
    with fresh_cache():
        values, first = train(module)
        others, second = train(again)
    assert all(map(torch.equal, values, others))
    assert (first["joint_graphs"], first["graphs_kept"]) == (1, 0)
    assert (second["joint_graphs"], second["graphs_kept"]) == (0, 2)
    assert second["replays"] == first["replays"] > 0
    assert (first["plain_calls"], first["recordings"]) == (0, 2)
