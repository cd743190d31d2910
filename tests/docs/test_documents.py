"""What documents name is there: public names, tests, examples, files; what they show runs."""

import doctest
import re
import runpy
import warnings
from pathlib import Path

import pytest
import torch

import cgpass

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
README = (ROOT / "README.md").read_text()
EXPLAIN = (DOCS / "explain.md").read_text()
PROMISES = re.split(r"^## ", (DOCS / "promises.md").read_text(), flags=re.MULTILINE)[1:]


def code_blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)


def test_every_public_name_has_its_place_on_one_page():
    pages = [page.read_text() for page in (DOCS / "api").glob("*.md")]
    found = [name for text in pages for name in re.findall(r"^::: cgpass\.(\w+)$", text, re.MULTILINE)]
    assert sorted(found) == sorted(cgpass.__all__)


@pytest.mark.parametrize("promise", PROMISES, ids=[text.split("\n")[0] for text in PROMISES])
def test_the_tests_that_prove_a_promise_exist(promise):
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", promise)
    assert len(named) == promise.count("tests/") - promise.count("`tests/gpu`")
    assert sum("tests/gpu/" not in path for path, _ in named) >= 2  # on any machine
    for path, test in named:
        assert f"\ndef {test}(" in (ROOT / path).read_text(), f"{path}::{test}"


def test_there_are_eleven_promises():
    assert [text.partition(".")[0] for text in PROMISES] == [str(i) for i in range(1, 12)]


def test_every_example_is_shown_and_listed():
    shown = (DOCS / "examples.md").read_text()
    for path in (ROOT / "examples").glob("*.py"):
        assert f'--8<-- "examples/{path.name}"' in shown
        assert f"(examples/{path.name})" in README


def test_examples_that_need_transformers_are_marked():
    marked = set(re.findall(r"\(examples/(\w+\.py)\)\*", README))
    examples = {path.name: path.read_text() for path in (ROOT / "examples").glob("*.py")}
    assert marked == {name for name, text in examples.items() if "pip install -e '.[demo]'" in text}


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


def test_the_start_runs(capsys):
    """As it stands, but for the device."""
    start = README.split("## Start")[1].split("## Examples")[0]
    names = {}
    with cgpass.set_defaults(driver="simulated", compiler="eager"):
        for block in code_blocks(start):
            exec(block.replace('"cuda"', '"cpu"').replace(".cuda()", ""), names)
    shown = capsys.readouterr().out
    assert "forward of module Sequential: 1 partition captured" in shown
    assert "10 calls, 9 as a whole" in shown


def test_the_guide_to_whole_steps_runs(capsys):
    (block,) = code_blocks((DOCS / "train-step.md").read_text())
    with cgpass.set_defaults(driver="simulated", compiler="eager"):
        exec("import torch, cgpass\n" + block.replace('"cuda"', '"cpu"').replace(".cuda()", ""), {})
    assert "10 calls, 9 as a whole" in capsys.readouterr().out


def test_the_example_of_train_step_runs():
    globs = {"torch": torch, "cgpass": cgpass}
    (example,) = doctest.DocTestFinder().find(cgpass.train_step, "train_step", globs=globs)
    with cgpass.set_defaults(driver="simulated", compiler="eager"):
        results = doctest.DocTestRunner().run(example)
    assert results == (0, 6)


def test_explain_prints_what_its_guide_shows(tmp_path, capsys):
    """But for versions and times."""
    shown = re.search(r"^```python\n(.*?)^```\n\nwhich prints:\n\n```\n(.*?)^```", EXPLAIN, re.M | re.S)
    path = tmp_path / "model.py"
    path.write_text(shown[1])
    with cgpass.set_defaults(driver="simulated", compiler="eager"):  # put back
        runpy.run_path(str(path))

    def words(text):
        return re.sub(r"function \d+|\d+(\.\d+)+(\+\w+)?", "#", text).split()

    assert words(capsys.readouterr().out) == words(shown[2])


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


def test_without_guards_on_modules_moved_parameters_are_noticed():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.GELU(), torch.nn.Linear(4, 4))
    unguarded = torch.compiler.skip_guard_on_all_nn_modules_unsafe
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    compiled = torch.compile(
        module, backend="cgpass", options={**options, "guard_filter_fn": unguarded}
    )
    x = torch.randn(2, 4)

    def check():
        for _ in range(3):
            assert torch.equal(compiled(x), module(x))

    check()
    with torch.no_grad():
        module[0].weight.data = torch.randn(4, 4)
    check()
    module[0].weight = torch.nn.Parameter(torch.randn(4, 4))
    check()
    module.load_state_dict({k: v + 1 for k, v in module.state_dict().items()}, assign=True)
    check()
    torch.compiler.reset()
