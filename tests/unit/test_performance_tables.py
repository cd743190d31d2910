"""Tables of docs/performance.md: goals, and where the time of a step goes."""

import itertools

from benchlib import breakdown, goals, report

from tests.unit.bench_results import STEPS, bench, model, overhead


def test_models_whose_names_begin_alike_are_told_apart():
    titles = ["Mixtral 8 x 512, B1", "Mixtral, bf16 weights", "ViT-S, B8"]
    models = [model("any", {}, title) for title in titles]
    names = [breakdown.name_of(one, models) for one in models]
    assert names == ["Mixtral 8 x 512", "Mixtral, bf16 weights", "ViT-S"]


def test_goals_say_what_is_reached_and_what_is_not():
    slow = model("slow", STEPS | {"cgpass": 2.5})
    fast = model("fast", STEPS | {"cgpass": 2.1})
    regional = model("r", {"cgpass": 6.0}, title="Llama by layers, B1")
    found = {"bench": bench(slow, fast, regional), "overhead": overhead()}
    rows = {line.split(" | ")[0][2:]: line for line in goals.table(found).splitlines()}
    assert rows["synchronised step, ms over the limit"].endswith(
        "| 0.15 | 0.10 to 0.50 | 2.00 | not with slow (0.50) |"
    )
    assert rows["Llama compiled layer by layer, ms a step"].endswith("| 7.0 | 6.00 | - | reached |")
    assert rows["one layer, inference, us"].endswith("| 35 | 30 | 40 | reached |")
    assert not any("reserved" in row or "graphed" in row for row in rows)
    over = goals.table({"bench": bench(slow)}).splitlines()
    assert over[-2].endswith("| 0.50 | 2.00 | not reached |")


def test_aims_are_rows_too():
    slow, fast = model("slow", STEPS | {"cgpass": 2.5}), model("fast", STEPS | {"cgpass": 2.04})
    parts = model("parts", {"reduce-overhead": 30.0, "cgpass": 12.0})
    parts["arms"]["cgpass"]["warmup_counters"] = {"partitions_captured": 3, "partitions_eager": 2}
    peaks = [{"cgpass": 90, "default": 100}, {"cgpass": 108, "default": 100}]
    memory = [
        {"model": "m", "arms": {arm: {"peak_reserved_bytes": n} for arm, n in each.items()}}
        | {"title": str(number)}
        for number, each in enumerate(peaks)
    ]
    found = {"bench": bench(slow, fast, parts), "memory": {"results": memory}}
    rows = goals.table(found).splitlines()
    assert (
        "| synchronised step, times the limit's | 1.03, an aim | 1.02 to 1.25 | 2.00 | not with slow (1.25) |"
        in rows
    )
    assert "| step with eager partitions, ms | 10, an aim | 12.00 | 30.00 | not reached |" in rows
    assert "| the same, mean of all models | 1.00, an aim | 0.990 | - | reached |" in rows
    memory[0]["arms"]["cgpass"]["peak_reserved_bytes"] = 93
    row = "| the same, mean of all models | 1.00, an aim | 1.005 | - | not reached |"
    assert row in goals.table(found).splitlines()


def test_a_step_with_eager_partitions_is_held_against_its_pieces():
    found = model("m", STEPS | {"cgpass": 2.3})
    pieces = {"eager_ms": 1.0, "optimizer_ms": 0.4, "graphs_ms": 0.6}
    found["arms"]["cgpass"]["alone"] = pieces
    table = goals.table({"bench": bench(found)})
    ratio = STEPS["reduce-overhead"] / 2.0
    assert (
        f"| step with eager partitions, times its pieces alone | 1.15 | 1.15 | {ratio:.2f} | reached |"
        in table
    )
    found["arms"]["cgpass"] |= {"step_ms": {"median": 2.4}}
    assert "pieces alone | 1.15 | 1.20 |" in goals.table({"bench": bench(found)})
    note = report.mark("cgpass", found["arms"]["cgpass"])
    assert note == "alone: eager partitions 1.00 ms, graphs 0.60, optimizer 0.40"


def test_pieces_that_took_longer_alone_give_no_figure():
    found, other = model("m", STEPS | {"cgpass": 1.5}), model("other", STEPS | {"cgpass": 2.2})
    for each in (found, other):
        each["arms"]["cgpass"]["alone"] = {"eager_ms": 1.0, "optimizer_ms": 0.4, "graphs_ms": 0.6}
    row = "| step with eager partitions, times its pieces alone | 1.15 "
    why = "no figure: the pieces took longer alone"
    assert f"{row}| - | - | {why} |" in goals.table({"bench": bench(found)})
    why = "reached; no figure of m: the pieces took longer alone"
    assert f"{row}| 1.10 | 2.00 | {why} |" in goals.table({"bench": bench(found, other)})


def test_pieces_that_could_not_be_timed_are_named():
    found = model("m", STEPS)
    found["arms"]["cgpass"]["alone"] = {"error": "RuntimeError: no\nreplay"}
    assert "pieces alone" not in goals.table({"bench": bench(found)})
    assert (
        report.mark("cgpass", found["arms"]["cgpass"])
        == "pieces not timed: RuntimeError: no replay"
    )


