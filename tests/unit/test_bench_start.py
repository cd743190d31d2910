"""The benchmark of first steps: what it makes of seconds and replays; its processes are told, none is started."""

import importlib
import json
import subprocess

import pytest
from benchlib import breakdown, measured, spent, taking
from torch._inductor.codecache import FxGraphCache

from cgpass import torch_private
from cgpass.compile.passes import base
from tests.unit.bench_results import bench as bench_results


@pytest.fixture
def bench():
    for name in ("timm", "transformers"):
        pytest.importorskip(name)
    return importlib.import_module("bench_start")


def steps(first, *rest, compile_s=1.0, replays=(0,) * 4, partitions=0):
    return {
        "compile_s": compile_s,
        "steps_s": [first, *rest],
        "replays": list(replays),
        "partitions": partitions,
    }


DEFAULT = {"cold": steps(20.0, 0.5, 0.1, 0.1), "warm": steps(4.0, 0.1, 0.1, 0.1)}
OURS = {
    "cold": steps(21.0, 0.75, 0.25, 0.1, compile_s=0.5, replays=(0, 1, 3, 5), partitions=2),
    "warm": steps(5.0, 0.1, 0.1, 0.1, compile_s=0.5, replays=(0, 1, 3, 5), partitions=2),
}


@pytest.mark.parametrize(
    ("replays", "steps"), [([0, 2, 4, 6], 2), ([0, 1, 3, 5], 3), ([2, 4], 1), ([0, 0, 0], 1)]
)
def test_steps_until_all_is_replayed(bench, replays, steps):
    assert bench.until_replays(replays) == steps


def told(answers):
    """What stands for the processes of arms."""

    def run_arm(args, model, arm, cache):
        found = answers[model]
        return found.get(arm, found["default"])

    return run_arm


def test_models_are_compared_and_told_of(bench, monkeypatch, tmp_path, capsys):
    failed = {"default": DEFAULT, "cgpass": {"error": "RuntimeError: no"}}
    answers = {"gpt2": {"default": DEFAULT, "cgpass": OURS}, "llama": failed}
    monkeypatch.setattr(bench, "run_arm", told(answers))
    path = tmp_path / "start.json"
    assert bench.main(["--models", "gpt2,llama", "--device", "cpu", "--json", str(path)]) == 1
    found = json.loads(path.read_text())
    assert taking.part(found) == "start"
    first, second = found["results"]
    assert first["compared"] == {
        "steps_until_replays": 3,
        "extra_cold_s": 0.9,
        "first_warm_ratio": 1.1,
        "partitions": 2,
        "default_cold_s": 21.6,
        "default_first_warm_s": 5.0,
    }
    assert "compared" not in second
    assert "RuntimeError: no" in capsys.readouterr().out
    assert measured.start(found) == (
        "From `torch.compile` until all of a step is replayed it takes 0.90 s longer than in default with nothing cached; in a "
        "second process the first step is done after 1.10 times the time (GPT-2 small)."
    )
    assert measured.start({"results": [second]}) == ""


def test_what_a_second_process_spends_its_time_on_is_told():
    spent = {"reading": 0.5, "loading": 3.25}
    warm = {
        "cgpass": steps(9.0, compile_s=0.5) | {"spent_s": spent},
        "default": steps(7.5, compile_s=1.0) | {"spent_s": {"reading": 0.0, "loading": 3.0}},
    }
    arms = {arm: {"warm": each} for arm, each in warm.items()}
    row = {"title": "GPT-2 small, B2", "arms": arms, "compared": {}}
    assert measured.second_process({"results": [row]}) == (
        "In a second process the first step takes, in seconds, with GPT-2 small 1.00 more: "
        "reading 0.50, loading 3.25 (default 3.00)."
    )
    row["compared"] = {"extra_cold_s": 1.0, "first_warm_ratio": 1.1, "partitions": 2}
    results = {"bench": bench_results(), "start": {"results": [row]}}
    assert "GPT-2 small 1.00 more" in breakdown.section(results, "m")
    del warm["default"]["spent_s"]
    assert measured.second_process({"results": [row]}) == ""


def test_time_is_noted_where_it_is_spent(monkeypatch):
    clock = iter([1.0, 1.5, 10.0, 12.0, 20.0, 21.0])
    monkeypatch.setattr(spent.time, "perf_counter", lambda: next(clock))
    monkeypatch.setattr(torch_private, "unpickled", lambda data: data * 2)
    monkeypatch.setattr(FxGraphCache, "prepare_key", staticmethod(lambda gm: "key"))
    before = torch_private.unpickled, FxGraphCache.__dict__["prepare_key"], base._run_one
    with spent.watched() as found:
        assert torch_private.unpickled(b"a") == b"aa"
        assert FxGraphCache.prepare_key(None) == "key"
        assert FxGraphCache.prepare_key(None) == "key"
    assert found == {spent.READING: 0.5, spent.PASSES: 0.0, spent.KEYS: 3.0, spent.LOADING: 0.0}
    assert before == (
        torch_private.unpickled,
        FxGraphCache.__dict__["prepare_key"],
        base._run_one,
    )


def test_models_that_there_was_no_time_for_are_named(bench, monkeypatch, tmp_path):
    monkeypatch.setattr(bench, "run_arm", told({"gpt2": {"default": DEFAULT, "cgpass": OURS}}))
    clock = iter(range(0, 10_000, 300))
    monkeypatch.setattr(bench.time, "monotonic", lambda: next(clock))
    path = tmp_path / "start.json"
    command = ["--device", "cpu", "--tiny", "--json", str(path)]
    assert bench.main(["--models", "gpt2,llama", *command]) == 1
    found = json.loads(path.read_text())
    assert (found["left_out"], len(found["results"])) == (["llama"], 1)
    assert found["results"][0]["title"].endswith(" (tiny)")
    monkeypatch.setattr(bench.time, "monotonic", lambda: 0)
    assert bench.main(["--models", "gpt2", *command]) == 0


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_budget_is_a_number_of_seconds(bench, capsys, value):
    with pytest.raises(SystemExit, match="2"):
        bench.main([f"--budget={value}"])
    assert f"{value!r} is no number above 0" in capsys.readouterr().err


def test_unknown_models_are_refused(bench, capsys):
    with pytest.raises(SystemExit):
        bench.main(["--models", "gpt9"])
    assert "'gpt9' is none of gpt2, llama" in capsys.readouterr().err


def test_the_second_process_finds_what_the_first_one_left(bench, monkeypatch, tmp_path):
    runs = []

    def run(command, *, env, **settings):
        runs.append((command[2:], env["TORCHINDUCTOR_CACHE_DIR"]))
        out = "said by a library\n" + json.dumps(steps(float(len(runs))))
        return subprocess.CompletedProcess(command, 0, out, "")

    monkeypatch.setattr(bench.subprocess, "run", run)
    args = bench.argparse.Namespace(device="cpu", tiny=True)
    found = bench.run_arm(args, "gpt2", "cgpass", tmp_path)
    assert [found[phase]["steps_s"] for phase in ("cold", "warm")] == [[1.0], [2.0]]
    assert runs == [(["--one", "gpt2", "cgpass", "--device", "cpu", "--tiny"], str(tmp_path))] * 2


def test_a_process_that_fails_says_why(bench, monkeypatch, tmp_path):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nRuntimeError: no such device\n")
    monkeypatch.setattr(bench.subprocess, "run", lambda *args, **settings: failed)
    args = bench.argparse.Namespace(device="cuda", tiny=False)
    found = bench.run_arm(args, "gpt2", "default", tmp_path)
    assert found == {"error": "RuntimeError: no such device"}
