"""The line on a terminal while something takes long: when it is there, and that nothing is left of it."""

import io
import os
import re
import select
import termios
import threading
import time
import types

import pytest
import torch

import cgpass
from cgpass.compile.assembly import GraphBuilder
from cgpass.runtime.capturing import is_capturing_here
from cgpass.telemetry import progress

WIDTH = 200
ERASE = "\r\x1b[K"


class Terminal:
    """A pseudo-terminal that stands in for stderr, and what was written to it."""

    def __init__(self):
        self.master, slave = os.openpty()
        termios.tcsetwinsize(slave, (24, WIDTH))
        self.stream = os.fdopen(slave, "w")
        self.seen = ""

    def read(self, wait_s=0.02):
        while select.select([self.master], [], [], wait_s)[0]:
            self.seen += os.read(self.master, 65536).decode()
            wait_s = 0.0

    def wait_for(self, text):
        """The newest line, once it holds a text."""
        end = time.monotonic() + 60
        while text not in (line := self.seen.rpartition(ERASE)[2].rstrip("\r")):
            assert time.monotonic() < end, f"timed out after 60 s, waiting for {text!r}: {line}"
            self.read(0.05)
        return line

    def is_clean(self):
        """Tell if the line is gone."""
        self.read()
        return self.seen.endswith(ERASE)


def set_stderr(monkeypatch, stream):
    """Of the line alone: pytest puts its own back before each test."""
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))


@pytest.fixture
def terminal(monkeypatch):
    found = Terminal()
    monkeypatch.setattr(progress, "DELAY_S", 0.01)
    set_stderr(monkeypatch, found.stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    yield found
    found.stream.close()
    os.close(found.master)


def test_of_blocks_within_blocks_the_innermost_is_told_of_and_nothing_is_left(terminal):
    with progress.shown("compiling f", "auto"):
        line = terminal.wait_for("compiling f")
        assert re.fullmatch(r"cgpass: compiling f \(\d+ s\)", line)
        with progress.shown("recording captured_0", "auto"):
            terminal.wait_for("recording captured_0")
            assert [each.name for each in threading.enumerate()].count("cgpass-progress") == 1
        terminal.wait_for("compiling f")
    assert terminal.is_clean()


@pytest.mark.parametrize("why", ["off", "file", "none", "closed", "dumb", "rank"])
def test_off_there_is_no_thread(terminal, monkeypatch, why):
    stream = io.StringIO()
    if why in ("file", "none", "closed"):
        set_stderr(monkeypatch, None if why == "none" else stream)
    if why == "closed":
        stream.close()
    if why == "dumb":
        monkeypatch.setenv("TERM", "dumb")
    if why == "rank":
        monkeypatch.setenv("LOCAL_RANK", "1")
    drawn = []
    monkeypatch.setattr(progress, "_draw", lambda *_: drawn.append(1))
    with progress.shown("compiling f", "off" if why == "off" else "auto"):
        pass
    assert not drawn
    terminal.read()
    assert terminal.seen == ""


def waits(x):
    return torch.histc(x.sin().cos().tanh().exp(), 8).sin().cos().tanh().exp()


def test_compilations_and_recordings(terminal, monkeypatch):
    shown = []

    def slowly(self, gm, static, run=GraphBuilder._compile_part):
        number = 1 + 2 * len(shown)  # the second is eager
        shown.append(terminal.wait_for(f"partition {number} "))
        return run(self, gm, static)

    monkeypatch.setattr(GraphBuilder, "_compile_part", slowly)
    torch.compiler.reset()
    options = {"driver": "simulated", "compiler": "eager", "on_skip": "silent"}

    def fn(x):
        if is_capturing_here():
            shown.append(terminal.wait_for("recording"))
        return waits(x)

    call = torch.compile(waits, backend="cgpass", options=options)
    x = torch.ones(4)
    call(x)
    wrapped = cgpass.CUDAGraphWrapper(fn, options=options, name="mine")
    wrapped(x), wrapped(x)
    torch.compiler.reset()
    texts = [text.removeprefix("cgpass: ").partition(" (")[0] for text in shown]
    assert [text.partition(" of test_progress.py:")[0] for text in texts[:2]] == [
        "compiling inference"
    ] * 2
    assert [text.rpartition(", ")[2] for text in texts[:2]] == [
        "partition 1 of 3",
        "partition 3 of 3",
    ]
    assert texts[2] == "recording mine"
    assert terminal.is_clean()
