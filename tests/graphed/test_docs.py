"""The feature table names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "graphed-callables.md").read_text()


def test_every_cell_of_ours_names_tests_that_exist():
    tests = {
        name
        for path in Path(__file__).parent.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(), re.MULTILINE)
    }
    table = TEXT.split("## Features")[1].split("## When hooks run")[0]
    rows = [row.split("|")[1:-1] for row in table.splitlines() if row.startswith("|")][2:]
    assert len(rows) == 48
    for feature, *_, ours in rows:
        named = re.findall(r"`(test_\w+)`", ours)
        assert named or "all of these tests" in ours, feature
        assert set(named) <= tests, feature


def test_every_option_is_explained():
    source = (ROOT / "cgpass" / "graphed" / "options.py").read_text()
    fields = re.findall(
        r"^    (\w+): [^\n]+ = [^\n]+\n    \"\"\"([^\"]+)\"\"\"", source, re.MULTILINE
    )
    names = re.findall(r"^    (\w+): .* = ", source, re.MULTILINE)
    assert [name for name, _ in fields] == names
    assert len(names) > 12
