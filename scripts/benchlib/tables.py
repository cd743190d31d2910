"""Tables of documents that are made from the code.

Options in docs/options.md, from the fields of `cgpass.Options`; what to do about each reason and what each counter counts
in docs/explain.md, between the markers in these files.
"""

import ast
import dataclasses
import inspect
import itertools
from collections.abc import Iterable
from pathlib import Path

from cgpass.compile.facts.op_tables import FIXES
from cgpass.options import Options
from cgpass.telemetry import CallStats, CompileStats
from cgpass.telemetry.reason import OTHER_FIXES

ROOT = Path(__file__).parents[2]


def docstrings(cls: type) -> dict[str, str]:
    """Return the string literal that stands under each field of a class."""
    (definition,) = ast.parse(inspect.getsource(cls)).body
    assert isinstance(definition, ast.ClassDef)
    body = definition.body
    found = {}
    for field, text in itertools.pairwise(body):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            found[field.target.id] = inspect.cleandoc(text.value.value).replace("\n", " ")
    return found


def values(field: dataclasses.Field) -> str:
    """Return the default and what else is allowed."""
    if allowed := field.metadata.get("allowed"):
        return ", ".join(f'`"{value}"`' for value in allowed)
    if "at_least" in field.metadata:
        return f"`{field.default}`, at least {field.metadata['at_least']}"
    return f"`{getattr(Options(), field.name)!r}`"


def markdown(head: str, rows: Iterable[str]) -> str:
    return "\n".join([head, "|---" * (head.count("|") - 1) + "|", *rows]) + "\n"


def options_table() -> str:
    meanings = docstrings(Options)
    rows = [
        f"| `{field.name}` | {values(field)} | {meanings[field.name]} |"
        for field in dataclasses.fields(Options)
    ]
    return markdown("| option | values (default first) | meaning |", rows)


def reasons_table() -> str:
    fixes = sorted({**FIXES, **OTHER_FIXES}.items())
    return markdown("| code | what to do |", (f"| `{code}` | {fix} |" for code, fix in fixes))


def counters_table() -> str:
    meanings = docstrings(CallStats) | docstrings(CompileStats)
    rows = (f"| `{name}` | {meaning} |" for name, meaning in meanings.items())
    return markdown("| counter | what it counts |", rows)


TABLES = {
    "options": (ROOT / "docs" / "options.md", options_table),
    "reasons": (ROOT / "docs" / "explain.md", reasons_table),
    "counters": (ROOT / "docs" / "explain.md", counters_table),
}


def with_table(text: str, name: str, table: str) -> str:
    """Return `text` with the table between its markers."""
    begin, end = (f"<!-- {name}: {edge} -->\n" for edge in ("begin", "end"))
    head, found, rest = text.partition(begin)
    _, closed, tail = rest.partition(end)
    if not (found and closed):
        raise ValueError(f"there are no markers for the table of {name}")
    return head + begin + table + end + tail


def texts() -> dict[Path, str]:
    """Return what the documents have to be."""
    found: dict[Path, str] = {}
    for name, (path, table) in TABLES.items():
        found[path] = with_table(found.get(path) or path.read_text(), name, table())
    return found