def test_goals_of_memory_first_steps_and_several_devices():
    def bytes_of(**arms):
        return {"arms": {name: {"peak_reserved_bytes": value} for name, value in arms.items()}}

    compared = {"extra_cold_s": 2.5, "first_warm_ratio": 1.5, "partitions": 3}
    found = {
        "memory": {"results": [{"model": "m"} | bytes_of(cgpass=90, default=100)]},
        "start": {"results": [{"model": "m", "title": "m", "compared": compared}]},
        "dist-bench": {
            "modes": {
                "sharded": bytes_of(cgpass=1024, default=1000),
                "tensor parallel": bytes_of(cgpass=10, default=10),
            }
        },
        "graphed": {"ratio_to_torch": {"cleared": {"both": 0.9}}},
    }
    said = [line.split(" | ") for line in goals.table(found).splitlines()[2:]]
    assert [(row[2], row[-1].removesuffix(" |")) for row in said] == [
        ("0.90", "reached"),
        ("0.900", "reached"),
        ("1.00 to 1.02", "not with sharded (1.024)"),
        ("2.50", "reached; measured with m"),  # two pieces more may take 0.3 s each
        ("1.50", "not reached; measured with m"),
        ("0.90", "reached"),
    ]
    compared["extra_cold_s"] = 2.7
    assert (
        "| 2, and 0.3 a further piece | 2.70 | - | not reached; measured with m |"
        in goals.table(found)
    )


def test_goals_have_rows_of_the_leanest_way():
    data = bench(model("small", STEPS | {"cgpass-lean": 2.1}))
    for arm, milliseconds in (("cgpass", 3.0), ("cgpass-lean", 1.1)):
        data["results"][0]["arms"][arm]["host_ms"] = {"median": milliseconds}
    calls = overhead()
    calls["rows"].append(
        calls["rows"][-1]
        | {"mode": report.ONE_THREAD, "us": {"cgpass": 2400.0, "cgpass-direct": 900.0}}
    )
    rows = goals.table({"bench": data, "overhead": calls}).splitlines()[2:]
    after = {row.split(" | ")[0][2:]: following for row, following in itertools.pairwise(rows)}
    expected = {
        "synchronised step, ms over the limit": "0.15 | 0.10 | - | reached |",
        "host, forward and backward, ms": "1.2 | 1.10 | - | reached |",
    }
    for what, row in expected.items():
        assert after[what] == f"| the same, leanest | {row}"
    assert (
        after["100 layers, training, us"]
        == "| the same, one thread | 2300 | 2400 | - | not reached |"
    )
    assert rows[-1] == "| the same, one thread | 1200 | 900 | - | reached |"


def test_steps_and_host_time_of_the_leanest_way_are_columns():
    small, other = model("small", STEPS), model("other", STEPS | {"cgpass-lean": 2.1})
    other["arms"]["cgpass-lean"]["host_ms"] = {"median": 0.7}
    head, _, *rows = breakdown.steps(bench(small, other)).splitlines()
    assert head.endswith("| GPU busy | leanest step | leanest host |")
    assert [row.split(" | ")[-2:] for row in rows] == [["-", "- |"], ["2.10", "0.70 |"]]


def test_arms_whose_losses_differ_reach_no_goal():
    fast, slow = model("fast", STEPS | {"cgpass": 2.1}), model("slow", STEPS | {"cgpass": 2.05})
    for each in (fast, slow):
        each["arms"]["cgpass"]["loop_ms"] = each["arms"]["limit"]["loop_ms"] = {"median": 1.0}
    slow["arms"]["cgpass"] |= {"differs": True, "loop_ms": {"median": 0.5}}
    row = "| synchronised step, ms over the limit | 0.15 | 0.10 | 2.00 | reached; slow (losses differ) |"
    assert row in goals.table({"bench": bench(fast, slow)}).splitlines()
    assert "they take 1.00 times" in goals.in_a_loop(bench(fast, slow))
    row = "| synchronised step, ms over the limit | 0.15 | - | 2.00 | slow (losses differ) |"
    assert row in goals.table({"bench": bench(slow)}).splitlines()
    slow["arms"]["cgpass"]["differs"], slow["arms"]["limit"]["differs"] = False, True
    rows = goals.table({"bench": bench(fast, slow)}).splitlines()
    assert rows[2].endswith("| reached; slow (losses of limit differ) |")
    slow["arms"]["cgpass"]["differs"], slow["arms"]["limit"]["differs"] = True, False
    assert goals.in_a_loop(bench(slow)) == ""


def test_calls_whose_results_differ_reach_no_goal_and_have_no_stages():
    calls = overhead()
    calls["rows"][-1]["differs"] = ["cgpass-direct", "cgpass"]
    rows = goals.table({"bench": bench(), "overhead": calls}).splitlines()
    assert rows[-2] == ("| 100 layers, training, us | 2300 | - | 40 | 100 layers (losses differ) |")
    assert rows[-1].endswith("| 1200 | - | - | 100 layers (losses differ) |")
    section = breakdown.section({"bench": bench(), "overhead": calls}, "m")
    assert "| all | 30 | 30 | 30 | - |" in section
    assert f"| {breakdown.GUARDS} | 5 | 5 | 5 | - |" in section


