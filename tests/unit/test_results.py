"""What documents show of results: in step with them, and made from nothing else."""

import copy
import json
import re
import shutil

import pytest
import results
from benchlib import measured, plots, report, taking

from tests.unit.bench_results import MACHINE, META, STEPS, bench, model, overhead


@pytest.fixture
def folder(tmp_path):
    """A copy of the results that are kept, and of documents that show them."""
    directory = tmp_path / "results"
    shutil.copytree(results.RESULTS, directory)
    shutil.copy(results.PERFORMANCE, tmp_path)
    readme = tmp_path / "README.md"
    shutil.copy(results.README, readme)
    return directory, readme


def test_documents_are_in_step(capsys):
    assert (results.main(["--check"]), capsys.readouterr().err) == (0, "")


def test_what_is_out_of_step_is_named(folder):
    directory, readme = folder
    path = directory / f"bench-{MACHINE}.json"
    data = json.loads(path.read_text())
    data["results"][0]["arms"]["cgpass"]["step_ms"]["median"] *= 2
    path.write_text(json.dumps(data))
    (directory / "steps-old.svg").write_text("<svg/>")
    (directory / f"memory-{MACHINE}.md").write_text("in /home/somebody/out/x.json")
    again = "run scripts/results.py --write"
    assert results.problems(directory, readme) == [
        f"bench-{MACHINE}.md is out of step: {again}",
        f"memory-{MACHINE}.md is out of step: {again}",
        f"README.md is out of step: {again}",
        f"performance.md is out of step: {again}",
        f"steps-{MACHINE}.svg shows other figures than the results: {again}",
        f"memory-{MACHINE}.md names a place on a machine: /home/somebody/out/",
        "steps-old.svg is of no result: remove it",
    ]


def test_texts_are_written_where_nothing_can_draw(folder, monkeypatch, capsys):
    directory, readme = folder
    for path in directory.glob("*.md"):
        path.unlink()
    (directory / f"steps-{MACHINE}.svg").write_text("no plot")
    text, changed = re.subn(r"\| \d+\.\d\d \|", "| 4321.00 |", readme.read_text(), count=1)
    readme.write_text(text)
    assert changed
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert results.write(directory, readme) == 1
    assert f"not drawn: steps-{MACHINE}.svg; needs pip install" in capsys.readouterr().err
    assert readme.read_text() == results.README.read_text()
    assert len(results.problems(directory, readme)) == 1


def test_a_file_that_is_named_after_another_machine(folder):
    directory, readme = folder
    (directory / f"bench-{MACHINE}.json").rename(directory / "bench-b200-torch2.11.json")
    with pytest.raises(SystemExit, match="holds results of bench on h200"):
        results.problems(directory, readme)


def test_plots_show_their_figures(tmp_path):
    pytest.importorskip("matplotlib")
    of_steps = bench(model("small", STEPS), model("loose", {"cgpass": 3.0}))
    for data in (of_steps, overhead()):
        path = tmp_path / "plot.svg"
        plots.draw(path, plots.figures(data))
        first = path.read_text()
        assert plots.shown(path) == plots.figures(data)
        plots.draw(path, plots.figures(data))
        assert path.read_text() == first


def test_bars_are_relative_to_the_limit():
    found = plots.figures(bench(model("small", STEPS), model("loose", {"cgpass": 3.0})))
    assert found["models"] == {"small, B2": {"default": 4.0, "reduce-overhead": 2.0, "cgpass": 1.5}}
    assert found["without_limit"] == ["loose, B2"]
    with pytest.raises(ValueError, match="no plot of results of the kind 'memory'"):
        plots.figures({"kind": "memory"})


def test_sentences_about_losses():
    models = [model(name, STEPS) for name in ("one", "two", "three", "four")]
    for each, equal, deterministic in zip(models, (1, 1, 0), (0, 1, 0), strict=False):
        each["arms"]["cgpass"]["check"] = {"equal": equal, "deterministic": deterministic}
    del models[3]["arms"]["cgpass"]["check"]
    assert measured.losses(bench(*models)) == (
        "Losses are bitwise those of the same kernels without graphs (two: under deterministic "
        "algorithms), but not those of three; not compared: four."
    )
    assert measured.losses(bench(models[2])) == (
        "Losses of three are not those of the same kernels without graphs."
    )
    models[2]["arms"]["cgpass"]["differs"] = True
    row = measured.step_table(bench(*models)).splitlines()[4]
    assert row == "| three, B2 | 8.00 | 4.00 | 3.00 (losses differ) | 2.00 |"


