"""`python -m cgpass`: reports from files, and scripts of which enough has to be captured."""

import runpy
import sys

import pytest
import torch
from cgpass.report.collect import snapshot

import cgpass
from cgpass import __main__ as command
from cgpass import telemetry
from cgpass.errors import ReportError
from cgpass.report import check
from cgpass.report.page import html
from tests.report.samples import sample

SCRIPT = """
import sys
import torch

if __name__ == "__main__":
    import beside

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


def test_a_script_that_is_captured_passes(script, registry, capsys, monkeypatch):
    """As `python -m cgpass` runs it, from the script's folder."""
    monkeypatch.chdir(script.parent)
    command_line = ["cgpass", "check", "--save", "all.json", "script.py", "5"]
    monkeypatch.setattr(sys, "argv", command_line)
    monkeypatch.delitem(sys.modules, "cgpass.__main__")  # runpy warns of what is imported already
    with pytest.raises(SystemExit) as done:
        runpy.run_module("cgpass", run_name="__main__", alter_sys=True)
    assert done.value.code == 0
    assert capsys.readouterr().out == (
        "ran 5\ncgpass check: passed: 100% of the 16 operators that compiled functions ran after their warm-ups were\n"
        "  captured, 95% are wanted\n"
    )
    assert command.main(["report", str(script.with_name("all.json")), "-o", "-"]) == 0
    assert "beside.py:3 in fn" in capsys.readouterr().out


