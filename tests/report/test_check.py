"""`python -m cgpass check`, doctor and the pytest fixture: for scripts, machines and tests of users."""

import contextlib
import dataclasses
import io
import runpy
import sys
from pathlib import Path

import pytest
import torch

import cgpass
from cgpass import __main__ as command
from cgpass.errors import ExpectationError, OptionError
from cgpass.report import check, doctor
from cgpass.report.report import Report
from cgpass.report.text import NOTHING
from cgpass.runtime import native
from tests.operators import tagged, waits
from tests.report.samples import joined, watched

SCRIPT = """
import os
import sys
import torch

if __name__ == "__main__":
    import beside

    assert os.path.isabs(__file__)
    calls = int(sys.argv[1])
    call = torch.compile(beside.fn, backend="cgpass", options={"on_skip": "silent"})
    for _ in range(calls):
        call(torch.ones(4))
    print("ran", calls)
    sys.exit()
"""
BESIDE = """
def fn(x):
    return x.sin().cos().exp().tanh()
"""


@pytest.fixture
def script(tmp_path, monkeypatch):
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text(BESIDE)
    monkeypatch.setenv("CGPASS_DRIVER", "simulated")
    monkeypatch.setenv("CGPASS_COMPILER", "eager")
    yield tmp_path / "script.py"
    sys.modules.pop("beside", None)
    torch.compiler.reset()


def test_threads_of_a_script_are_waited_for_and_stdout_has_few_letters(
    tmp_path, counted_alone, monkeypatch
):
    script = tmp_path / "script.py"
    script.write_text(
        "import threading, time\n"
        "from concurrent.futures import ThreadPoolExecutor\n"
        "pool = ThreadPoolExecutor()\n"
        "pool.submit(print).result()\n"
        "later = threading.Thread(target=lambda: (time.sleep(0.2), print('ended')))\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), later.start())).start()\n"
    )
    said = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    monkeypatch.setattr(check, "costs", lambda _: ["größer"])
    monkeypatch.setattr(sys, "stdout", said)
    assert command.main(["check", str(script)]) == 1
    assert said.buffer.getvalue().startswith(b"\nended\n")
    assert said.buffer.getvalue().endswith(b"gr\\xf6\\xdfer\n")


def test_calls_that_raised_and_were_caught_did_not_fall_back(simulated):
    table = torch.ones(4, 2)

    def fn(x):
        y = table[x].sin().cos().exp().tanh()
        return torch.histc(y, 4).sin().cos().exp().tanh()

    call = torch.compile(fn, backend="cgpass")
    with cgpass.explain() as report:
        for n in (0, 0, 0, 9, 9, 0):
            with contextlib.suppress(IndexError):
                call(torch.tensor([n]))
    (graph,) = report.graphs
    assert [part.calls for part in graph.partitions] == [3, 3, 3]
    assert check.verdict(report, 0.8)[0], report


def test_a_script_that_is_captured_passes(script, counted_alone, capsys, monkeypatch):
    """As `python -m cgpass` runs it, from the script's folder."""
    monkeypatch.chdir(script.parent)
    command_line = ["cgpass", "check", "--save", "all.json", "script.py", "5"]
    monkeypatch.setattr(sys, "argv", command_line)
    monkeypatch.delitem(sys.modules, "cgpass.__main__")  # runpy warns of what is imported already
    with pytest.raises(SystemExit) as done:
        runpy.run_module("cgpass", run_name="__main__", alter_sys=True)
    assert done.value.code == 0
    assert capsys.readouterr().out == (
        "ran 5\ncgpass check: passed: 100% of the 16 operators that compiled code ran after its warm-ups were\n"
        "  captured, 95% required\n"
    )
    assert command.main(["report", str(script.with_name("all.json")), "-o", "-"]) == 0
    assert "beside.py:3 in fn" in capsys.readouterr().out