def one_each_way(name, **default):
    found = model(name, STEPS)
    found["arms"]["cgpass"] |= {
        "check": {"equal": True, "deterministic": False, **default},
        "warmup_counters": {"partitions_captured": 2, "partitions_eager": 0},
    }
    return found


def test_a_sentence_about_losses_of_default():
    one, two, three = (
        one_each_way(name, **({} if equal is None else {"default": {"equal": equal}}))
        for name, equal in (("one", True), ("two", False), ("three", None))
    )
    begin = (
        "Losses are bitwise those of the same kernels without graphs. Where forward and backward are one graph each "
        "they are plain `torch.compile`'s, too"
    )
    assert measured.losses(bench(one)) == f"{begin}."
    assert measured.losses(bench(one, two, three)) == (
        f"{begin}, but not those of two; not compared: three."
    )
    assert "torch.compile" not in measured.losses(bench(three))
    assert "3.00 (losses differ)" in measured.step_table(bench(two))


def test_arms_whose_losses_differ_are_marked_in_the_first_table_and_not_drawn():
    sound, wrong, rival = model("sound", STEPS), model("wrong", STEPS), model("rival", STEPS)
    wrong["arms"]["cgpass"]["check"] = {"equal": False}
    rival["arms"]["default"]["differs"] = True
    rows = report.summary_rows([sound, wrong, rival])[2:]
    assert rows == [
        "| sound, B2 | - | 8.00 | 4.00 | - | 3.00 | 2.00 | 2.67 | 1.33 |",
        "| wrong, B2 | - | 8.00 | 4.00 | - | 3.00 (losses differ) | 2.00 | - | - |",
        "| rival, B2 | - | 8.00 (losses differ) | 4.00 | - | 3.00 | 2.00 | - | 1.33 |",
    ]
    found = plots.figures(bench(sound, wrong, rival))
    assert found["models"]["wrong, B2"] == {"default": 4.0, "reduce-overhead": 2.0}
    assert found["models"]["rival, B2"] == {"reduce-overhead": 2.0, "cgpass": 1.5}
    assert found["differing"] == ["cgpass of wrong, B2", "default of rival, B2"]
    assert "differing" not in plots.figures(bench(sound))


def test_a_plot_says_what_it_leaves_out(tmp_path):
    pytest.importorskip("matplotlib")
    wrong = model("wrong", STEPS)
    wrong["arms"]["cgpass"]["differs"] = True
    path = tmp_path / "plot.svg"
    plots.draw(path, plots.figures(bench(wrong, model("loose", {"cgpass": 3.0}))))
    text = path.read_text()
    assert "no limit, so not shown: loose, B2" in text
    assert "values differ, so not shown: cgpass of wrong, B2" in text
    calls = overhead()
    for row in calls["rows"]:
        row["differs"] = ["cgpass"] if row["mode"] == "inference" else []
    plots.draw(path, plots.figures(calls))
    assert ">cgpass</text>" in path.read_text()
    for row in calls["rows"]:
        row["differs"] = list(row["us"])
    for nothing in (calls, bench()):
        plots.draw(path, plots.figures(nothing))
        assert plots.shown(path) == plots.figures(nothing)


def test_sentences_about_memory():
    def of(name, ratio, eager):
        counters = {"partitions_captured": 3, "partitions_eager": eager}
        ours = {"peak_reserved_bytes": 1000 * ratio, "warmup_counters": counters}
        return model(name, {}) | {
            "arms": {"default": {"peak_reserved_bytes": 1000}, "cgpass": ours}
        }

    whole, parts = [of("one", 1.0, 0), of("two", 1.1, 0)], [of("three", 1.5, 2)]
    begin = "Peak reserved memory is "
    plain = "times that of plain `torch.compile`"
    assert measured.memory({"results": whole}) == f"{begin}1.00 to 1.10 {plain}."
    assert measured.memory({"results": whole[:1] + parts}) == (
        f"{begin}1.00 {plain}, and 1.50 times on three, whose step is 5 partitions."
    )
    assert measured.memory({"results": parts}) == (
        f"{begin}1.50 {plain} on three, whose step is 5 partitions."
    )
    assert measured.memory({"results": [model("none", {})]}) == ""


