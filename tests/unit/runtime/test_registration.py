"""With expandable segments NCCL registers no buffers of graphs, or collectives stay outside of them."""

import os
import subprocess
import sys
import types

import pytest
import torch

from cgpass import torch_private
from cgpass.compile.assembly import passes_for
from cgpass.compile.facts.target import Target
from cgpass.compile.passes.base import PassContext, run_passes
from cgpass.options import Options
from cgpass.runtime import collectives, registration
from tests.graphs import CUDA, fake_cuda_graph

NAME = registration.NAME
EXPANDABLE = "garbage_collection_threshold:0.8, expandable_segments:True"
functional = torch.ops._c10d_functional
needs_distributed = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="no torch.distributed"
)


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    for name in (NAME, "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
        monkeypatch.setenv(name, "")  # to be restored, whatever sets it
        monkeypatch.delenv(name)
    monkeypatch.setattr(torch_private, "uses_expandable_segments", lambda: None)
    return monkeypatch


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
@pytest.mark.parametrize(
    ("value", "asked"),
    [(EXPANDABLE, True), ("expandable_segments:False", False), ("max_split_size_mb:64", False)],
)
def test_settings_of_the_allocator_are_read(environment, name, value, asked):
    environment.setenv(name, value)
    assert registration.asks_for_expandable_segments() is asked


@pytest.mark.parametrize("now", [True, False])
def test_the_allocators_own_word_counts_where_it_has_one(environment, now):
    assert collectives.may_be_captured(CUDA)
    environment.setattr(torch_private, "uses_expandable_segments", lambda: now)
    environment.setenv("PYTORCH_CUDA_ALLOC_CONF", EXPANDABLE)
    assert collectives.may_be_captured(torch.device("cpu"))
    assert collectives.may_be_captured(CUDA) is not now


@pytest.mark.parametrize(("value", "safe"), [("0", True), ("1", False), ("no", False)])
def test_the_users_own_choice_stays(environment, value, safe):
    environment.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    environment.setenv(NAME, value)
    assert collectives.may_be_captured(CUDA) is safe
    registration.turn_off_if_early()
    assert os.environ[NAME] == value


@pytest.mark.parametrize("with_groups", [False, True])
def test_importing_is_early_enough_where_no_group_is_there_yet(environment, with_groups):
    environment.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    distributed = types.SimpleNamespace(is_initialized=lambda: with_groups)
    environment.setitem(sys.modules, "torch.distributed", distributed)
    registration.turn_off_if_early()
    assert os.environ.get(NAME) == (None if with_groups else "0")


def test_import_alone_tells_nccl():
    code = "import os, cgpass; print(os.environ.get('NCCL_GRAPH_REGISTER'))"
    env = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": EXPANDABLE}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "0"


def communicating(x):
    y = x.sin().cos().exp().tanh()
    return functional.wait_tensor(functional.all_reduce(y, "sum", "0")).sin().cos().exp().tanh()


@needs_distributed
@pytest.mark.parametrize("safe", [True, False])
def test_collectives_run_between_graphs_where_they_may_not_be_captured(environment, safe):
    environment.setenv("PYTORCH_ALLOC_CONF", EXPANDABLE)
    environment.setenv(NAME, "0" if safe else "1")
    gm = fake_cuda_graph(communicating, (4,))
    passes = passes_for(gm, Options(), Target(CUDA, records=True))
    found = [reason for _, reason in run_passes(passes, gm, PassContext(CUDA, "graph", "forward"))]
    names = ["_c10d_functional.all_reduce.default", "_c10d_functional.wait_tensor.default"]
    assert [reason.op for reason in found] == ([] if safe else names)
    if not safe:
        line = found[0].line
        assert str(found[0]) == (
            f"_c10d_functional.all_reduce.default{f' at {line}' if line else ''}: NCCL would register its buffers, which "
            "lie in expandable segments: that corrupts memory [expandable_segments]; set NCCL_GRAPH_REGISTER=0 in the "
            "environment, import cgpass before the first process group is made, or turn expandable_segments off"
        )
