"""Names in documents exist, code in them runs, and figures in them were measured."""

import doctest
import json
import re
import runpy
import subprocess
import sys
import warnings
from operator import attrgetter, truediv
from pathlib import Path

import pytest
import torch

import cgpass

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
PROMISES = re.split(
    r"^## (?=\d)", (DOCS / "promises.md").read_text().split("\n## Where")[0], flags=re.MULTILINE
)[1:]


def code_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def run_blocks(text, **names):
    """Run what a document shows as it stands, but for the device."""
    names |= {"torch": torch, "cgpass": cgpass}
    with cgpass.set_defaults(driver="simulated", compiler="eager"):
        for block in code_blocks(text):
            exec(block.replace('"cuda"', '"cpu"').replace(".cuda()", ""), names)
    torch.compiler.reset()


# ---- names


def test_every_public_name_has_its_place_on_one_page():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    found = [
        name for text in pages for name in re.findall(r"^::: cgpass\.(\w+)$", text, re.MULTILINE)
    ]
    assert sorted(found) == sorted(cgpass.__all__)


def test_there_are_eleven_promises():
    assert [text.partition(".")[0] for text in PROMISES] == [str(i) for i in range(1, 12)]


@pytest.mark.parametrize("promise", PROMISES, ids=[text.split("\n")[0] for text in PROMISES])
def test_the_tests_that_prove_a_promise_exist(promise):
    named = re.findall(
        r"^- `(tests/[\w/]+\.py)::(test_\w+)(?:\[(\w+)\])?`", promise, re.MULTILINE
    )
    assert len(named) == promise.count("\n- ")
    (own,) = re.findall(r"Its tests:\s`(tests/usage/\w+\.py)`", promise)
    assert own in [path for path, *_ in named]
    assert sum("tests/gpu/" not in path for path, *_ in named) >= 2  # on any machine
    for path, *names in named:  # a test, and a program of its table
        for name in filter(None, names):
            assert f"\ndef {name}(" in (ROOT / path).read_text(), f"{path}::{name}"


def test_each_row_of_the_comparison_is_proven_by_a_test():
    rows = re.findall(r"^\| .* \| (?:yes|no): `(test_\w+)(?:\[\w+\])?` \|$", README, re.MULTILINE)
    assert len(rows) > 10
    known = "\n".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    assert [test for test in rows if f"\ndef {test}(" not in known] == []


def test_every_example_is_shown_and_marked_if_it_needs_transformers():
    sections = (DOCS / "examples.md").read_text().split("\n## ")[1:]
    assert len(sections) == len(list((ROOT / "examples").glob("*.py")))
    for section in sections:
        (name,) = re.findall(r'^--8<-- "examples/(\w+\.py)"$', section, re.MULTILINE)
        needs = "pip install -e '.[demo]'" in (ROOT / "examples" / name).read_text()
        assert section.partition("\n")[0].endswith("*") == needs, name


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md"])
def test_files_that_are_linked_to_exist(name):
    text = (ROOT / name).read_text()
    targets = re.findall(r"\]\((?!https?:)([^)#]*)(#[^)]*)?\)", text)
    assert targets
    headings = [
        "#" + re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-")
        for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    ]
    for path, anchor in targets:
        assert (ROOT / path).exists(), path
        assert path or anchor in headings, anchor


