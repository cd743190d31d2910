"""Calls without gradients in the benchmark: what is measured and compared, and what documents say of it."""

import json
import re

import bench
import pytest
import results
import torch
from benchlib import arms, breakdown, measured, models, report, taking, worker

from tests.unit.bench_results import MACHINE, META, model


class Loss(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.dropout = torch.nn.Linear(4, 4), torch.nn.Dropout()

    def forward(self, x):
        return self.dropout(self.linear(x)).square().mean()


def workload(**more):
    spec = models.ModelSpec(
        name="m", title="m, B2", build=lambda tiny: Loss(), batch=lambda g, tiny: {}, **more
    )
    torch.manual_seed(0)
    batches = [{"x": torch.randn(2, 4)} for _ in range(2)]
    return models.Workload(
        spec=spec, device=torch.device("cpu"), master=Loss(), batches=batches, inference=True
    )


def settings(name, device):
    if not name.startswith("cgpass"):
        return {"backend": "aot_eager"}
    driver = "none" if name == arms.REFERENCE else "simulated"
    options = {"compiler": "eager", "driver": driver, "min_partition_ops": 1}
    return {"backend": arms.backend(), "options": options}


def test_arms_call_models_in_eval_mode_without_gradients():
    arm = arms.make("eager", workload(autocast=False))
    assert not arm.module.training
    before = [each.clone() for each in arm.module.parameters()]
    loss = arm.step(arm.workload.batches[0])
    assert not loss.requires_grad
    assert all(map(torch.equal, before, arm.module.parameters()))
    assert all(each.grad is None for each in arm.module.parameters())
    assert torch.equal(loss, arm.step(arm.workload.batches[0])), "no dropout"


def job(directory):
    return worker.Job(
        name="m",
        kind="inference",
        model="m",
        arms=arms.INFERENCE,
        device="cpu",
        tiny=True,
        steps=3,
        rounds=2,
        check_steps=4,
        directory=str(directory),
    )


def test_a_worker_measures_calls_of_all_arms(monkeypatch, tmp_path):
    monkeypatch.setattr(arms, "compile_settings", settings)
    monkeypatch.setattr(worker, "take_turn", lambda job: None)
    found = worker.Results(tmp_path / "m.json", {"model": "m", "arms": {}})
    worker.run_inference(job(tmp_path), workload(), found)
    entries = json.loads(found.path.read_text())["arms"]
    assert list(entries) == list(arms.INFERENCE)
    for entry in entries.values():
        assert entry["step_ms"]["median"] >= entry["host_ms"]["median"] > 0
        assert "loop_ms" not in entry
    ours = entries["cgpass"]
    assert ours["check"]["equal"]
    assert ours["check"]["default"]["equal"]
    assert not ours["differs"]
    assert ours["replays_per_step"] == 1
    assert ours["stages"]["replays"] == 1
    assert "backward" not in ours["stages"]
    assert "stages" not in entries["default"]


@pytest.mark.parametrize("name", ["eager", "default"])
def test_results_of_other_kernels_are_held_against_eagers_or_defaults_within_bounds(tmp_path, name):
    entries = {
        name: {"losses": [1.0, 2.0]},
        "reduce-overhead": {"losses": [1.0, 2.1]},
        "cudagraphs": {"losses": [1.0, 2.01]},
        "limit": {"error": "no device"},
    }
    found = worker.Results(tmp_path / "m.json", {"model": "m", "arms": entries})
    worker.check(job(tmp_path), workload(), dict.fromkeys(entries), found)
    said = {name: entry["differs"] for name, entry in entries.items() if "differs" in entry}
    assert said == {name: False, "reduce-overhead": True, "cudagraphs": False}


def arm(host_us, ms, **more):
    host = {"median": host_us / 1e3, "p10": host_us * 0.9e-3, "p90": host_us * 1.1e-3}
    return {"host_ms": host, "step_ms": {"median": ms}, "losses": [1.0]} | more


def inference(**more):
    stages = {"until_done": 900.0, "replays": 1, "guards": 4.0, "forward": {"replay": 20.4}}
    default = {"losses": [1.0], "equal": True, "deterministic": False}
    check = {"equal": True, "deterministic": False, "default": default}
    ours = arm(310, 1.5, check=check, stages=stages, kernels={"gpu_busy_ms": 0.65})
    small = model("small", {}) | {
        "arms": {"default": arm(5000, 5.1), "reduce-overhead": arm(500, 1.9), "cgpass": ours}
    }
    wrong = model("wrong", {}) | {"arms": {"cgpass": arm(100, 1.0, differs=True)}}
    ended = model("ended", {}, error="the process\nended")
    return {"kind": "inference", "meta": META | more, "results": [small, wrong, ended]}


def test_tables_of_calls_without_gradients():
    text = report.render(inference())
    assert "| small, B2 | default | 5000 (4500 to 5500) | 5.10 | - | - | - |  |\n" in text
    said = "losses bitwise equal, and default's"
    assert f"| small, B2 | cgpass | 310 (279 to 341) | 1.50 | 0.65 | - | - | {said} |\n" in text
    assert "| wrong, B2 | cgpass | 100 (90 to 110) | 1.00 | - | - | - | **losses differ** |" in text
    assert "| ended, B2 | - | - | - | - | - | - | stopped: the process ended |" in text
    assert breakdown.calls(inference()).splitlines()[2:] == [
        "| small | 5000 | 500 | 310 | 5.10 | 1.90 | 1.50 | 0.65 |",
        "| wrong | - | - | 100 (results differ) | - | - | 1.00 (results differ) | - |",
        "| ended | - | - | - | - | - | - | - |",
    ]
    assert breakdown.inference_blocks(inference(), MACHINE)[-1].splitlines() == [
        "| | small |",
        "|---|---|",
        "| until the device is done | 900 |",
        "| of that, the device is idle | 250 |",
        "| graphs that are replayed | 1 |",
        "| Dynamo's guards, part of what is before the forward | 4 |",
        "| forward: replay | 20 |",
    ]


def test_the_sentence_about_calls_without_gradients():
    found = inference()
    expected = "Host time of a call under `torch.no_grad()`: small 310 us (500 in reduce-overhead, 5000 in default)"
    assert measured.inference(found) == f"{expected}."
    again = {**found["results"][0], "title": "again, B2"}
    found["results"].append(again)
    assert measured.inference(found) == f"{expected}; again 310 us (500, 5000)."
    assert measured.inference({"results": found["results"][1:3]}) == ""


def test_the_sentence_says_whose_a_figure_is_where_one_lacks():
    whole = inference()["results"][0]
    arms = {name: entry for name, entry in whole["arms"].items() if name != "reduce-overhead"}
    fails = whole | {"title": "fails", "arms": arms | {"reduce-overhead": {"error": "no"}}}
    lacks, alone = whole | {"title": "lacks", "arms": arms}, {"cgpass": arms["cgpass"]}
    alone = whole | {"title": "alone", "arms": alone}
    text = measured.inference({"results": [fails, whole, lacks, whole, fails, alone]})
    assert text.partition(": ")[2].split("; ") == [
        "fails 310 us (5000 in default",
        "reduce-overhead fails)",
        "small 310 us (500 in reduce-overhead, 5000 in default)",
        "lacks 310 us (5000 in default)",
        "small 310 us (500, 5000)",
        "fails 310 us (5000 in default",
        "reduce-overhead fails)",
        "alone 310 us.",
    ]


def test_results_are_kept_and_shown(tmp_path):
    place = tmp_path / "found"
    place.mkdir()
    found = inference()
    (place / "inference.json").write_text(json.dumps(found | {"results": found["results"][:1]}))
    (path,) = taking.store(taking.taken([place], ""), tmp_path)
    assert path.name == f"inference-{MACHINE}.json"
    kept = results.stored(results.RESULTS)
    machine = {"inference": json.loads(path.read_text())}
    kept = {name: {**parts, **machine} for name, parts in kept.items()}
    texts = {
        p.name: text for p, text in results.texts(kept, results.RESULTS, results.README).items()
    }
    assert "under torch.no_grad()" in texts[f"inference-{MACHINE}.md"]
    assert f"(results/inference-{MACHINE}.md)" in re.sub(r"\s+", " ", texts["performance.md"])
    assert f"[inference](docs/results/inference-{MACHINE}.md)" in texts["README.md"].replace(
        "\n", " "
    )


def test_an_older_result_is_compared_with(tmp_path, capsys):
    old, new = inference(), inference()
    new["results"][0]["arms"]["cgpass"]["host_ms"] = {"median": 0.6, "p10": 0.59, "p90": 0.61}
    paths = [tmp_path / name for name in ("old.json", "new.json")]
    for path, data in zip(paths, (old, new), strict=True):
        data["results"] = data["results"][:1]
        path.write_text(json.dumps(data))
    assert bench.main(["--from", str(paths[0]), "--compare", str(paths[0])]) == 0
    assert bench.main(["--from", str(paths[1]), "--compare", str(paths[0])]) == 1
    assert "small, B2, host ms, cgpass / reduce-overhead" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="2"):
        bench.main(["--memory", "--compare", str(paths[0])])
    assert "results of kind inference, but of memory now" in capsys.readouterr().err
