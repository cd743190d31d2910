"""Import directions, and that unit tests mirror the package."""

import ast
import graphlib
from pathlib import Path

import pytest

import cgpass

ROOT = Path(cgpass.__file__).parent
LAYERS = {
    "errors": 0,
    "version": 0,
    "torch_private": 0,
    "telemetry": 1,
    "options": 1,
    "compile.facts": 2,
    "compile.passes": 3,
    "runtime": 3,
    "compile": 4,
    "backend": 5,
    "recompute": 5,
    "graphed": 6,
    "update": 4,
    "whole_step": 6,
    "report": 7,
    "__main__": 8,
}
BESIDE = {frozenset({"compile.passes", "runtime"}), frozenset({"errors", "torch_private"})}
MODULES = sorted(ROOT.rglob("*.py"))


def part_of(module):
    """The longest name of a layer that a module's begins with."""
    own, *names = module.split(".")[1:]
    longer = ".".join([own, *names[:1]])
    return longer if longer in LAYERS else own


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
    """The reason against an import of a module, None if it may."""
    if imported.startswith("."):
        return "relative import"
    if is_private(imported) and part_of(module) != "torch_private":
        return "private torch"
    if imported == "cgpass":
        return "the whole package: its modules are imported by name"
    if not imported.startswith("cgpass."):
        return None
    own, other = part_of(module), part_of(imported)
    if other == "torch_private" and own != other and imported != "cgpass.torch_private":
        return "past the door: names are read from cgpass.torch_private"
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


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_imports_point_down_and_are_outside_of_functions(path):
    tree, module = ast.parse(path.read_text()), name_of(path)
    assert part_of(module) in {*LAYERS, "__init__"}, f"{module} has no layer"
    broken = {name: forbidden(module, name) for name in imports(tree)}
    assert {name: why for name, why in broken.items() if why} == {}
    inside = list(imports(tree, inside_functions=True))
    if module == "cgpass.__init__" or part_of(module) in ("torch_private", "report"):
        assert all(not name.startswith(".") for name in inside)
    else:
        assert inside == []


def imported_at_run_time(source, modules):
    """Those of some modules that code imports, also in functions, but not for types alone."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    names = {*imports(tree), *imports(tree, inside_functions=True)}
    return {name if name in modules else name.rpartition(".")[0] for name in names} & {*modules}


def check_for_circles(sources):
    graph = {name: imported_at_run_time(text, sources) for name, text in sources.items()}
    graphlib.TopologicalSorter(graph).prepare()


def test_no_imports_go_in_a_circle():
    check_for_circles({name_of(p).removesuffix(".__init__"): p.read_text() for p in MODULES})


def test_the_rules_catch_what_they_should():
    assert forbidden("cgpass.runtime.wrapper", "cgpass.compile.passes.base.Pass")
    assert forbidden("cgpass.compile.facts.values", "cgpass.compile.passes.base")
    assert forbidden("cgpass.options", "cgpass.backend")
    assert forbidden("cgpass.compile.facts.values", "..errors")
    assert forbidden("cgpass.compile.facts.values", "cgpass")
    assert forbidden("cgpass.compile.facts.values", "cgpass.surprise")
    assert forbidden("cgpass.compile.facts.values", "torch._inductor.config")
    assert forbidden("cgpass.torch_private.compiling", "torch._inductor.config") is None
    assert (
        forbidden("cgpass.torch_private.compiling", "cgpass.torch_private.modes.in_functorch")
        is None
    )
    assert forbidden("cgpass.runtime.wrapper", "cgpass.torch_private") is None
    assert forbidden("cgpass.runtime.wrapper", "cgpass.torch_private.graphs.is_capturing")
    assert forbidden("cgpass.compile.facts.values", "torch.utils._pytree.tree_map") is None
    assert forbidden("cgpass.compile.passes.base", "cgpass.compile.facts.values.tensors") is None
    code = "import a\ndef f():\n    if a:\n        from b import c\nif a:\n    import d\n"
    assert list(imports(ast.parse(code))) == ["a", "d"]
    assert list(imports(ast.parse(code), inside_functions=True)) == ["b.c"]


def test_unit_tests_are_named_after_the_modules_that_they_test():
    unit = Path(__file__).parent
    names = {p.relative_to(unit).as_posix().replace("test_", "") for p in unit.rglob("test_*.py")}
    others = {name for name in names if not (ROOT / name).exists()}
    others -= {name for name in others if name.startswith("scripts/")}
    assert others == {"layers.py", "public_names.py", "telemetry/telemetry.py"}, "of the package"


def conditions_in_with_blocks(node, inside=False):
    """Lines of comprehensions with a condition. See Note [Comprehensions in a with block]."""
    if isinstance(node, (ast.FunctionDef, ast.Lambda)):
        inside = False
    elif inside and isinstance(node, (ast.ListComp, ast.SetComp, ast.DictComp)):
        yield from (node.lineno for each in node.generators if each.ifs)
    for child in ast.iter_child_nodes(node):
        yield from conditions_in_with_blocks(child, inside or isinstance(node, ast.With))


def test_no_comprehension_leaves_a_with_block_open():
    found = {
        path.name: [*conditions_in_with_blocks(ast.parse(path.read_text()))] for path in MODULES
    }
    assert not any(found.values()), found