def test_rooms_that_a_contributor_is_sent_to_exist():
    named = re.findall(r"`(cgpass/[\w/.]+)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert len(named) > 15
    assert [path for path in named if not (ROOT / path).exists()] == []


# ---- figures


def test_figures_in_the_first_lines_are_those_that_were_measured():
    bench = json.loads((DOCS / "results" / "bench-h100-torch2.11.json").read_text())

    def times(arm, key="step_ms"):
        return [model["arms"][arm][key]["median"] for model in bench["results"]]

    def span(arm):
        ratios = [theirs / ours for theirs, ours in zip(times(arm), times("cgpass"), strict=True)]
        return f"{min(ratios):.2f} to {max(ratios):.2f} times"

    first = " ".join(README.partition("## ")[0].split())
    assert f'{span("reduce-overhead")} as long in `mode="reduce-overhead"` as with' in first
    assert f"{span('default')} as long in plain `torch.compile`" in first
    loops = [*map(truediv, times("reduce-overhead", "loop_ms"), times("cgpass", "loop_ms"))]
    assert f"the gain over `reduce-overhead` can be as little as {min(loops) - 1:.0%}." in first
    measured = README.partition("<!-- measured: begin -->")[2]
    assert f"of commit {bench['meta']['commit']}, {bench['meta']['time'].split()[0]}" in measured
    calls = re.findall(r"\| ([\d]+) \| ([\d]+) \|$", measured.partition("| call |")[2], re.MULTILINE)
    less = sum(int(ours) < int(theirs) for theirs, ours in calls)
    assert 0 < less < len(calls)
    most = "most models, and more for others"
    some = most if less > len(calls) / 2 else "some models, and more for others"
    assert f"needs less host time than there for {some}." in first


def test_promises_say_when_they_were_last_proven_on_gpus():
    found = json.loads((DOCS / "results" / "dist-h100-torch2.11.json").read_text())
    meta = found["meta"]
    said = " ".join((DOCS / "promises.md").read_text().partition("\n## Where")[2].split())
    passed = f"{found['passed']} passed](results/dist-h100-torch2.11.json)"
    assert f"[{passed} at {meta['commit']}" in said
    assert not found["failed"]
    commit = (DOCS / "results" / "gpu-tests.md").read_text().split(maxsplit=6)[5]
    assert f"On {meta['time'].split()[0]} the GPU tests of commit {commit} ran" in said


# ---- code


def test_the_readme_runs(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_blocks(README, batch=torch.randn(32, 64), train=lambda: None)
    shown = capsys.readouterr().out
    assert "forward of module Sequential: 1 partition captured" in shown
    assert "10 calls, 9 as a whole" in shown
    assert (tmp_path / "report.html").exists()


def test_the_guide_to_whole_steps_runs(capsys):
    run_blocks((DOCS / "train-step.md").read_text())
    assert "10 calls, 9 as a whole" in capsys.readouterr().out


def test_the_guides_to_migrating_and_to_graphed_callables_run():
    model, sample = torch.nn.Module(), torch.randn(2, 4)
    model.layers = torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(2))
    names = {"model": model, "layer": torch.nn.Linear(4, 4), "sample": sample, "step": torch.sin}
    for guide in ("migrating", "graphed-callables"):
        run_blocks((DOCS / f"{guide}.md").read_text(), **names)
    with torch.no_grad():
        assert model.layers[1](model.layers[0](sample)).shape == (2, 4)


@pytest.mark.gpu
def test_the_guide_to_checkpointing_runs():
    layer = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.5)).cuda()
    x = torch.randn(64, 4, device="cuda")
    text = (DOCS / "checkpointing.md").read_text()
    names = {"torch": torch, "cgpass": cgpass}
    names["step"] = lambda: cgpass.checkpoint(layer, x).square().sum().backward()
    for block in code_blocks(text):
        exec(block, names)
    before = layer[0].weight.grad.clone()
    names["graph"].replay()
    assert not torch.equal(layer[0].weight.grad, before)


ERRORS = [name for name, each in vars(cgpass.errors).items() if isinstance(each, type)]
PUBLIC = [name for name in cgpass.__all__ if name != "errors"] + [f"errors.{n}" for n in ERRORS]


