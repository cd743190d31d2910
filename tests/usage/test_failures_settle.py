"""How soon everything is replayed that can be, where a partition was split when it was called."""

import pytest
import torch
from torch import nn

import cgpass
from tests.usage.programs import MLP
from tests.usage.test_failures import Around, syncs


@torch.library.custom_op("settling::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    """Reads a number on the host, and so does its backward."""
    return x * (1 + (x.sum() > 0).item())


waits.register_fake(torch.empty_like)
waits.register_autograd(lambda ctx, grad: waits(grad))


class Saving(Around):
    """The backward reads what the operator made."""

    def forward(self, x):
        return self.second(self.op(self.first(x)).sin())


@pytest.mark.parametrize(("op", "settled_in"), [(syncs, 4), (waits, 7)])
def test_a_backward_learns_soon_what_its_forward_makes_outside_of_graphs(setting, op, settled_in):
    def program(session):
        model, call = session.compiled(lambda: nn.Sequential(MLP(), Saving(op)))
        losses, changes = [], []
        for x in session.batches(4, 8, count=settled_in + 4):
            before = cgpass.counters()
            loss = call(x).square().mean()
            loss.backward()
            losses.append(loss.detach().clone())
            after = cgpass.counters()
            names = ("warmups", "recordings", "plain_calls")
            changes.append(sum(after[name] - before[name] for name in names))
        if session.options["driver"] != "none":
            assert not any(changes[settled_in:]), changes
        return [*losses, *(parameter.grad for parameter in model.parameters())]

    counters = setting.compare(program, compiler="eager", on_skip="silent")
    assert counters["replays"] > 0
