"""Warnings say who speaks where nobody set up logging."""

import logging

import pytest

from cgpass.telemetry import last_resort

log = logging.getLogger("cgpass.somewhere")


@pytest.fixture
def bare(monkeypatch):
    """Takes all handlers away, as in a program that did not set up logging; pytest sets its own up after fixtures."""
    return lambda: monkeypatch.setattr(logging.getLogger(), "handlers", [])


def test_a_warning_begins_with_our_name(bare, capsys):
    bare()
    log.warning("the %s graph runs without CUDA graphs", "forward")
    log.warning("cgpass.verify: it says so itself")
    log.info("this is not printed")
    assert capsys.readouterr().err == (
        "cgpass: the forward graph runs without CUDA graphs\ncgpass.verify: it says so itself\n"
    )


@pytest.mark.parametrize("name", ["", "cgpass", "cgpass.somewhere"])
def test_other_handlers_are_left_to_it(bare, capsys, monkeypatch, name):
    bare()
    taken = []
    handler = logging.Handler()
    handler.emit = taken.append
    theirs = logging.getLogger(name)
    monkeypatch.setattr(theirs, "handlers", [*theirs.handlers, handler])
    log.warning("once")
    assert (len(taken), capsys.readouterr().err) == (1, "")


def test_who_wants_no_last_resort_has_none(bare, capsys, monkeypatch):
    bare()
    monkeypatch.setattr(logging, "lastResort", None)
    log.warning("not heard")
    assert capsys.readouterr().err == ""


def test_it_is_there_once():
    last_resort.install()
    found = logging.getLogger("cgpass").handlers
    assert sum(isinstance(each, last_resort.LastResort) for each in found) == 1
