"""The line on a terminal while something takes long: when it is there, and that nothing is left of it."""

import contextlib
import io
import os
import threading
import types

import pytest
import torch

import cgpass
from cgpass.telemetry import progress

ERASE = "\r\x1b[K"


@pytest.fixture
def terminal(monkeypatch):
    """Stands in for stderr; reads what is written, until that ends with a text."""
    master, slave = os.openpty()
    stream = os.fdopen(slave, "w")
    monkeypatch.setattr(progress, "DELAY_S", 0.01)
    set_stderr(monkeypatch, stream)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("LOCAL_RANK", raising=False)

    def read(end):
        seen = ""
        while not seen.endswith(end):
            seen += os.read(master, 65536).decode()
        return seen

    yield read
    stream.close()
    os.close(master)


def set_stderr(monkeypatch, stream):
    """Of the line alone: pytest puts its own back before each test."""
    monkeypatch.setattr(progress, "sys", types.SimpleNamespace(stderr=stream))


def test_what_takes_long_is_told_of_and_leaves_nothing(terminal):
    """A block within another takes the line over."""
    with progress.shown("compiling f", "auto"):
        assert terminal("...\r") == f"{ERASE}cgpass: compiling f ...\r"
        with progress.shown("recording captured_0", "auto"):
            assert terminal("...\r") == f"{ERASE}cgpass: recording captured_0 ...\r"
    assert terminal(f"{ERASE}\r{ERASE}\r")


@pytest.mark.parametrize("why", ["off", "file", "none", "closed", "dumb", "rank"])
@pytest.mark.usefixtures("terminal")
def test_off_there_is_no_thread(monkeypatch, why):
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


def waits(x):
    return torch.histc(x.sin().cos().tanh().exp(), 8).sin().cos().tanh().exp()


def test_compilations_and_recordings(monkeypatch):
    texts = []

    def shown(text, setting):
        texts.append((setting, text))
        return contextlib.nullcontext()

    monkeypatch.setattr(progress, "shown", shown)
    torch.compiler.reset()
    options = {"driver": "simulated", "compiler": "eager", "on_skip": "silent"}
    x, call = torch.ones(4), torch.compile(waits, backend="cgpass", options=options)
    call(x)
    wrapped = cgpass.CUDAGraphWrapper(torch.sin, options=options, name="mine")
    wrapped(x), wrapped(x)
    place = f"test_progress.py:{waits.__code__.co_firstlineno + 1} in waits"
    parts = [f"compiling inference of {place}, partition {n} of 3" for n in (1, 2, 3)]
    expected = [f"compiling {place}", *parts, "recording mine"]
    assert texts == [("auto", text) for text in expected]
