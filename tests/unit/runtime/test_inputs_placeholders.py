"""Recordings of one compiled function copy inputs of the same layout to the same memory."""

import torch

import cgpass
from cgpass.runtime.owner import Owner
from tests.operators import tagged


def fn(x):
    """Five captured partitions that read what operators between them made."""
    for _ in range(4):
        x = tagged((x * 2).sin().cos())
        y = tagged((x + 1).tanh())
        x = (x * y).exp().tanh()
    return x


def test_memory_of_one_partition_for_all(monkeypatch):
    made = []
    add = Owner.add_recording
    monkeypatch.setattr(Owner, "add_recording", lambda self, r: made.append(r) or add(self, r))
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    compiled = torch.compile(fn, backend=cgpass.cgpass, options=options)
    held = []
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(64)
            held.append((compiled(x), fn(x)))
    assert all(torch.equal(a, b) for a, b in held)
    copying = [r for r in made if len(r.copied_inputs) == 2]
    assert len(copying) >= 4
    places = {p.target.data_ptr() for r in copying for p in r.placeholders.values()}
    assert len(places) == 2
    torch.compiler.reset()
