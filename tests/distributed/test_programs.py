"""Training on several devices is bitwise that without graphs, whatever communicates and where."""

import functools
import os
from types import SimpleNamespace
from unittest import mock

import pytest

from tests.distributed.processes import run_all, wait
from tests.distributed.programs import PROGRAMS

OF_FOUR = ("tensor_parallel_and_fsdp", "simple_fsdp_in_two_dimensions")
OF_TWO = tuple(name for name in PROGRAMS if name not in OF_FOUR)
OF_INDUCTOR = ("tensor_parallel", "simple_fsdp", "fsdp_blocks", "data_parallel", "waits_elsewhere")
# NCCL's watchdog ends the process; CUDA has such an allocator itself.
OF_GLOO = ("one_rank_is_late", "fsdp_blocks_that_come_back")
OF_SEGMENTS = ("tensor_parallel", "simple_fsdp", "groups_of_its_own")
SETTINGS = {
    "gloo-eager": (2, "cpu", "eager", OF_TWO),
    "gloo-eager-four": (4, "cpu", "eager", OF_FOUR[:1]),
    "gloo-eager-four-slow": (4, "cpu", "eager", OF_FOUR[1:]),
    "nccl-eager": (2, "cuda", "eager", tuple(n for n in OF_TWO if n not in OF_GLOO)),
    "nccl-eager-four": (4, "cuda", "eager", OF_FOUR),
    "nccl-inductor": (2, "cuda", "inductor", OF_INDUCTOR),
    "nccl-expandable": (2, "cuda", "eager", OF_SEGMENTS),
    "nccl-expandable-refused": (2, "cuda", "eager", OF_SEGMENTS[:1]),
}
EXPANDABLE = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
ENVIRONMENTS = {
    "nccl-expandable": EXPANDABLE,
    "nccl-expandable-refused": EXPANDABLE | {"NCCL_GRAPH_REGISTER": "1"},
}
FAILING = (("one_rank_fails", 1), ("one_rank_is_late", 0))
FREED = ("fsdp_blocks", "fsdp_blocks_that_come_back")
BETWEEN = {"waits_elsewhere": (1,), "expert_parallel": (2,), "parallel_loss": (0, 1)}
"""Eager partitions, in forward and backward; of the parallel loss, torch 2.11's own indices by a mask."""


def marked(setting, *name):
    processes, device, *_ = SETTINGS[setting]
    marks = [pytest.mark.gpu, pytest.mark.multigpu(processes)] if device == "cuda" else []
    marks += [pytest.mark.slow] if "slow" in setting else []
    return pytest.param(setting, *name, marks=marks)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of a setting, made once."""

    @functools.cache
    def results(setting):
        with mock.patch.dict(os.environ, ENVIRONMENTS.get(setting, {})):
            return run_all(*SETTINGS[setting], tmp_path_factory.mktemp(setting))

    return results


def results_of(found, name):
    """One program's, by rank; it failed, or was never run, says the rank that knows why."""
    for rank, each in enumerate(found):
        error = each.get(name, {}).get("error")
        assert error is None, f"rank {rank}: {error}"
    lacking = [rank for rank, each in enumerate(found) if name not in each]
    assert not lacking, f"no result of ranks {lacking}: {found[0]['why']}"
    return [each[name] for each in found]


def test_processes_that_do_not_end_are_told_with_what_they_are_at():
    context = SimpleNamespace(join=lambda timeout: False)
    saved = [{"first": {"counters": {"calls": 4}}}, {}]
    why = wait(context, lambda: saved, ("first", "second"), limit_s=0)
    assert why == "timed out after 0 s, waiting for rank 0: second, rank 1: first"
    with pytest.raises(AssertionError) as error:
        results_of([{**each, "why": why} for each in saved], "first")
    assert str(error.value).split("\n")[0] == f"no result of ranks [1]: {why}"


@pytest.mark.parametrize(
    ("setting", "name"),
    [marked(setting, name) for setting, (*_, names) in SETTINGS.items() for name in names],
)
def test_the_same_numbers(found, setting, name):
    for rank, results in enumerate(results_of(found(setting), name)):
        counters = results["counters"]
        assert results["differ"] == 0, (rank, counters)
        fails = (name, rank) in FAILING
        if (name, rank) == ("one_rank_is_late", 1):
            continue  # it never came
        assert (counters["replays"] > 0) is not fails, (rank, counters)
        if name in FREED:
            assert counters["replays"] > 0.4 * counters["calls"], (rank, counters)
        if name == "fsdp_blocks_that_come_back":
            assert counters["copied_bytes"] < 1024 * counters["replays"], "inputs, no parameters"
        if setting == "nccl-expandable-refused" or name == "collectives_between_graphs":
            assert counters["partitions_eager"] > 0, (rank, counters)
        elif "fsdp" not in name.replace("simple_fsdp", "") and not fails:
            assert counters["plain_calls"] == 0, (rank, counters)
            assert counters["skips"] == counters["partitions_eager"], (rank, counters)
            assert counters["skips"] in BETWEEN.get(name, (0,)), (rank, counters)


@pytest.mark.parametrize("setting", [marked(setting) for setting in SETTINGS])
def test_process_groups_end_while_graphs_are_alive(found, setting):
    for results in found(setting):
        assert results["why"] is None, results["why"]
        assert set(results["destroyed"]) == {0}, "recordings as each group shuts down"
