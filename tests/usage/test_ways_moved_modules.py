"""Modules that are moved, cast and swapped as a whole."""

import torch
from torch import nn

from tests.usage.programs import MLP, changed_in_training, sgd_step


def test_modules_moved_to_another_dtype_and_back(way):
    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            dtype = torch.float64 if number // 3 % 2 else torch.float32
            module.to(dtype)
            values += sgd_step(module, call, batch.to(dtype))
        return values

    counters = way.compare(program)
    assert counters["replays"] > 0, counters


def test_modules_moved_with_new_parameters(way, monkeypatch):
    def change(session, module):
        module.to(torch.float64)
        module.to(torch.float32)

    monkeypatch.setattr(torch.__future__, "_overwrite_module_params_on_conversion", True)
    way.compare(changed_in_training(change))


def test_swapped_tensors(way):
    def change(session, module):
        for p in module.parameters():
            torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))

    way.compare(changed_in_training(change))


def test_modules_moved_with_swapping(way, monkeypatch):
    def change(session, module):
        module.to(torch.float64)
        module.to(torch.float32)

    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    way.compare(changed_in_training(change))
