"""Host time of stacks: results are compared with those of the same kernels without graphs, and with default's."""

import json

import bench_overhead
import pytest
import torch
from benchlib import compare

from tests.unit.bench_results import overhead

CPU = torch.device("cpu")
NAMES = ["default", "cgpass", "cgpass-direct"]


@pytest.mark.parametrize("mode", ["inference", "training"])
def test_replays_give_what_the_same_kernels_do_without_graphs_and_default(mode):
    plain = bench_overhead.without_graphs(1, mode, CPU)
    assert len(plain) == (1 if mode == "inference" else 5)
    arms = bench_overhead.recorded(1, mode, CPU, NAMES)
    x = arms["cgpass"].x.clone()
    assert bench_overhead.differing(arms, mode, plain) == []
    assert torch.equal(arms["cgpass"].x, x)
    for arm in arms.values():
        getattr(arm, mode)()
    bench_overhead.replay_nothing()
    assert bench_overhead.differing(arms, mode, plain) == ["cgpass", "cgpass-direct"]


class Arm:
    def __init__(self, *values):
        self.given = [torch.tensor(value) for value in values]

    def values(self, mode):
        return self.given


def test_an_arm_has_to_give_what_default_does_too():
    plain = [torch.tensor(1.0), torch.tensor(0.0)]
    arms = {"cgpass": Arm(1.0, 0.0), "cgpass-direct": Arm(1.0, -0.0)}
    assert bench_overhead.differing(arms, "training", plain) == ["cgpass-direct"]
    arms["default"] = Arm(1.001, 0.0)
    assert bench_overhead.differing(arms, "training", plain) == ["cgpass", "cgpass-direct"]
    arms = {"cgpass": Arm(1.0)}
    assert bench_overhead.differing(arms, "training", plain) == ["cgpass"]


def test_other_kernels_may_round_otherwise_and_nothing_else():
    plain = [torch.tensor([1.0, -2.0]), torch.tensor(0.0)]
    others = [
        ("eager", [[1.001, -2.001], 0.0]),
        ("default", [[1.0, -2.1], 0.0]),
        ("reduce-overhead", [[1.0, float("nan")], 0.0]),
        ("fewer", [[1.0, -2.0]]),
    ]
    arms = {name: Arm(*values) for name, values in others}
    assert bench_overhead.differing(arms, "training", plain) == [
        "default",
        "reduce-overhead",
        "fewer",
    ]


@pytest.mark.parametrize("name", ["eager", "default"])
def test_an_arm_that_computes_something_else_is_marked(monkeypatch, name):
    make = bench_overhead.Arm.__init__

    def made(self, kind, layers, device):
        make(self, kind, layers, device)
        if kind == name:
            with torch.no_grad():
                self.parameters[0].add_(1)

    monkeypatch.setattr(bench_overhead.Arm, "__init__", made)
    names = ["eager", "default"]
    plain = bench_overhead.without_graphs(1, "training", CPU)
    arms = bench_overhead.recorded(1, "training", CPU, names)
    assert bench_overhead.differing(arms, "training", plain) == [name]


def test_results_that_differ_are_a_failure(tmp_path, capsys):
    path = tmp_path / "overhead.json"
    for differs, status in (([], 0), (["cgpass"], 1)):
        data = overhead()
        data["rows"][1]["differs"] = differs
        path.write_text(json.dumps(data))
        assert bench_overhead.main(["--from", str(path)]) == status
    said = capsys.readouterr()
    assert said.err == "training, 1 layer, cgpass: results differ\n"
    assert compare.compare(overhead(), data, 5.0).worse == [said.err.strip()]
    data["rows"][1]["differs"] = ["reduce-overhead"]
    path.write_text(json.dumps(data))
    assert bench_overhead.main(["--from", str(path)]) == 0, "nothing is wrong with cgpass"
    assert "40.0 (results differ)" in capsys.readouterr().out
