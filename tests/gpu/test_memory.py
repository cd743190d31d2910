"""Memory and copies of training loops on CUDA: nothing grows, nothing is copied but inputs, sizes share memory."""

import gc
import itertools

import pytest
import torch
from torch import nn

import cgpass
from cgpass.runtime.recording import Recording
from tests.gpu import harness
from tests.usage.programs import counted

pytestmark = harness.MARKS

WIDTH = 1024


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Loop:
    """Training of a stack of blocks; `zero_grad` comes before the forward or between forward and backward."""

    def __init__(self, lengths=(128,), zero_grad="before"):
        torch.compiler.reset()
        gc.collect()
        torch.cuda.empty_cache()
        torch.manual_seed(0)
        self.module = nn.Sequential(*[Block() for _ in range(4)]).cuda()
        self.optimizer = torch.optim.AdamW(self.module.parameters(), lr=1e-4, fused=True)
        dynamic = True if len(lengths) > 1 else None
        self.call = torch.compile(self.module, backend=cgpass.cgpass, dynamic=dynamic)
        self.batches = [torch.randn(4, length, WIDTH, device="cuda") for length in lengths]
        self.zero_grad = zero_grad

    def run(self, steps):
        for number in range(steps):
            if self.zero_grad == "before":
                self.optimizer.zero_grad()
            loss = self.call(self.batches[number % len(self.batches)]).square().mean()
            if self.zero_grad == "between":
                self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            del loss

    def peak(self, steps):
        """Largest reserved memory of some steps, bytes."""
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        self.run(steps)
        torch.cuda.synchronize()
        return torch.cuda.max_memory_reserved()


@pytest.mark.parametrize("zero_grad", ["before", "between"])
def test_a_settled_loop_copies_inputs_only(zero_grad):
    loop = Loop(zero_grad=zero_grad)
    loop.run(12)
    with counted() as counters:
        loop.run(10)
    batch_bytes = loop.batches[0].nbytes
    assert counters["replays"] == counters["calls"] == 20, counters
    assert counters["rescues"] == 0, counters
    # the forward's input, the same for the backward, which reads it again, and the gradient of the output
    assert counters["copied_bytes"] <= 10 * 3 * batch_bytes, counters


@pytest.mark.parametrize("zero_grad", ["before", "between"])
def test_nothing_grows_over_500_steps(zero_grad):
    def now():
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()

    loop = Loop(zero_grad=zero_grad)
    loop.run(12)
    young = now()
    loop.run(60)
    settled = now()
    loop.run(500)
    assert now() == settled
    assert settled[1] <= young[1], "what reads its inputs where they lie needs no more memory"


def test_sizes_share_memory(record_property):
    lengths = (64, 128, 192, 256, 320, 384, 448, 512)
    largest = Loop(lengths=(512, 512))
    largest.run(6)
    alone = largest.peak(8)
    del largest
    every = Loop(lengths=lengths)
    every.run(4 * len(lengths))
    with counted() as counters:
        together = every.peak(2 * len(lengths))
    record_property("eight_lengths_over_largest_alone", round(together / alone, 4))
    assert counters["replays"] == counters["calls"], counters
    assert together <= 1.15 * alone, (together, alone)


def test_steady_steps_never_wait_for_the_device():
    loop = Loop()
    loop.run(8)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        loop.run(8)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("end", ["reset", "compiler reset", "deletion"])
def test_memory_comes_back(end):
    loop = Loop()
    loop.run(6)
    kept = loop.call(loop.batches[0])
    value = kept.detach().clone()
    recorded = torch.cuda.memory_reserved()
    if end == "reset":
        cgpass.reset()
    elif end == "compiler reset":
        torch.compiler.reset()
    else:
        del loop.call, loop.module, loop.optimizer
    state = 0
    if end != "deletion":
        loop.optimizer.zero_grad()
        state = sum(t.nbytes for p in loop.module.parameters() for t in (p, p, p))
    kept = kept.detach()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    left = torch.cuda.memory_allocated() - state
    assert torch.equal(kept, value), "what is held outlives its recording"
    assert left < 4 * loop.batches[0].nbytes + (1 << 25), left
    assert torch.cuda.memory_reserved() < recorded