def example_of(name):
    globs = {"torch": torch, "cgpass": cgpass}
    shown = attrgetter(name)(cgpass).__doc__
    return doctest.DocTestParser().get_doctest(shown, globs, name, None, None)


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_each_public_name_has_all_of_its_methods_and_properties(name):
    kinds = getattr(attrgetter(name)(cgpass), "__mro__", ())
    ours = [vars(kind) for kind in kinds if kind.__module__.startswith("cgpass.")]
    methods = {n for each in ours for n in each if n[0] != "_" and hasattr(each[n], "__get__")}
    used = "".join(each.source for each in example_of(name).examples)
    assert used
    assert [n for n in methods if not re.search(rf"\.{n}\b", used)] == []


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.gpu] * (name == "CheckpointedGraph"))
        for name in PUBLIC
    ],
)
def test_the_example_of_each_public_name_runs(name, tmp_path, monkeypatch):
    """Each alone: functions compiled by the others are forgotten."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    torch.compiler.reset()
    driver = "auto" if name == "CheckpointedGraph" else "simulated"
    with cgpass.set_defaults(driver=driver, compiler="eager"):
        results = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example_of(name))
    assert not results.failed


def test_explain_prints_what_its_guide_shows(tmp_path, capsys):
    """But for versions and times."""
    text = (DOCS / "explain.md").read_text()
    shown = re.search(
        r"^```python\n(.*?)^```\n\nwhich prints:\n\n```\n(.*?)^```", text, re.MULTILINE | re.DOTALL
    )
    path = tmp_path / "model.py"
    path.write_text(shown[1])
    with cgpass.set_defaults(driver="simulated", compiler="eager"):  # put back
        runpy.run_path(str(path))

    def words(text):
        return re.sub(r"function \d+|\d+(\.\d+)+(\+\w+)?", "#", text).split()

    assert words(capsys.readouterr().out) == words(shown[2])


TRAIN = """
import torch, cgpass

cgpass.set_defaults(driver="simulated", compiler="eager")
layers = torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4)
net = torch.compile(torch.nn.Sequential(*layers), backend=cgpass.cgpass)

def train(steps):
    for _ in range(steps):
        net(torch.ones(2, 4)).sum().backward()
"""


def test_users_tests_count_by_a_fixture_as_its_guide_shows(tmp_path):
    _, shown = code_blocks((DOCS / "explain.md").read_text())
    (tmp_path / "test_it.py").write_text(TRAIN + shown)
    line = [sys.executable, "-m", "pytest", "-q", "-p", "pytest_cgpass", "--rootdir", str(tmp_path)]
    done = subprocess.run([*line, str(tmp_path)], capture_output=True, text=True, check=False)
    assert "1 passed" in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("traced", "read", "expected"),
    [
        (False, "(y > 0).sum().item()", (2, 2, 0)),
        (True, "(y > 0).sum().item()", (1, 2, 1)),
        (True, "y.sum().item()", (1, 1, 0)),
    ],
)
def test_what_happens_with_a_host_sync(traced, read, expected):
    (shown,) = code_blocks((DOCS / "behaviour.md").read_text().split("## Gradients")[0])
    assert "= (y > 0).sum().item()\n" in shown
    source = shown.replace("(y > 0).sum().item()", read)
    source = source.replace("torch.compile(", "torch.compile(options=OPTIONS, ")
    names = {"torch": torch, "OPTIONS": {"driver": "simulated", "compiler": "eager"}}
    exec(source, names)
    before = cgpass.counters()
    with torch._dynamo.config.patch(capture_scalar_outputs=traced):
        for _ in range(3):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # Dynamo's advice on scalars
                names["scaled"](torch.ones(8))
    torch.compiler.reset()
    grown = {name: count - before[name] for name, count in cgpass.counters().items()}
    found = (grown["graphs"], grown["partitions_captured"], grown["partitions_eager"])
    assert found == expected


def test_gpt2_of_transformers_is_one_function_once_its_loss_is_named():
    transformers = pytest.importorskip("transformers")
    section = (DOCS / "behaviour.md").read_text().split("## Models of Hugging Face transformers")[1]
    shown, *_ = code_blocks(section)
    sizes = {"vocab_size": 16, "n_positions": 8, "n_embd": 8, "n_layer": 1, "n_head": 1}
    config = transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0, use_cache=False)
    names = {"torch": torch, "GPT2LMHeadModel": transformers.GPT2LMHeadModel, "config": config}
    tokens = torch.randint(16, (2, 8))
    with cgpass.set_defaults(driver="simulated", compiler="eager"):
        exec(shown.replace("compile(model,", "compile(model, fullgraph=True,"), names)
        names["compiled"](input_ids=tokens, labels=tokens).loss.backward()
    torch.compiler.reset()