def test_a_section_without_and_with_host_time():
    found = {"bench": bench(model("small", STEPS))}
    without = measured.section(found, MACHINE)
    assert "Host time" not in without
    assert "memory" not in without
    assert f"[benchmark](docs/results/bench-{MACHINE}.md)" in without
    text = " ".join(measured.section(found | {"overhead": overhead()}, MACHINE).split())
    assert (
        "Host time of a call of 100 small layers, 400 parameters: inference 30 us (40 in "
        'reduce-overhead, 90 in default); training 30 us (20 with `parameter_grads="direct"`, 40 '
        "in reduce-overhead, 90 in default)."
    ) in text
    assert text.endswith(f"![Host time over layers](docs/results/overhead-{MACHINE}.svg)")
    assert "| training | 100 | 90.0 | 40.0 | 30.0 | 20.4 |" in report.render(overhead())
    calls = overhead()
    for row in calls["rows"]:
        row["mode"] = report.ONE_THREAD
    assert (
        "400 parameters: training with [the backward in the thread that calls it]"
        "(docs/performance.md#what-to-do-about-it) 30 us (20 with"
    ) in measured.overhead(calls)


def test_arms_whose_results_differ_are_marked_and_not_quoted():
    calls = overhead()
    assert "bitwise" not in measured.overhead(calls)
    for row in calls["rows"]:
        row["differs"] = []
    text = "Results and gradients are bitwise those of the same kernels without graphs, and plain `torch.compile`'s"
    assert measured.overhead(calls).endswith(f" {text}.")
    calls["rows"][3]["differs"] = ["cgpass"]
    assert measured.overhead(calls).endswith(
        f" inference 30 us (40 in reduce-overhead, 90 in default). {text}, but not those of cgpass (training, 100 layers)."
    )
    rows = report.overhead_rows(calls["rows"])
    assert "| training | 100 | 90.0 | 40.0 | 30.0 (results differ) | 20.4 |" in rows
    assert any(row.startswith("| training | 100 | cgpass (results differ) | 5.0") for row in rows)
    figures = plots.figures(calls)
    assert figures["modes"]["training"]["cgpass"] == [[1, 30.0]]
    assert figures["differing"] == ["cgpass of training, 100 layers"]
    assert "differing" not in plots.figures(overhead())
    del calls["rows"][0]["us"]["default"]
    assert "without graphs, but not those of cgpass" in measured.overhead(calls)


def spread(ms, mib=100.0, *, equal=True):
    check = {"equal": equal}
    return {"step_ms": {"median": ms}, "peak_reserved_bytes": mib * 2**20, "check": check}


def on_several_devices(**modes):
    found = {mode: {"arms": arms} for mode, arms in modes.items()}
    return {"kind": "distributed", "meta": META | {"devices": 2}, "modes": found}


def test_a_sentence_about_several_devices():
    found = on_several_devices(
        TP={"default": spread(8.0), "reduce-overhead": {"error": "hangs"}, "cgpass": spread(4.0)},
        FSDP2={
            "default": spread(9.0),
            "reduce-overhead": spread(7.0),
            "cgpass": spread(5.0, 102.0),
        },
    )
    assert measured.distributed(found) == (
        "On 2 such GPUs a step of the Llama takes, with TP 4.00 ms (8.00 in default, reduce-overhead fails); FSDP2 "
        "5.00 ms (9.00 in default, 7.00 in reduce-overhead); losses and parameters are bitwise those of the same "
        "kernels without graphs (under deterministic algorithms), and peak reserved memory is 1.00 to 1.02 times that of plain `torch.compile`."
    )
    found["modes"]["FSDP2"]["arms"]["reduce-overhead"]["process_group_ended"] = False
    assert measured.distributed(found).endswith(
        "`torch.compile`. In reduce-overhead `destroy_process_group` never returned with FSDP2."
    )
    found["modes"]["TP"]["arms"]["cgpass"] = {"error": "no results"}
    found["modes"]["FSDP2"]["arms"]["cgpass"]["check"]["equal"] = False
    assert "; not with TP; losses and parameters are" in measured.distributed(found)
    assert (
        "without graphs (under deterministic algorithms), but not with FSDP2, and peak"
        in measured.distributed(found)
    )
    del found["modes"]["FSDP2"]
    assert measured.distributed(found) == ""


def test_several_devices_are_kept_and_shown(tmp_path):
    data = on_several_devices(TP={"default": spread(8.0), "cgpass": spread(4.0)})
    put(tmp_path, "dist-bench.json", data)
    found = taking.taken([tmp_path], "")
    assert list(found) == ["dist-bench"]
    (path,) = taking.store(found, tmp_path)
    assert path.name == f"dist-bench-{MACHINE}.json"
    text = measured.section({"bench": bench(model("small", STEPS))} | found, MACHINE)
    assert "with TP 4.00 ms" in " ".join(text.split())
    assert f"(docs/results/dist-bench-{MACHINE}.json)" in text


