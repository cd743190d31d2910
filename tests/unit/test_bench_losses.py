"""Losses in the benchmark: which are compared bitwise, with what, and what is said of it."""

import copy
from types import SimpleNamespace

import pytest
import torch
from benchlib import arms, measure, measured, report, worker

LEAN = report.LEAN
PLAIN = [3.0, 2.0]
OTHER = [3.0, 2.0000001]


class Arm:
    """As much of an arm as is asked for: its losses are those of a table."""

    def __init__(self, name, runs):
        self.name, self.runs = name, runs
        self.workload = SimpleNamespace(batches=[0, 1])

    def prepare(self):
        self.restart()

    def restart(self):
        plain = not torch.are_deterministic_algorithms_enabled()
        self.next = iter(self.runs[self.name, plain].pop(0))

    def step(self, batch):
        return next(self.next)


def checked(monkeypatch, tmp_path, runs, **losses):
    """What is written of arms with these losses, and which arms ran again for it."""
    made = []

    def make(name, workload):
        made.append(name)
        return Arm(name, runs)

    monkeypatch.setattr(measure, "make", make)
    monkeypatch.setattr(arms, "make", make)
    losses = {name.replace("_", "-"): value for name, value in losses.items()}
    found = worker.Results(tmp_path / "m.json")
    for name, value in losses.items():
        found.arm(name)["losses"] = value
    job = SimpleNamespace(name="m", check_steps=2, directory=str(tmp_path))
    worker.check(job, SimpleNamespace(device=torch.device("cpu")), dict.fromkeys(losses), found)
    return found.data["arms"], made


def test_the_leanest_arm_is_compared_bitwise_with_the_same_reference(monkeypatch, tmp_path):
    runs = {
        ("cgpass-none", True): [PLAIN, PLAIN],
        ("cgpass-none", False): [PLAIN, PLAIN],
        (LEAN, False): [OTHER],
    }
    found, made = checked(monkeypatch, tmp_path, runs, eager=PLAIN, cgpass=PLAIN, cgpass_lean=OTHER)
    assert [found[name]["differs"] for name in ("eager", "cgpass", LEAN)] == [False, False, True]
    assert found[LEAN]["check"]["deterministic_losses"] == OTHER
    assert made == ["cgpass-none", "cgpass-none", LEAN]


def test_without_eager_too(monkeypatch, tmp_path):
    runs = {("cgpass-none", True): [PLAIN, PLAIN]}
    found, made = checked(monkeypatch, tmp_path, runs, cgpass_lean=PLAIN, cgpass_direct=PLAIN)
    assert [entry["check"]["equal"] for entry in found.values()] == [True, True]
    assert made == ["cgpass-none"]


def test_plain_runs_that_differ_are_repeated_once_for_both_arms(monkeypatch, tmp_path):
    runs = {
        ("cgpass-none", True): [PLAIN, OTHER],
        ("cgpass-none", False): [PLAIN, PLAIN],
        ("cgpass", False): [PLAIN],
        (LEAN, False): [PLAIN],
    }
    found, made = checked(monkeypatch, tmp_path, runs, cgpass=OTHER, cgpass_lean=PLAIN)
    assert made == ["cgpass-none", "cgpass-none", "cgpass", LEAN]
    for entry in found.values():
        assert (entry["check"]["equal"], entry["check"]["deterministic"]) == (True, True)
        assert entry["differs"] is False


WHOLE = {"partitions_captured": 2, "partitions_eager": 0}


def against_default(monkeypatch, tmp_path, runs, ours, default, counters=WHOLE):
    """What is found of cgpass and default, whose losses these are."""
    start = worker.Results.arm

    def arm(self, name):
        entry = start(self, name)
        if name == "cgpass":
            entry["warmup_counters"] = counters
        return entry

    monkeypatch.setattr(worker.Results, "arm", arm)
    found, made = checked(monkeypatch, tmp_path, runs, default=default, cgpass=ours)
    return found["cgpass"], made


def test_losses_of_one_partition_each_way_have_to_be_those_of_default(monkeypatch, tmp_path):
    runs = {("cgpass-none", True): [PLAIN, PLAIN]}
    found, made = against_default(monkeypatch, tmp_path, copy.deepcopy(runs), PLAIN, PLAIN)
    assert (found["differs"], found["check"]["default"]["equal"]) == (False, True)
    assert made == ["cgpass-none"]
    runs["default", True] = [OTHER, OTHER]
    found, made = against_default(monkeypatch, tmp_path, copy.deepcopy(runs), PLAIN, OTHER)
    assert (found["differs"], found["check"]["equal"]) == (True, True)
    assert found["check"]["default"] == {"losses": OTHER, "equal": False, "deterministic": False}
    assert made == ["cgpass-none", "default"]
    several = {"partitions_captured": 3, "partitions_eager": 1}
    found, _ = against_default(monkeypatch, tmp_path, runs, PLAIN, OTHER, several)
    assert found["differs"] is False
    assert "default" not in found["check"]


