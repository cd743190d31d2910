"""The runner: what it hands on, what it checks, what it says when a pass fails."""

from dataclasses import dataclass
from typing import ClassVar

import pytest
import torch
from torch import fx

from cgpass.compile.passes.base import Pass, PassContext, run_passes
from cgpass.errors import PassError


@dataclass(frozen=True)
class Note(Pass):
    name: ClassVar[str] = "note"
    text: str = "hello"

    def run(self, gm, ctx):
        return self.text, ctx.direction


@dataclass(frozen=True)
class ReluToNeg(Pass):
    name: ClassVar[str] = "relu_to_neg"

    def run(self, gm, ctx):
        for node in gm.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = torch.neg
        return ()


@dataclass(frozen=True)
class Careless(Note):
    name: ClassVar[str] = "careless"

    def run(self, gm, ctx):
        raise ValueError("a promise was broken")


@dataclass(frozen=True)
class Breaker(Note):
    name: ClassVar[str] = "breaker"

    def run(self, gm, ctx):
        gm.graph.output_node().append(gm.graph.find_nodes(op="call_function", target=torch.relu)[0])
        return ()


def traced():
    return fx.symbolic_trace(lambda x: torch.relu(x) + 1)


def context():
    return PassContext(torch.device("cpu"), "split", "forward")


def test_hands_on_graph_and_notes():
    gm = traced()
    notes = run_passes([Note(), ReluToNeg(), Note("again")], gm, context())
    assert notes == ["hello", "forward", "again", "forward"]
    assert gm(torch.ones(1)).item() == 0.0  # recompiled


def test_failure_names_pass_stage_and_passes_before():
    with pytest.raises(PassError) as caught:
        run_passes([Note(), Careless()], traced(), context())
    assert str(caught.value) == (
        "pass 'careless' failed in stage 'split' (forward): ValueError: a promise was broken. "
        "Passes that ran before it: note."
    )
    assert isinstance(caught.value.__cause__, ValueError)


def test_invalid_graph_is_the_pass_s_failure():
    with pytest.raises(PassError, match=r"(?s)pass 'breaker' failed .* before it: none\."):
        run_passes([Breaker()], traced(), context())