@pytest.mark.parametrize(
    ("command", "expected"),
    [
        (META["command"], "python scripts/bench.py --budget 510 --out bench.json"),
        ("python scripts/x.py --json=/tmp/a/b.json", "python scripts/x.py --json=b.json"),
        ("python scripts/x.py --out ../o/b.json", "python scripts/x.py --out b.json"),
        (
            "python a.py --n 1 && python a.py --out o/b",
            "python a.py --n 1 && python a.py --out o/b",
        ),
    ],
)
def test_commands_name_no_places(command, expected):
    assert report.command_text(command) == expected


def put(folder, name, data):
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(json.dumps(data))


def test_results_of_one_commit_are_merged_by_model(tmp_path):
    lost = model("b", {}, error="the process ended in /usr/lib/python3/site-packages/torch/x.py")
    put(tmp_path / "one", "bench.json", bench(model("a", STEPS), lost) | {"left_out": ["c", "d"]})
    later = bench(
        model("c", STEPS), model("b", STEPS), commit="1234567", time="2026-01-02 04:00:00"
    )
    put(tmp_path / "two", "bench.json", later)
    put(tmp_path / "two", "overhead.json", overhead())
    put(tmp_path / "two", "notes.json", [1])
    put(tmp_path / "two", "dist.json", {"part": "dist", "ok": True, "passed": 0})
    found = taking.taken([tmp_path / "one", tmp_path / "two"], "")
    assert list(found) == ["bench", "overhead"]
    data = found["bench"]
    assert [each["model"] for each in data["results"]] == ["a", "b", "c"]
    assert "error" not in data["results"][1]
    assert data["left_out"] == ["d"]
    assert data["meta"]["commit"] == "1234567"
    assert data["meta"]["command"] == "python scripts/bench.py --budget 510 --out bench.json"
    assert (data["meta"]["seconds"], data["meta"]["time"]) == (20.0, META["time"])


def test_what_is_kept_is_in_the_order_of_what_was(tmp_path):
    taking.store({"bench": bench(model("b", STEPS), model("a", STEPS))}, tmp_path)
    new = bench(*(model(name, STEPS) for name in "cab"))
    (path,) = taking.store({"bench": new}, tmp_path)
    assert path.name == f"bench-{MACHINE}.json"
    assert [each["model"] for each in json.loads(path.read_text())["results"]] == ["b", "a", "c"]


def test_places_in_errors_are_left_out(tmp_path):
    lost = model(
        "b", {}, error="File /usr/lib/torch/x.py: captured/eager, and/or, https://a.org/b/c"
    )
    put(tmp_path, "bench.json", bench(lost))
    (kept,) = taking.taken([tmp_path], "")["bench"]["results"]
    assert kept["error"] == "File x.py: captured/eager, and/or, https://a.org/b/c"


@pytest.mark.parametrize(
    ("second", "commit", "message"),
    [
        (bench(model("b", STEPS), commit="7654321"), "", "different commits: 1234567, 7654321"),
        (bench(model("b", STEPS)), "7654321", "different commits: 1234567, 7654321"),
        (bench(model("b", STEPS), commit=""), "", "give --commit"),
        (bench(model("a", STEPS)), "", "measured in two of the results: a"),
        (bench(model("b", STEPS), gpu="NVIDIA B200"), "", "different machines: gpu NVIDIA B200"),
        (overhead(gpu="cpu"), "", "measured without a GPU"),
        (overhead(gpu=None), "", "measured without a GPU"),
        (overhead(torch="2.12.0"), "", "different machines: h200-torch2.11, h200-torch2.12"),
        ({"part": "tests", "ok": False, "gpu": "NVIDIA H200"}, "", "its tests failed"),
    ],
)
def test_results_that_are_refused(tmp_path, second, commit, message):
    put(tmp_path, "1.json", bench(model("a", STEPS)))
    put(tmp_path, "2.json", copy.deepcopy(second))
    with pytest.raises(SystemExit, match=message):
        taking.taken([tmp_path], commit)


def test_a_commit_for_results_that_do_not_say_it(tmp_path):
    put(tmp_path, "1.json", {"ratio_to_torch": {}, "device": "NVIDIA H200", "torch": "2.11.0"})
    assert taking.taken([tmp_path], "1234567890")["graphed"]["commit"] == "1234567"


def test_a_sentence_about_graphed_callables():
    def us(both):
        return {"both": {"median_us": both}}

    found = {"ratio_to_torch": {"cleared": {"both": 1.012}}}
    begins = "A small layer graphed by hand takes 1.01 times the host time"
    assert measured.graphed(found).startswith(begins)
    assert "direct" not in measured.graphed(found)
    found["results"] = {"cleared": {"torch": us(100.0), "cgpass, direct gradients": us(73.2)}}
    assert measured.graphed(found).endswith(', and 0.73 times with `parameter_grads="direct"`.')
