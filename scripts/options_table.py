"""Write the table of options in README.md from the fields of `cgpass.Options`.

Prints the table; --write puts it between the markers in README.md; --check fails if it is not
what stands there.
"""

import argparse
import ast
import dataclasses
import inspect
import itertools
import sys
from pathlib import Path

from cgpass import options
from cgpass.options import Options

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- options: begin -->\n", "<!-- options: end -->\n"


def docstrings() -> dict[str, str]:
    """Return the string literal that stands under each field of `Options`."""
    module = ast.parse(inspect.getsource(options))
    body = next(n.body for n in module.body if isinstance(n, ast.ClassDef) and n.name == "Options")
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


def table() -> str:
    """Return the table as Markdown."""
    meanings = docstrings()
    rows = ["| option | values (default first) | meaning |", "|---|---|---|"]
    for field in dataclasses.fields(Options):
        rows.append(f"| `{field.name}` | {values(field)} | {meanings[field.name]} |")
    return "\n".join(rows) + "\n"


def with_table(readme: str) -> str:
    """Return `readme` with the table between its markers."""
    head, _, rest = readme.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table() + END + tail


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="update README.md")
    parser.add_argument("--check", action="store_true", help="fail if README.md is out of step")
    args = parser.parse_args(arguments)
    readme = README.read_text()
    if args.write:
        README.write_text(with_table(readme))
    elif not args.check:
        print(table(), end="")
    if args.check and readme != with_table(readme):
        print("README.md is out of step: run scripts/options_table.py --write", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
