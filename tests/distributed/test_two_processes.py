"""Training on two devices is bitwise that without graphs, whatever communicates and where."""

import functools

import pytest

from tests.distributed.processes import run_all
from tests.distributed.programs import PROGRAMS

ON_CUDA = [pytest.mark.gpu, pytest.mark.multigpu(2)]
OF_INDUCTOR = ("tensor_parallel", "simple_fsdp", "fsdp_blocks", "data_parallel", "waits_elsewhere")
MORE_OF_THE_SAME = ("fsdp_whole", "data_parallel_accumulating")
OF_GLOO = ("one_rank_is_late",)  # NCCL's watchdog ends the process
SETTINGS = {
    "gloo-eager": ("cpu", "eager", tuple(n for n in PROGRAMS if n not in MORE_OF_THE_SAME)),
    "nccl-eager": ("cuda", "eager", tuple(n for n in PROGRAMS if n not in OF_GLOO)),
    "nccl-inductor": ("cuda", "inductor", OF_INDUCTOR),
}


def marked(setting, *name):
    return pytest.param(setting, *name, marks=ON_CUDA if setting.startswith("nccl") else [])


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Results of a setting, made once."""
    return functools.cache(
        lambda setting: run_all(2, *SETTINGS[setting], tmp_path_factory.mktemp(setting))
    )


@pytest.mark.parametrize(
    ("setting", "name"),
    [marked(setting, name) for setting, (*_, names) in SETTINGS.items() for name in names],
)
def test_the_same_numbers(found, setting, name):
    for rank, results in enumerate(found(setting)):
        assert name in results, f"rank {rank} did not get there: {results}"
        assert "error" not in results[name], results[name]["error"]
        counters = results[name]["counters"]
        assert results[name]["differ"] == 0, (rank, counters)
        fails = (name, rank) in (("one_rank_fails", 1), ("one_rank_is_late", 0))
        if (name, rank) == ("one_rank_is_late", 1):
            continue  # it never came
        assert (counters["replays"] > 0) is not fails, (rank, counters)
        if name not in ("fsdp_blocks", "fsdp_whole") and not fails:
            between = name == "waits_elsewhere"
            assert counters["plain_calls"] == 0, (rank, counters)
            assert counters["skips"] == counters["partitions_eager"] == between, (rank, counters)


@pytest.mark.parametrize("setting", [marked(setting) for setting in SETTINGS])
def test_process_groups_end_while_graphs_are_alive(found, setting):
    assert all(results.get("destroyed") and results["ended"] for results in found(setting))
