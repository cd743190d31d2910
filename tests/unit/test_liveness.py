"""Birth order: which recordings may be replayed while outputs are held."""

import pytest
import torch

from cgpass.runtime.liveness import HeldStorages, LiveOutputs


class Outputs:
    """Outputs of one recording, and what it hands out."""

    def __init__(self, count=1):
        self.own = [torch.zeros(4) for _ in range(count)]
        self.held = HeldStorages(self.own)

    def hand_out(self):
        return [tensor.detach() for tensor in self.own]


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t,
        lambda t: t[1:].view(-1),
        lambda t: torch.nn.Parameter(t),
        lambda t: lambda: t,
        lambda t: (t.requires_grad_() * t).grad_fn,
    ],
    ids=["tensor", "view", "parameter", "closure", "saved for backward"],
)
def test_every_holder_counts(hold):
    outputs = Outputs()
    holder = hold(outputs.hand_out()[0])
    assert outputs.held.any_held()
    del holder
    assert not outputs.held.any_held()


def test_a_gradient_counts():
    outputs = Outputs()
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = outputs.hand_out()[0]
    assert outputs.held.any_held()
    parameter.grad = None
    assert not outputs.held.any_held()


def test_one_held_output_of_several_is_enough():
    outputs = Outputs(3)
    first, second, third = outputs.hand_out()
    del first, third
    assert outputs.held.any_held()
    del second
    assert not outputs.held.any_held()


def test_outputs_that_share_a_storage_are_counted_once():
    base = torch.zeros(4)
    held = HeldStorages([base, base[1:], base.view(2, 2)])
    assert not held.any_held()
    alias = base[2:]
    assert held.any_held()
    del alias
    assert not held.any_held()


def test_the_youngest_held_recording_decides():
    live = LiveOutputs()
    assert live.youngest() == -1
    recordings = {birth: Outputs() for birth in (1, 2, 5)}
    handed = {}
    for birth, outputs in recordings.items():
        handed[birth] = outputs.hand_out()
        live.push(birth, outputs.held)
    assert live.youngest() == 5
    del handed[2]
    assert live.youngest() == 5, "an older one let go: nothing changes"
    del handed[5]
    assert live.youngest() == 1
    del handed[1]
    assert live.youngest() == -1


def test_a_recording_may_be_handed_out_again():
    live, outputs = LiveOutputs(), Outputs()
    for _ in range(3):
        handed = outputs.hand_out()
        live.push(4, outputs.held)
        assert live.youngest() == 4
        del handed
        assert live.youngest() == -1


def test_what_nobody_holds_does_not_pile_up():
    live, outputs = LiveOutputs(), Outputs()
    for _ in range(100):
        outputs.hand_out()
        assert live.youngest() == -1
        live.push(1, outputs.held)
    assert len(live._stack) == 1