def test_a_script_that_is_not_fails_with_the_list(script, registry, capsys, monkeypatch):
    monkeypatch.setenv("CGPASS_DRIVER", "auto")
    assert command.main(["check", "--min-captured", "0.5", str(script), "5"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: 0% of the 20 operators" in shown
    assert "50% are wanted" in shown
    assert (
        "inference of beside.py:3 in fn (4 operators): it uses no CUDA device; move it to CUDA, or have"
        in shown
    )


def test_versions_are_told(capsys):
    with pytest.raises(SystemExit, match="0"):
        command.main(["--version"])
    assert capsys.readouterr().out == f"cgpass {cgpass.__version__}, torch {torch.__version__}\n"


def test_help_says_which_share_is_wanted(capsys):
    with pytest.raises(SystemExit):
        command.main(["check", "--help"])
    assert "(default: 95%)" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("last_line", "status", "said"), [("sys.exit(3)", 3, ""), ("sys.exit('it says')", 1, "it says")]
)
def test_a_script_that_fails_keeps_its_status(tmp_path, capsys, last_line, status, said):
    script = tmp_path / "fails.py"
    script.write_text(f"import sys\nprint(sys.argv, sys.path[0])\n{last_line}")
    argv, path = sys.argv, sys.path
    assert command.main(["check", str(script), "--min-captured", "x"]) == status
    assert (sys.argv, sys.path) == (argv, path)
    shown = capsys.readouterr()
    assert shown.out == f"{[str(script), '--min-captured', 'x']} {tmp_path}\n"
    assert said in shown.err
    assert f"cgpass check: nothing was checked: {script} exits with {status}\n" in shown.err


def test_a_module_is_checked(script, registry, capsys, monkeypatch):
    """As `python -m` runs one: from the folder of now, with its own file as the first argument."""
    monkeypatch.chdir(script.parent)
    (script.parent / "within").mkdir()
    script.rename(script.parent / "within" / "part.py")
    (script.parent / "within" / "__init__.py").touch()
    assert command.main(["check", "-m", "within.part", "5", "--of-its-own"]) == 0
    assert "ran 5\ncgpass check: passed: 100% of the 16 operators" in capsys.readouterr().out
    for name in ("within.none", "none.at.all", "within/part"):
        assert command.main(["check", "-m", name]) == 2
        assert f"there is no module {name!r} to check" in capsys.readouterr().err
    for name in ("within", "within.part"):
        sys.modules.pop(name, None)


def test_a_script_that_raises_does_so(tmp_path):
    (tmp_path / "raises.py").write_text("raise LookupError('its own')")
    with pytest.raises(LookupError, match="its own"):
        command.main(["check", str(tmp_path / "raises.py")])


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(telemetry, "_registry", telemetry._Registry())
    monkeypatch.setattr(telemetry, "compile_stats", telemetry._registry.compiled)


@torch.library.custom_op("checked::host", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def host(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@torch.library.custom_op("checked::waits", mutates_args=())
def waits(x: torch.Tensor) -> torch.Tensor:
    return x * x.sum().item()


host.register_fake(torch.empty_like)
waits.register_fake(torch.empty_like)


def did(fn, *inputs):
    options = {"driver": "simulated", "compiler": "eager", "on_skip": "silent"}
    call = torch.compile(fn, backend="cgpass", options=options)
    for x in inputs:
        call(x)
    return check.work_done()


X = torch.ones(4)


def test_eager_partitions_count_as_often_as_they_ran_after_warm_ups(registry):
    work = did(lambda x: host(x.sin().cos().exp().tanh()).sin().cos().exp().tanh(), *[X] * 5)
    assert (work.captured, work.total, work.fell_back) == (32, 36, [])
    (line,) = work.plain
    assert "eager_1: checked.host.default at test_check.py:" in line
    passes, text = check.verdict(work, 0.95)
    assert not passes
    assert "FAILED: 88.9% of the 36 operators" in text
    assert f"runs without graphs:\n  {line}" in text
    passes, text = check.verdict(work, 0.85)
    assert passes
    assert "runs without graphs" not in text


def test_what_turned_out_not_to_be_capturable_fell_back(registry):
    work = did(lambda x: waits(x.sin().cos().exp().tanh()).sin().cos().exp().tanh(), *[X] * 6)
    (line,) = work.fell_back
    assert "checked.waits.default" in line
    assert "name it in unsafe_ops" in line
    passes, text = check.verdict(work, 0.1)
    assert not passes
    assert f"fell back:\n  {line}" in text


def test_calls_without_a_graph_fell_back(registry):
    options = {"driver": "simulated", "compiler": "eager", "max_recordings": 1}
    call = torch.compile(
        lambda x, n: (x * n).sin().cos().exp(), backend="cgpass", options=options, dynamic=True
    )
    for n in (2, 2, 3, 3, 3):
        call(X, n)
    work = check.work_done()
    assert "of 5 calls ran without a graph" in work.fell_back[-1]


def test_nothing_to_check():
    passes, text = check.verdict(check.Work(), 0.5)
    assert not passes
    assert text == (
        'cgpass check: FAILED: nothing was compiled by cgpass: torch.compile(..., backend="cgpass") in this process is '
        "what is checked, callables graphed by hand are not"
    )
    passes, text = check.verdict(check.Work(graphs=1), 0.5)
    assert not passes
    assert text == "cgpass check: FAILED: nothing ran more often than to warm up; run more steps"


@pytest.mark.parametrize(
    ("text", "share"), [("95%", 0.95), ("95", 0.95), ("0.95", 0.95), ("1", 1.0), (" 0% ", 0.0)]
)
def test_shares(text, share):
    assert check.least_share(text) == share


@pytest.mark.parametrize("text", ["x", "120%", "-1", ""])
def test_what_is_no_share(text):
    with pytest.raises(ReportError, match=r"--min-captured is a share as 95% or 0\.95"):
        check.least_share(text)


def test_a_page_is_made_beside_the_report(tmp_path, capsys):
    sample().save(tmp_path / "r.json")
    assert command.main(["report", str(tmp_path / "r.json")]) == 0
    assert capsys.readouterr().out == f"{tmp_path / 'r.html'}\n"
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert (
        command.main(["report", str(tmp_path / "r.json"), "-o", str(tmp_path / "no" / "r.html")])
        == 2
    )
    assert "to save the report in does not exist" in capsys.readouterr().err
    assert command.main(["report", str(tmp_path / "r.json"), "-o", "-"]) == 0
    assert capsys.readouterr().out == f"{sample()}\n"


def test_files_that_are_no_reports(tmp_path, capsys):
    path = tmp_path / "r.json"
    for text, message in [(None, "can't be read"), ("{", "is no JSON"), ("[]", "is no report")]:
        if text is not None:
            path.write_text(text)
        assert command.main(["report", str(path)]) == 2
        assert message in capsys.readouterr().err


def test_warm_ups_that_go_on_to_the_end_are_no_captured_calls(registry):
    work = did(lambda x: x.sin().cos().exp().tanh(), *[torch.ones(n) for n in range(2, 40)])
    assert work.warmups < 20
    assert work.total > 4 * 20
    passes, text = check.verdict(work, 0.95)
    assert not passes
    assert "were warm-ups, most with no recording after them" in text


def test_many_warm_ups_are_said(registry):
    work = did(lambda x: x.sin().cos().exp().tanh(), X, X, X)
    passes, text = check.verdict(work, 0.95)
    assert passes
    assert text.endswith("\n4 more ran to warm up, which counts as neither")


def test_calls_that_explain_compares_fell_back_nowhere(registry):
    options = {"driver": "simulated", "compiler": "eager"}
    call = torch.compile(lambda x: x.sin().cos().exp().tanh(), backend="cgpass", options=options)
    cgpass.explain(call, X)
    work = check.work_done()
    assert (work.fell_back, work.captured) == ([], work.total)
    assert work.total > 0


def test_graph_breaks_are_named_and_not_counted(registry):
    def fn(x):
        y = x.sin().cos().exp().tanh()
        torch._dynamo.graph_break()
        return y.sin().cos().exp().tanh()

    line = fn.__code__.co_firstlineno + 2
    passes, text = check.verdict(did(fn, X, X, X), 0.95)
    assert passes
    assert "100% of the 16 operators" in text
    assert (
        f"\ngraph breaks at 1 line (test_check.py:{line}): what runs there, outside of compiled functions, is not among these operators"
        in text
    )
    first, broken, second, _ = cgpass.summary().splitlines()
    assert first.startswith("inference of test_check.py:")
    assert broken.startswith(f"  ends at a graph break at test_check.py:{line} in fn: torch._dyn")
    assert second.startswith("inference of test_check.py:")


@pytest.mark.parametrize(
    ("save", "message"),
    [("r.xyz", "a report is saved as .json"), ("none/r.json", "to save the report in does not")],
)
def test_where_to_save_is_looked_at_before_the_script_runs(tmp_path, capsys, save, message):
    script = tmp_path / "script.py"
    script.write_text("print('ran')")
    assert command.main(["check", "--save", str(tmp_path / save), str(script)]) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.out == ""


def test_a_script_that_is_missing(tmp_path, capsys):
    assert command.main(["check", str(tmp_path / "no.py")]) == 2
    assert "there is no script" in capsys.readouterr().err


def test_a_report_of_functions_that_are_gone_says_what_recorded_them(registry):
    did(lambda x: x.sin().cos().exp().tanh(), X, X, X)
    torch.compiler.reset()
    report = snapshot()
    (function,) = report.functions
    (part,) = function.graphs[0].partitions
    assert part.live_recordings == 0
    assert function.driver == "simulated"
    assert report.device.startswith("cpu (simulated graphs: ")
    (row,) = [line for line in str(report).splitlines() if line.startswith("    captured_0  ")]
    assert row.split() == ["captured_0", "graph", "4", "-", "2", "16", "B", "1"]


def test_a_small_model_passes(registry):
    """Its forward is three layers and an activation."""
    layers = torch.nn.Sequential(
        torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4), torch.nn.Linear(4, 1)
    )
    options = {"driver": "simulated", "compiler": "eager"}
    call = torch.compile(layers, backend="cgpass", options=options)
    for _ in range(4):
        call(torch.ones(2, 4)).sum().backward()
    passed, said = check.verdict(check.work_done(), 0.95)
    assert passed
    assert "100% of the" in said


def test_one_operator_is_no_operators(registry):
    work = did(host, X, X, X)
    assert "FAILED: 0% of the 3 operators" in check.verdict(work, 0.95)[1]
    assert "0% of the 1 operator that" in check.verdict(check.Work(total=1, graphs=1), 0.95)[1]
    report = cgpass.explain(host, X)
    assert "in graphs: 0% of the 1 operator of compiled functions" in str(report)
    assert "of the 1 operator of compiled functions" in html(report)


def test_a_script_is_all_that_has_to_be_given(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["check"])
    assert capsys.readouterr().err.endswith("the following arguments are required: script\n")


def test_long_lines_are_wrapped_and_stay_indented():
    line = "  forward of model.py:1 in f, eager_1: " + "aten.histc.default reads on the host; " * 9
    head = "cgpass check: FAILED"
    first, second, *others = check.wrapped(f"{head}\n{line}").splitlines()
    assert (first, second[:12]) == (head, "  forward of")
    assert len(others) > 2
    assert max(map(len, [second, *others])) <= 100
    assert all(each[:4].isspace() and each[4] != " " for each in others)
    assert " ".join("\n".join([second, *others]).split()) == " ".join(line.split())


def test_what_is_printed_has_at_most_100_columns(tmp_path, capsys):
    script = tmp_path / "script.py"
    script.write_text(
        "import cgpass, torch\n"
        "cgpass.set_defaults(driver='simulated', compiler='eager', on_skip='silent')\n"
        "@torch.compile(backend='cgpass')\n"
        "def f(x):\n"
        "    return (x * torch.histc(x.sin().cos().tanh(), 4).sum()).sin().cos().tanh().exp()\n"
        "for _ in range(4):\n"
        "    f(torch.ones(4))\n"
    )
    assert command.main(["check", "--min-captured", "100%", str(script)]) == 1
    printed = capsys.readouterr().out
    assert "pass min= and max=" in " ".join(printed.split())
    assert max(map(len, printed.splitlines())) <= 100