def test_a_script_that_is_not_fails_with_the_list(script, counted_alone, capsys, monkeypatch):
    monkeypatch.setenv("CGPASS_DRIVER", "auto")
    assert command.main(["check", "--min-captured", "0.5", str(script), "5"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: 0% of the 20 operators" in shown
    assert "50% required" in shown
    assert "1. inference of beside.py:3 in fn\n" in shown
    assert "it runs without CUDA graphs: it uses no CUDA device\n" in shown
    assert "Do: move it to CUDA" in shown


def test_a_script_that_fails_keeps_its_status(tmp_path, capsys):
    script = tmp_path / "fails.py"
    script.write_text("import sys\nprint(sys.argv, sys.path[0])\nsys.exit('it says')")
    argv, path = sys.argv, sys.path
    assert command.main(["check", str(script), "--min-captured", "x"]) == 1
    assert (sys.argv, sys.path) == (argv, path)
    shown = capsys.readouterr()
    assert shown.out == f"{[str(script), '--min-captured', 'x']} {tmp_path}\n"
    assert f"it says\ncgpass check: nothing was checked: {script} exits with 1\n" in shown.err


@pytest.mark.parametrize("ends", ["sys.stdout = None", "sys.stdout.close()"])
def test_the_status_is_the_verdicts_where_nothing_can_be_printed(
    tmp_path, counted_alone, monkeypatch, ends
):
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    script = tmp_path / "script.py"
    script.write_text(f"import sys\n{ends}")
    assert command.main(["check", str(script)]) == 1


def test_a_module_is_checked(script, counted_alone, capsys, monkeypatch):
    """As `python -m` runs one: from the folder of now, with its own file as the first argument."""
    monkeypatch.chdir(script.parent)
    (script.parent / "within").mkdir()
    script.rename(script.parent / "within" / "part.py")
    (script.parent / "within" / "__init__.py").touch()
    assert command.main(["check", "-m", "within.part", "5", "--of-its-own"]) == 0
    assert "ran 5\ncgpass check: passed: 100% of the 16 operators" in capsys.readouterr().out
    with pytest.raises(ImportError, match=r"No module named within.none"):
        command.main(["check", "-m", "within.none"])
    assert command.main(["check", "none.py"]) == 2
    assert capsys.readouterr().err == "cgpass: there is no script 'none.py' to check\n"
    for name in ("within", "within.part"):
        sys.modules.pop(name, None)


@pytest.mark.parametrize("rest", [["--", "a"], ["a", "--", "b"], ["a"]])
def test_a_script_gets_its_arguments_as_they_are(tmp_path, counted_alone, capsys, rest):
    script = tmp_path / "script.py"
    script.write_text("import sys; print(sys.argv[1:]); sys.exit(256)")
    command.main(["check", str(script), *rest])
    assert capsys.readouterr().out.startswith(f"{rest}\n")


def did(fn, *inputs):
    options = {"driver": "simulated", "compiler": "eager", "on_skip": "silent"}
    return watched(torch.compile(fn, backend="cgpass", options=options), *inputs)


X = torch.ones(4)


def test_what_turned_out_not_to_be_capturable_fell_back(counted_alone):
    report = did(lambda x: waits(x.sin().cos().exp().tanh()).sin().cos().exp().tanh(), *[X] * 6)
    (line,) = check.fell_back(report)
    assert "tests.waits.default" in line
    assert "capturing it failed (RuntimeError: operation not permitted when stream is" in line
    assert "name it in unsafe_ops" in line
    passes, text = check.verdict(report, 0.1)
    assert not passes
    assert "fell back:\n  inference of " in text


def test_nothing_to_check(counted_alone):
    passes, text = check.verdict(Report(made="now"), 0.5)
    assert not passes
    assert " ".join(text.split()) == f"cgpass check: FAILED: {NOTHING}"
    passes, text = check.verdict(did(tagged, X), 0.5)
    assert not passes
    assert "FAILED: 0% of the 1 operator that compiled code ran after its warm-ups" in text
    assert not check.verdict(did(lambda x: x.sin().cos(), X), 0.5)[0]


def test_graph_breaks_are_named_and_not_counted(counted_alone):
    def fn(x):
        y = x.sin().cos().exp().tanh()
        torch._dynamo.graph_break()
        return y.sin().cos().exp().tanh()

    line = fn.__code__.co_firstlineno + 2
    passes, text = check.verdict(did(fn, X, X, X), 0.95)
    assert passes
    assert "100% of the 16 operators" in text
    assert f"1. test_check.py:{line} in fn: graph break: torch._dynamo.graph_break() is" in text
    assert "what runs in eager at a graph break, or is left to it, is not counted" in text
    (broken,) = [each for each in cgpass.summary().splitlines() if each.startswith("at ")]
    assert broken.startswith(f"at test_check.py:{line} in fn: torch._dynamo.graph_break()")
    assert "graph break: torch._dynamo.graph_break() is called [graph_break]; remove it" in broken


@pytest.mark.parametrize(
    ("option", "given", "message"),
    [
        ("--save", "r.xyz", "a report is saved as .json"),
        ("--save", "none/r.json", "none' to save the report in does not exist"),
    ],
)
def test_options_are_looked_at_before_the_script_runs(tmp_path, capsys, option, given, message):
    (tmp_path / "script.py").write_text("print('ran')")
    assert command.main(["check", f"{option}={given}", str(tmp_path / "script.py")]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""
    for text in ("x", "120%", ""):
        with pytest.raises(SystemExit, match="2"):
            command.main(["check", f"--min-captured={text}", str(tmp_path / "script.py")])
        shown = capsys.readouterr()
        assert f"argument --min-captured: invalid percentage value: {text!r}" in shown.err
        assert shown.out == ""
    for text, share in [("95%", 0.95), ("95", 0.95), ("0.95", 0.95), ("1", 1.0), (" 0% ", 0.0)]:
        assert check.percentage(text) == share


# ---- the machine


def test_the_doctor_says_what_is_there_and_replays_a_tiny_graph(capsys):
    torch.compiler.reset()
    status = command.main(["doctor"])
    said = capsys.readouterr().out
    for what in ("torch", "driver", "C++ compiler", "native code", "options"):
        assert f" {what}: " in said
    if not torch.cuda.is_available():
        assert "-- driver: " in said
        assert "ok a tiny graph (simulated): 1 recorded, 3 replays, numbers right" in said
    assert (status == 0) is ("!!" not in said)
    assert max(map(len, said.splitlines())) <= 100


def test_the_doctor_names_what_is_wrong_and_what_to_do(monkeypatch, capsys):
    monkeypatch.setenv("TORCHDYNAMO_DISABLE", "1")
    monkeypatch.setenv("CGPASS_MAX_RECORDINGS", "none")
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setattr(native, "cache_folder", lambda: Path("/proc/none/cgpass"))
    found = [*doctor._environment(), *doctor._compiler(), *doctor._native()]
    sick = {what: fix for what, _, fix in found if fix}
    told = {what: said for what, said, _ in found}
    assert "unset it" in sick["TORCHDYNAMO_DISABLE=1"]
    assert told["C++ compiler"] == "there is no no-such-compiler"
    assert sick["C++ compiler"].startswith("Set CXX to another compiler")
    monkeypatch.setenv("CXX", "g++ 'odd")
    assert "CXX is no command" in str([*doctor._compiler()])
    assert sick["native code"] == "Set XDG_CACHE_HOME to a folder that can be written"
    said = "environment variable CGPASS_MAX_RECORDINGS must be an int >= 1, got 'none' (str)"
    assert (told["options"], sick["options"]) == (said, "Change or unset it")
    assert command.main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert "!! a tiny graph" in said
    assert "0 recorded" in said


def test_the_doctor_tells_of_a_misspelt_variable_once(monkeypatch, capsys):
    monkeypatch.setenv("CGPASS_DRIVR", "none")
    assert command.main(["doctor"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert said.count("CGPASS_DRIVR is not an option; did you mean CGPASS_DRIVER? Change") == 1


@pytest.mark.usefixtures("simulated")
def test_a_script_of_whole_steps_passes_if_they_are_one_graph():
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = cgpass.train_step(lambda x: model(x).square().mean(), optimizer)
    report = watched(step, *[torch.ones(2, 4)] * 5)
    passes, text = check.verdict(report, 0.95)
    assert passes
    assert joined(text) == (
        "cgpass check: passed: 100% of 3 training steps after first ones and warm-ups were one graph, 95% required"
    )
    assert not check.verdict(dataclasses.replace(report, whole_steps=2), 0.95)[0]
    headline = str(report).splitlines()[0]
    assert headline.startswith("only training steps or callables graphed by hand ran (see below), ")
    assert {graph.place.partition(":")[0] for graph in report.graphs} == {"test_check.py"}


# ---- `cgpass.expect` in programs that record, replay and run without a graph


@pytest.fixture
def call():
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    call = torch.compile(lambda x: x.sin() * 2, backend=cgpass.cgpass, options=options)
    return lambda rows=3: call(torch.ones(rows))


def test_what_was_not_is_named_with_what_was_compiled(call):
    call()
    message = r"^cgpass\.expect: recordings grew by 1, not by 0; replays grew by 1, not by 3 \(other counters: calls 1, "
    with (
        pytest.raises(ExpectationError, match=message) as error,
        cgpass.expect(recordings=0, replays=3),
    ):
        call()
    assert str(error.value).endswith(". No graph was compiled inside.")
    few = cgpass.expect(graphs=0, warmups=1)
    with pytest.raises(ExpectationError, match="Compiled inside") as error, few:
        call(4)
    assert "inference of test_check.py" in str(error.value)
    assert "warmups" not in str(error.value).split("(all")[0]


def test_the_blocks_own_error_passes(call):
    with pytest.raises(ValueError, match="mine"), cgpass.expect(calls=7):
        raise ValueError("mine")


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ({"recording": 0}, "there is no counter 'recording'; did you mean 'recordings'?"),
        ({"zzz": 0}, "there is no counter 'zzz'$"),
        ({"calls": True}, "calls must be an int, got True"),
        ({"calls": "1"}, "calls must be an int, got '1'"),
    ],
)
def test_bad_counts(counts, message):
    entered = []
    with pytest.raises(OptionError, match=message.replace("?", r"\?")), cgpass.expect(**counts):
        entered.append(1)
    assert not entered
