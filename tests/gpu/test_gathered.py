"""Parameters that FSDP2 gathers lie in their own pool, at fixed places."""

import random

import pytest
import torch
from torch.distributed import fsdp
from torch.distributed.fsdp._fully_shard import _fsdp_param

from cgpass.runtime import gathered
from tests.gpu import harness

pytestmark = harness.MARKS
assert fsdp.fully_shard
SIZES = [(1024, 1024), (1024,), (3 * 1024, 1024), (7,)]


class Layer(_fsdp_param.FSDPParam):
    """A layer's parameters, whole on one device."""

    def __init__(self):
        self.all_gather_outputs = []

    def gather(self):
        sizes = [torch.Size(size).numel() for size in SIZES]
        device = torch.device("cuda", torch.cuda.current_device())
        self.init_all_gather_outputs(sizes, [torch.float32] * len(sizes), 1, device)
        self.alloc_all_gather_outputs()
        return [tensor.fill_(1.0) for tensor in self.all_gather_outputs]

    def free(self):
        for tensor in self.all_gather_outputs:
            _fsdp_param.free_storage(tensor)


def step(layers, rng, kept):
    """Forward and backward over all layers, among other tensors that come and go; where each gather put what."""
    places = []
    for layer in [*layers, *reversed(layers)]:
        kept.append(torch.empty(rng.randrange(1, 1 << 21), device="cuda"))
        tensors = layer.gather()
        places.append([tensor.data_ptr() for tensor in tensors])
        assert all((tensor == 1).all() for tensor in tensors)
        if len(kept) > 3:
            kept.pop(rng.randrange(len(kept)))
        layer.free()
    return places


@pytest.mark.parametrize("resets", [False, True])
def test_places_are_the_same_in_every_step(resets):
    gathered.give_gathered_a_pool()
    layers, rng, kept = [Layer() for _ in range(6)], random.Random(0), []
    found = [step(layers, rng, kept) for _ in range(6)]
    if resets:
        gathered.give_pool_back()  # nothing is gathered just now
        torch.cuda.empty_cache()
        found = [step(layers, rng, kept) for _ in range(6)]
    assert found[1:] == found[:1] * 5


def test_what_is_gathered_in_a_capture_lies_in_the_captures_pool():
    gathered.give_gathered_a_pool()
    layer, graph = Layer(), torch.cuda.CUDAGraph()
    layer.gather()
    layer.free()
    with torch.cuda.graph(graph):
        (first, *_) = layer.gather()
        out = first * 2
    graph.replay()
    assert (out == 2).all()
