"""README.md describes the options as they are."""

import dataclasses
import os
import subprocess
import sys
from pathlib import Path

from cgpass.options import Options

ROOT = Path(__file__).parents[2]


def options_table(*arguments):
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "options_table.py", *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_readme_is_in_step():
    done = options_table("--check")
    assert (done.returncode, done.stderr) == (0, "")


def test_every_option_has_a_row_with_a_meaning():
    header, rule, *rows = options_table().stdout.splitlines()
    assert (header, rule) == ("| option | values (default first) | meaning |", "|---|---|---|")
    assert [row.split("`")[1] for row in rows] == [f.name for f in dataclasses.fields(Options)]
    assert all(len(row.rsplit("|", 2)[1].strip()) > 10 for row in rows)
