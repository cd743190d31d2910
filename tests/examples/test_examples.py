"""Every example runs as a user runs it, and prints what it is there to show."""

import ast
import re
import runpy
import sys
from pathlib import Path

import pytest
import torch

import cgpass

EXAMPLES = Path(__file__).parents[2] / "examples"

pytestmark = pytest.mark.filterwarnings("ignore")  # those of the libraries that are shown


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs an example and returns what it prints and how far each counter grew; one that skips itself skips."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

    def run(name, *arguments):
        path = EXAMPLES / f"{name}.py"
        monkeypatch.setattr(sys, "argv", [str(path), *arguments])
        before = cgpass.counters()
        try:
            runpy.run_path(str(path), run_name="__main__")
        except ModuleNotFoundError as error:
            # transformers says so, beside a torchvision of another torch
            if "Could not import module" not in str(error):
                raise
            pytest.skip(f"transformers can't be loaded here: {error}")
        except SystemExit as end:
            if end.code:
                pytest.fail(capsys.readouterr().out)
        finally:
            torch.use_deterministic_algorithms(False)
        out = capsys.readouterr().out
        if out.startswith(f"examples/{name}.py needs "):
            pytest.skip(out.strip())
        return out, {name: count - before[name] for name, count in cgpass.counters().items()}

    yield run
    torch.compiler.reset()


def losses(out):
    first, last = re.search(r"loss.*? (\d+\.\d+) -> (\d+\.\d+)", out).groups()
    return float(first), float(last)


def test_every_example_is_run_here():
    source = Path(__file__).read_text() + 'run("train_distributed"'  # which has tests of its own
    for path in EXAMPLES.glob("*.py"):
        assert f'run("{path.stem}"' in source


def imported(path):
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.partition(".")[0] for name in names}


BROUGHT = sys.stdlib_module_names | {"torch", "cgpass"}
LACKING = {
    "decoding": "transformers: pip install -e '.[demo]'",
    "huggingface_trainer": "transformers and accelerate: pip install -e '.[demo]'",
    "lightning_trainer": "lightning: pip install -e '.[demo]'",
    "moe": "transformers: pip install -e '.[demo]'",
    "train_transformer": "transformers: pip install -e '.[demo]'",
}


def test_examples_that_need_more_are_those_that_say_so():
    paths = EXAMPLES.glob("*.py")
    assert {path.stem for path in paths if imported(path) - BROUGHT} == set(LACKING)


@pytest.mark.parametrize("name", LACKING)
def test_an_example_that_needs_more_says_so_in_one_line(name, monkeypatch, capsys):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    assert not end.value.code
    assert capsys.readouterr().out == f"examples/{name}.py needs {LACKING[name]}\n"


def test_quickstart(run):
    out, _ = run("quickstart")
    first, last = losses(out)
    assert last < first
    assert "operators of compiled code ran in graphs, 0 boundaries, 0 calls without a" in out
    assert "forward: 5 calls, 100% of " in out
    assert "backward: 5 calls, 100% of " in out


def test_training_loop(run):
    out, grown = run("training_loop")
    first, last = losses(out)
    assert last < first
    assert grown["plain_calls"] == 0
    # 40 forwards and 40 backwards, 2 of validation; the first of each of the three graphs warms up
    assert (grown["calls"], grown["warmups"], grown["replays"]) == (82, 3, 79)


def test_decoding(run):
    out, grown = run("decoding")
    assert "the same tokens as without graphs: True" in out
    # 3 prompts, 19 tokens each, one of them a warm-up
    assert (grown["recordings"], grown["replays"], grown["plain_calls"]) == (1, 56, 0)


def test_reinforcement_learning(run):
    out, grown = run("reinforcement_learning")
    pieces = losses(out.partition("one graph: ")[0])
    assert losses("one graph: " + out.partition("one graph: ")[2]) == pieces
    assert pieces[1] < pieces[0]
    assert grown["plain_calls"] == 0


def test_regional_compilation(run):
    out, _ = run("regional_compilation")
    assert "8 layers: 2 graphs compiled, 16 recordings" in out
    assert "64 replays, 0 calls without a graph" in out


def test_moe(run):
    out, _ = run("moe")
    grouped, batched = out.split("experts as batched_mm: ")
    captured, everything = map(int, re.match(r"(\d+) of (\d+) ", batched).groups())
    assert captured == everything
    for experts in (grouped, batched):
        assert experts.count("  forward: ") == experts.count("  backward: ") == 1
    if not torch.cuda.is_available():  # where grouped products have kernels that ask for nothing
        assert "transformers.grouped_mm_fallback.default [failed_capture]: " in grouped
        assert "_backward.default [failed_capture]: " in grouped


def test_huggingface_trainer(run):
    out, grown = run("huggingface_trainer")
    first, last = losses(out.split("\nloss ")[1].join(["loss ", ""]))
    assert last < 0.8 * first
    # the Trainer keeps gradients over the next forward: the backward is recorded once more, in a pool of its own
    assert (grown["recordings"], grown["replays"], grown["plain_calls"]) == (3, 38, 0)


def test_lightning_trainer(run):
    out, grown = run("lightning_trainer")
    first, last = losses(out)
    assert last < 0.5 * first
    assert (grown["replays"], grown["plain_calls"]) == (38, 0)


def test_graphed_layers(run):
    out, _ = run("graphed_layers")
    first, last = losses(out)
    assert last < 0.7 * first
    out, _ = run("graphed_layers", "--layers", "3", "--steps", "4")
    assert "3 layers, 6 graphs" in out
    assert "moved in 24 times" in out  # (3 warm-ups + 1 capture) x forward and backward x 3 layers
    assert "24 replays, 0 calls without a graph" in out
    assert "bitwise those without graphs: True" in out


@pytest.mark.slow
def test_train_transformer(run):
    options = ["--compiler", "eager", "--device", "cpu", "--layers", "1", "--width", "16"]
    out, grown = run("train_transformer", "--steps", "3", *options)
    assert (
        "Graphs were simulated on CPU: that shows what is captured, and is no measure of speed."
        in out
    )
    assert "OK: 3 losses and all parameters are bitwise those of the run without graphs." in out
    assert (grown["replays"], grown["plain_calls"]) == (4, 0)
