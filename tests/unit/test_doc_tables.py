"""Tables in documents are those that the code gives."""

import dataclasses
import runpy
from pathlib import Path

import pytest

import cgpass
from cgpass.compile.facts.op_tables import FIXES
from cgpass.options import Options
from cgpass.telemetry.reason import OTHER_FIXES

SCRIPT = runpy.run_path(str(Path(__file__).parents[2] / "scripts" / "doc_tables.py"))


def rows(name):
    header, rule, *rows = SCRIPT[name]().splitlines()
    assert rule == "|---" * (header.count("|") - 1) + "|"
    return rows


def test_documents_are_in_step(capsys):
    assert (SCRIPT["main"](["--check"]), capsys.readouterr().err) == (0, "")


def test_a_file_that_is_out_of_step_is_named(monkeypatch, tmp_path, capsys):
    old = tmp_path / "old.md"
    old.write_text("before\n<!-- options: begin -->\nold\n<!-- options: end -->\nafter\n")
    monkeypatch.setitem(SCRIPT["TABLES"], "options", (old, lambda: "new\n"))
    assert SCRIPT["main"](["--check"]) == 1
    assert "old.md is out of step: run scripts/doc_tables.py" in capsys.readouterr().err
    assert SCRIPT["with_table"](old.read_text(), "options", "new\n") == (
        "before\n<!-- options: begin -->\nnew\n<!-- options: end -->\nafter\n"
    )


def test_markers_that_are_missing():
    with pytest.raises(ValueError, match="no markers for the table of options"):
        SCRIPT["with_table"]("text", "options", "table")


def test_every_option_has_a_row_with_a_meaning():
    found = rows("options_table")
    assert [row.split("`")[1] for row in found] == [f.name for f in dataclasses.fields(Options)]
    assert all(len(row.rsplit("|", 2)[1].strip()) > 10 for row in found)


def test_every_counter_and_reason_has_a_row():
    assert {row.split("`")[1] for row in rows("counters_table")} == cgpass.counters().keys()
    assert {row.split("`")[1] for row in rows("reasons_table")} == {*FIXES, *OTHER_FIXES}
