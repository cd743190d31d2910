"""`outputs="owned"`: what is used on other streams, and in other processes, is memory of its own."""

import os
import pickle
import subprocess
import sys

import torch
from torch.multiprocessing.reductions import reduce_tensor

import cgpass
from tests.gpu import harness
from tests.usage.programs import assert_replays, counted

pytestmark = harness.MARKS


def scaled(x):
    return ((x * 2).sin() + 1).cos() * 3


def owned():
    options = {"compiler": "eager", "outputs": "owned"}
    return torch.compile(scaled, backend=cgpass.cgpass, options=options)


def test_outputs_used_on_a_side_stream():
    call, side, results, expected = owned(), torch.cuda.Stream(), [], []
    with counted() as counters:
        for _ in range(12):
            x = torch.randn(1 << 20, device="cuda")
            out = call(x)
            expected.append(scaled(x))
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                torch.cuda._sleep(1_000_000)  # the next replays are done long before this
                results.append(out + 0)
            out.record_stream(side)
            del out
    torch.cuda.synchronize()
    assert all(map(torch.equal, results, expected))
    assert_replays(counters)


CHILD = """
import pickle, sys
rebuild, args = pickle.load(sys.stdin.buffer)
tensor = rebuild(*args)
sys.stdout.write(repr(tensor.double().sum().item()))
"""


def test_outputs_seen_by_another_process():
    call, kept = owned(), []
    for _ in range(4):
        kept.append(call(torch.randn(64, device="cuda")))
    shared = kept[-1]
    expected = shared.double().sum().item()
    for _ in range(8):
        call(torch.randn(64, device="cuda"))
    torch.cuda.synchronize()
    child = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(reduce_tensor(shared)),
        capture_output=True,
        env=dict(os.environ),
        timeout=600,
        check=False,
    )
    assert child.returncode == 0, child.stderr.decode()
    assert float(child.stdout) == expected