@pytest.mark.parametrize(("theirs", "equal"), [(PLAIN, True), (OTHER, False)])
def test_where_defaults_own_runs_differ_both_run_again_under_deterministic_algorithms(
    monkeypatch, tmp_path, theirs, equal
):
    runs = {
        ("cgpass-none", True): [PLAIN, PLAIN],
        ("default", True): [OTHER, PLAIN],
        ("default", False): [theirs],
        ("cgpass", False): [PLAIN],
    }
    found, made = against_default(monkeypatch, tmp_path, runs, PLAIN, OTHER)
    assert made == ["cgpass-none", "default", "cgpass", "default"]
    assert (found["differs"], found["check"]["deterministic"]) == (not equal, False)
    assert found["check"]["default"] == {"losses": theirs, "equal": equal, "deterministic": True}


@pytest.mark.parametrize(("theirs", "equal"), [(PLAIN, True), (OTHER, False)])
def test_default_is_compared_under_deterministic_algorithms_where_the_plain_runs_differ(
    monkeypatch, tmp_path, theirs, equal
):
    runs = {
        ("cgpass-none", True): [PLAIN, OTHER],
        ("cgpass-none", False): [PLAIN, PLAIN],
        ("cgpass", False): [PLAIN],
        ("default", False): [theirs],
    }
    found, made = against_default(monkeypatch, tmp_path, runs, OTHER, PLAIN)
    assert made == ["cgpass-none", "cgpass-none", "cgpass", "default"]
    assert found["differs"] is not equal
    assert found["check"]["default"] == {"losses": theirs, "equal": equal, "deterministic": True}


def entry(losses, *, deterministic=False, eager=0, **more):
    counters = {"partitions_captured": 2 + eager, "partitions_eager": eager}
    check = {"equal": True, "deterministic": deterministic}
    return {"losses": losses, "warmup_counters": counters, "check": check} | more


def with_default(losses, *, equal=True, mode=False, **more):
    found = entry(losses, **more)
    mode = mode or found["check"]["deterministic"]
    found["check"]["default"] = {"equal": equal, "deterministic": mode}
    return found


@pytest.mark.parametrize(
    ("ours", "expected"),
    [
        (entry(PLAIN), "losses bitwise equal, and default's"),
        (entry(OTHER), "**losses differ from default's**"),
        (entry(OTHER, eager=1), "losses bitwise equal"),
        (entry(OTHER, deterministic=True), "losses bitwise equal, deterministic mode"),
        (with_default(OTHER, equal=False), "**losses differ from default's**"),
        (
            with_default(OTHER, deterministic=True),
            "losses bitwise equal, deterministic mode, and default's",
        ),
        (
            with_default(OTHER, mode=True),
            "losses bitwise equal, and default's in deterministic mode",
        ),
        (entry(PLAIN, check={"equal": False}), "**losses differ**"),
        (entry(PLAIN, differs=True), "**losses differ**"),
        (entry(PLAIN, check=None), "losses not compared bitwise"),
    ],
)
def test_a_note_says_whose_losses_they_are(ours, expected):
    assert report.mark("cgpass", ours, {"default": {"losses": PLAIN}, "cgpass": ours}) == expected
    if ours["check"]:
        assert report.mark(LEAN, ours, {"default": {"losses": PLAIN}}) == expected


def test_a_comparison_that_failed_says_why():
    ours = entry(
        PLAIN, check={"error": "RuntimeError: no\nmemory", "equal": False}, step_ms={"median": 1.0}
    )
    arms = {"cgpass": ours}
    assert report.mark("cgpass", ours, arms) == "**losses not compared**: RuntimeError: no memory"
    assert report.step_text("cgpass", arms) == "1.00 (losses differ)"
    found = {"results": [{"model": "m", "arms": arms}]}
    assert measured.losses(found) == "Losses of m are not those of the same kernels without graphs."


def test_older_results_of_the_leanest_arm_are_held_against_those_of_cgpass():
    arms = {"cgpass": entry(PLAIN), LEAN: entry(PLAIN, check=None)}
    assert report.mark(LEAN, arms[LEAN], arms) == "losses are cgpass'"
    arms[LEAN]["losses"] = OTHER
    assert report.mark(LEAN, arms[LEAN], arms) == "losses not compared bitwise"
    assert report.mark("limit", arms[LEAN], arms) == ""
    assert report.mark(LEAN, {"error": "no"}, arms) == "failed: no"