def pooled_bytes():
    """Bytes of the device in all pools but the ordinary one."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    segments = torch.cuda.memory_snapshot()
    return sum(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) != (0, 0))


def uneven():
    """Layers of many widths, so that memory of one fits few others."""
    widths = [512, 1200, 700, 2300, 900, 1900, 640, 3100, 512]
    layers = [nn.Linear(a, b) for a, b in itertools.pairwise(widths)]
    return nn.Sequential(*[m for layer in layers for m in (layer, nn.GELU())]).cuda()


@pytest.mark.parametrize("zero_grad", ["before", "between"])
def test_the_pool_is_as_large_as_that_of_a_graph_made_by_hand(zero_grad, record_property):
    torch.compiler.reset()
    x = torch.randn(512, 512, device="cuda")
    before = pooled_bytes()
    module = uneven()
    call = torch.compile(module, backend=cgpass.cgpass)
    for _ in range(12):
        if zero_grad == "before":
            module.zero_grad()
        out = call(x)
        if zero_grad == "between":
            module.zero_grad()
        out.square().mean().backward()
        del out
    ours = pooled_bytes() - before
    by_hand = uneven()
    plain = torch.compile(by_hand)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            by_hand.zero_grad()
            plain(x).square().mean().backward()
    torch.cuda.current_stream().wait_stream(side)
    by_hand.zero_grad()
    middle, graph = pooled_bytes(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        plain(x).square().mean().backward()
    theirs = pooled_bytes() - middle
    record_property("pool_over_by_hand", round(ours / theirs, 3))
    # where the last step's gradients outlive the forward they have a pool of their own, with a workspace of its own
    limit = 1.05 if zero_grad == "before" else 2 * 1.1
    assert ours <= limit * theirs, (ours, theirs)


def recordings():
    """Recordings that are alive, of whatever function."""
    gc.collect()
    return sum(type(thing) is Recording for thing in gc.get_objects())


@pytest.mark.parametrize("compiler", ["eager", "inductor"])
def test_models_that_are_gone_leave_nothing_behind(compiler):
    """Modules of one class share compiled code, which must not keep every model's recordings."""
    torch.compiler.reset()
    before = recordings()
    options = {"compiler": compiler, "min_partition_ops": 1}
    found, reserved = [], []
    with counted() as counters:
        for _ in range(24):
            module = Block().cuda()
            call = torch.compile(module, backend=cgpass.cgpass, options=options)
            for _ in range(5):
                call(torch.randn(4, 128, WIDTH, device="cuda")).square().mean().backward()
            del module, call
            found.append(recordings() - before)
            torch.cuda.empty_cache()
            reserved.append(torch.cuda.memory_reserved())
    assert counters["replays"] > 24 * 2, counters
    assert counters["plain_calls"] == 0, counters
    assert max(found) <= 2 * (4 + 1), found
    assert reserved[-1] <= reserved[11], reserved
    torch.compiler.reset()


def first_step_peak(**compiled):
    """Largest allocated memory of a first training step, bytes, beyond what parameters and input take."""
    torch.compiler.reset()
    gc.collect()
    torch.manual_seed(0)
    layers = [layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.ReLU())]
    module = nn.Sequential(*layers).cuda()
    call = torch.compile(module, **compiled)
    x = torch.randn(4096, 2048, device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(x).square().mean().backward()
    return torch.cuda.max_memory_allocated() - before


def test_saved_tensors_make_room_for_gradients_in_a_plain_backward():
    """In the first step, which warms up, as in AOTAutograd's own."""
    expected = first_step_peak(backend="aot_eager_decomp_partition")
    for driver in ("none", "cuda"):
        options = {"driver": driver, "compiler": "eager"}
        found = first_step_peak(backend=cgpass.cgpass, options=options)
        assert found <= 1.05 * expected, (driver, found, expected)
