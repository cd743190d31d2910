"""The line on a terminal while something takes long: when it is there, and that nothing is left of it."""

import io
import os
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
        return self.seen.endswith(f"{ERASE}\r")


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


def test_what_takes_long_is_told_of_and_leaves_nothing(terminal):
    """A block within another takes the line over."""
    with progress.shown("compiling f", "auto"):
        assert terminal.wait_for("compiling f") == "cgpass: compiling f ..."
        with progress.shown("recording captured_0", "auto"):
            terminal.wait_for("recording captured_0")
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
    with progress.shown("compiling f", "off" if why == "off" else "auto"):
        assert not [t for t in threading.enumerate() if isinstance(t, threading.Timer)]
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
    texts = [text.removeprefix("cgpass: ").removesuffix(" ...") for text in shown]
    *parts, recording = texts
    for number, text in zip((1, 3), parts, strict=True):
        assert text.startswith("compiling inference of test_progress.py:")
        assert text.endswith(f", partition {number} of 3")
    assert recording == "recording mine"
    assert terminal.is_clean()