def test_losses_of_one_arm_say_nothing_of_another():
    found = model("m", STEPS | {"cgpass": 2.1, "cgpass-lean": 2.05})
    found["arms"]["cgpass-lean"]["check"] = {"equal": False}
    rows = goals.table({"bench": bench(found)}).splitlines()[2:]
    assert [row.split(" | ", 2)[2] for row in rows] == [
        "0.10 | 2.00 | reached |",
        "- | - | m (losses differ) |",
        "1.05 | 2.00 | not reached |",
        "- | - | m (losses differ) |",
    ]


def test_several_devices_with_losses_that_differ():
    arms = {name: {"peak_reserved_bytes": 1000} for name in ("default", "cgpass")}
    wrong = arms | {"cgpass": arms["cgpass"] | {"check": {"equal": False}}}
    found = {"dist-bench": {"modes": {"TP": {"arms": arms}, "FSDP2": {"arms": wrong}}}}
    assert goals.table(found).endswith("| 1.00 | - | reached; FSDP2 (losses differ) |")


def test_where_the_time_of_a_model_goes():
    staged, other = model("staged", STEPS, "Staged, B2"), model("other", STEPS, "Other, B2")
    stage = {"before": 10.0, "launch": 20.4, "after the launch": 3.0, "rest": 0.0}
    stages = {
        "forward": stage,
        "backward": stage | {"rest": 7.0},
        "until_done": 900.0,
        "guards": 4.0,
    }
    staged["arms"]["cgpass"] |= {"stages": stages, "kernels": {"gpu_busy_ms": 0.65}}
    other["arms"]["cgpass"]["stages"] = {"error": "RuntimeError: only 3 of 100 steps were a replay"}
    assert breakdown.model_stages(bench(staged, other)).splitlines() == [
        "| | Staged |",
        "|---|---|",
        "| until the device is done | 900 |",
        "| of that, the device is idle | 250 |",
        "| Dynamo's guards, part of what is before the forward | 4 |",
        "| forward: before | 10 |",
        "| forward: launch | 20 |",
        "| forward: after the launch | 3 |",
        "| backward: before | 10 |",
        "| backward: launch | 20 |",
        "| backward: after the launch | 3 |",
        "| backward: rest | 7 |",
    ]
    assert breakdown.model_stages(bench(other)) == ""
    staged["arms"]["cgpass"]["differs"] = True
    assert breakdown.model_stages(bench(staged)) == ""
    assert breakdown.steps(bench(staged)).splitlines()[2].startswith("| Staged | - | 2.00 |")


def test_finer_stages_beside_those_of_older_results():
    old, new = model("old", STEPS, "Old, B2"), model("new", STEPS, "New, B2")
    stage = {"before": 10.0, "launch": 20.0, "after the launch": 3.0, "rest": 0.0}
    old["arms"]["cgpass"]["stages"] = {
        "forward": stage,
        "backward": stage,
        "until_done": 900.0,
        "guards": 4.0,
    }
    new["arms"]["cgpass"]["stages"] = {
        "until_done": 800.0,
        "replays": 34,
        "guards": 5.0,
        "forward": {"until called": 8.0, "replay": 7.0, "eager operators": 60.0},
        "backward": {"replay": 9.0, "gradients": 11.0},
    }
    assert breakdown.model_stages(bench(old, new)).splitlines()[2:] == [
        "| until the device is done | 900 | 800 |",
        "| of that, the device is idle | - | - |",
        "| graphs that are replayed | - | 34 |",
        "| Dynamo's guards, part of what is before the forward | 4 | 5 |",
        "| forward: before | 10 | - |",
        "| forward: launch | 20 | - |",
        "| forward: after the launch | 3 | - |",
        "| forward: until called | - | 8 |",
        "| forward: replay | - | 7 |",
        "| forward: eager operators | - | 60 |",
        "| backward: before | 10 | - |",
        "| backward: launch | 20 | - |",
        "| backward: after the launch | 3 | - |",
        "| backward: replay | - | 9 |",
        "| backward: gradients | - | 11 |",
    ]


def test_how_long_the_device_is_idle_in_a_call_of_a_stack():
    data = overhead()
    assert "idle" not in breakdown.stages(data), "older results don't say it"
    for row, busy in zip(data["rows"], (None, 31.0, 20.0, 10.0), strict=True):
        found = {"guards": 5.0, "until_done": 100.0, "forward": {"replay": 7.0}}
        row["stages"] = {"cgpass": found | ({"gpu_busy": busy} if busy else {})}
    assert breakdown.stages(data).splitlines()[2:7] == [
        "| all | 30 | 30 | 30 | 30 |",
        "| until the device is done | 100 | 100 | 100 | 100 |",
        "| of that, the device is idle | - | 69 | 80 | 90 |",
        "| Dynamo's guards, part of what is before the forward | 5 | 5 | 5 | 5 |",
        "| forward: replay | 7 | 7 | 7 | 7 |",
    ]
