"""Training on two devices is bitwise that without graphs, whatever communicates and where."""

import pytest

from tests.distributed.processes import run_all
from tests.distributed.programs import PROGRAMS

SETTINGS = [
    pytest.param(("cpu", "eager"), id="gloo-eager"),
    *(
        pytest.param(
            ("cuda", compiler),
            marks=[pytest.mark.gpu, pytest.mark.multigpu(2)],
            id=f"nccl-{compiler}",
        )
        for compiler in ("eager", "inductor")
    ),
]


@pytest.fixture(scope="module", params=SETTINGS)
def found(request, tmp_path_factory):
    device, compiler = request.param
    return run_all(2, device, compiler, tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_same_numbers(found, name):
    for rank, results in enumerate(found):
        assert "error" not in results[name], results[name]["error"]
        counters = results[name]["counters"]
        assert results[name]["differ"] == 0, (rank, counters)
        fails = name == "one_rank_fails" and rank == 1
        assert (counters["replays"] > 0) is not fails, (rank, counters)
        if name not in ("fsdp_blocks", "fsdp_whole") and not fails:
            between = name == "waits_elsewhere"
            assert counters["plain_calls"] == 0, (rank, counters)
            assert counters["skips"] == counters["partitions_eager"] == between, (rank, counters)


def test_process_groups_end_while_graphs_are_alive(found):
    assert all(results.get("destroyed") and results["ended"] for results in found)
