"""Import directions, and that importing cgpass is light."""

import ast
import functools
import subprocess
import sys
from pathlib import Path

import pytest

import cgpass

ROOT = Path(cgpass.__file__).parent
LAYERS = {
    "errors": 0,
    "version": 0,
    "last_resort": 0,
    "_torch": 0,
    "inputs": 1,
    "reason": 1,
    "registration": 1,
    "options": 1,
    "summaries": 1,
    "telemetry": 1,
    "progress": 1,
    "tracing": 1,
    "expectations": 2,
    "live_counter": 2,
    "graph": 2,
    "passes": 3,
    "runtime": 3,
    "option_names": 4,
    "layouts": 4,
    "compile": 4,
    "warm_start": 4,
    "plan": 4,
    "culprits": 4,
    "skips": 4,
    "part_summaries": 4,
    "assembly": 4,
    "training": 4,
    "resetting": 4,
    "backend": 5,
    "whole_step": 6,
    "recompute": 5,
    "recorded_graphs": 5,
    "graphed": 6,
    "verification": 6,
    "report": 7,
    "testing": 7,
    "__main__": 8,
}
BESIDE = {frozenset({"passes", "runtime"}), frozenset({"errors", "_torch"})}
MODULES = sorted(ROOT.rglob("*.py"))


def part_of(module):
    return module.split(".")[1]


def name_of(path):
    return ".".join(["cgpass", *path.relative_to(ROOT).with_suffix("").parts])


def imports(node, inside_functions=False, inside=False):
    """Names of what is imported at module level, or inside functions."""
    inside |= isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    if inside == inside_functions:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{a.name}" for a in node.names)
    for child in ast.iter_child_nodes(node):
        yield from imports(child, inside_functions, inside)


def forbidden(module, imported):
    """Why a module may not import what it imports, `None` if it may."""
    if imported.startswith("."):
        return "relative import"
    if is_private(imported) and part_of(module) != "_torch":
        return "private torch"
    if not imported.startswith("cgpass."):
        return None
    own, other = part_of(module), part_of(imported)
    if other == "_torch" and own != other and imported != "cgpass._torch":
        return "past the door: names are read from cgpass._torch"
    if own == "__init__" or own == other:
        return None
    if other not in LAYERS:
        return f"{other} has no layer"
    if frozenset({own, other}) in BESIDE:
        return "layers beside each other"
    return "import upwards" if LAYERS[other] > LAYERS[own] else None


def is_private(imported):
    """Of torch's modules, those that no release keeps as they are."""
    names = imported.split(".")
    private = [name for name in names if name.startswith("_") and name != "_pytree"]
    return names[0] == "torch" and bool(private)


@functools.cache
def parsed(path):
    return ast.parse(path.read_text())


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down(path):
    tree = parsed(path)
    module = name_of(path)
    assert part_of(module) in {*LAYERS, "__init__"}, f"{module} has no layer"
    broken = {name: forbidden(module, name) for name in imports(tree)}
    assert {name: why for name, why in broken.items() if why} == {}


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_import_inside_a_function(path):
    module = name_of(path)
    inside = list(imports(parsed(path), inside_functions=True))
    if module == "cgpass.__init__" or part_of(module) in ("_torch", "report"):
        assert all(not name.startswith(".") for name in inside)
    else:
        assert inside == []


def test_the_rules_catch_what_they_should():
    assert forbidden("cgpass.runtime.wrapper", "cgpass.passes.base.Pass")
    assert forbidden("cgpass.graph.values", "cgpass.passes.base")
    assert forbidden("cgpass.options", "cgpass.backend")
    assert forbidden("cgpass.graph.values", "..errors")
    assert forbidden("cgpass.graph.values", "cgpass.surprise")
    assert forbidden("cgpass.graph.values", "torch._inductor.config")
    assert forbidden("cgpass._torch.joint", "torch._inductor.config") is None
    assert forbidden("cgpass._torch.joint", "cgpass._torch.modes.in_functorch") is None
    assert forbidden("cgpass.runtime.wrapper", "cgpass._torch") is None
    assert forbidden("cgpass.runtime.wrapper", "cgpass._torch.graphs.is_capturing")
    assert forbidden("cgpass.graph.values", "torch.utils._pytree.tree_map") is None
    assert forbidden("cgpass.passes.base", "cgpass.graph.text.graph_text") is None
    code = "import a\ndef f():\n    if a:\n        from b import c\nif a:\n    import d\n"
    assert list(imports(ast.parse(code))) == ["a", "d"]
    assert list(imports(ast.parse(code), inside_functions=True)) == ["b.c"]


@pytest.mark.slow  # test_public_names.py has that it loads no torch at all
def test_importing_cgpass_loads_neither_dynamo_nor_inductor():
    code = (
        "import sys, torch; before = set(sys.modules); import cgpass;"
        "new = set(sys.modules) - before;"
        "print(sorted(m for m in new if m.startswith(('torch._dynamo', 'torch._inductor'))),"
        " [m for m in ('torch._dynamo', 'torch._inductor') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT.parent
    )
    assert found.stdout.split() == ["[]", "[]"]
