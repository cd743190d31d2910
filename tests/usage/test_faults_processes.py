"""Forks, threads and processes that end in the middle of calls, and files that can't be written."""

import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import weakref
from pathlib import Path

import pytest
import torch

import cgpass
from cgpass.runtime.capturing import Capture, is_capturing_here, when_no_capture_runs

OPTIONS = {"driver": "simulated", "compiler": "eager"}


def status_of_a_fork(check):
    """Exit status of a fork that makes a check: 0 if it holds."""
    pid = os.fork()
    if not pid:
        status = 1
        try:
            check()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitpid(pid, 0)[1]


class Waits:
    """A function that a thread is inside of, capturing, until it may go on."""

    def __init__(self):
        self.inside, self.may_go_on = threading.Event(), threading.Event()
        self.wrapper = cgpass.CUDAGraphWrapper(self.run, options=OPTIONS)
        self.thread = threading.Thread(target=lambda: [self.wrapper(torch.ones(3)) for _ in "ab"])

    def run(self, x):
        if is_capturing_here():
            self.inside.set()
            self.may_go_on.wait(60)
        return x.sin() + 1

    def __enter__(self):
        self.thread.start()
        assert self.inside.wait(60)
        return self.wrapper

    def __exit__(self, *error):
        self.may_go_on.set()
        self.thread.join(60)
        assert not self.thread.is_alive()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_while_another_thread_captures():
    """That thread is not in the new process, which collects garbage and captures: this function, and others."""

    def goes_on():
        signal.alarm(60)  # ends a process that hangs
        waits.may_go_on.set()
        assert gc.isenabled()
        assert not is_capturing_here()
        for _ in range(3):
            x = torch.randn(3)
            assert torch.equal(captured(x), x.sin() + 1)
        other = cgpass.CUDAGraphWrapper(lambda x: x.cos() + 1, options=OPTIONS)
        for _ in range(3):
            x = torch.randn(3)
            assert torch.equal(other(x), x.cos() + 1)

    waits = Waits()
    with waits as captured:
        assert status_of_a_fork(goes_on) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_while_a_graph_waits_to_be_destroyed():
    """Nothing on the device may be destroyed in the new process: it keeps the graph as it is."""
    destroyed = []

    class Graph:
        def destroy(self):
            destroyed.append(os.getpid())

    def keeps():
        with Capture():
            pass
        assert graph() is not None
        assert not destroyed

    with Waits():
        made = Graph()
        graph = weakref.ref(made)
        when_no_capture_runs(made.destroy)
        del made
        assert status_of_a_fork(keeps) == 0
    assert destroyed == [os.getpid()]


def test_a_thread_that_is_ended_while_it_waits_for_its_turn():
    """Whichever thread it was, later calls of all have their turn and their own values."""
    ended = threading.Event()

    def call():
        try:
            for _ in range(3):
                wrapper(torch.ones(3))
        except KeyboardInterrupt:
            ended.set()

    with Waits() as wrapper:
        waiting = threading.Thread(target=call)
        waiting.start()
        time.sleep(0.05)  # it is at the lock, or about to be
        killed = ctypes.py_object(KeyboardInterrupt)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(waiting.ident), killed)
    waiting.join(60)
    assert ended.is_set()
    for _ in range(3):
        x = torch.randn(3)
        assert torch.equal(wrapper(x), x.sin() + 1)


@pytest.mark.parametrize(
    ("error", "raised", "why"),
    [
        (OSError(errno.ENOSPC, "full"), cgpass.errors.ReportError, "can't be written"),
        (KeyboardInterrupt(), KeyboardInterrupt, None),
    ],
)
def test_a_report_that_is_written_half(tmp_path, monkeypatch, error, raised, why):
    """Nothing half done is left, and what was there is as it was."""
    report = cgpass.explain(torch.nn.Linear(4, 4), torch.randn(2, 4), options=OPTIONS)
    path, write = tmp_path / "report.json", Path.write_text
    report.save(path)
    before = path.read_text()

    def write_half(path, text, **kwargs):
        write(path, text[: len(text) // 2], **kwargs)
        raise error

    monkeypatch.setattr(Path, "write_text", write_half)
    with pytest.raises(raised, match=why):
        report.save(path)
    assert path.read_text() == before
    assert os.listdir(tmp_path) == ["report.json"]


def test_a_report_that_can_not_be_there(tmp_path):
    """A folder of that name, a missing one and a name that is too long are errors that say so."""
    report = cgpass.explain(torch.nn.Linear(4, 4), torch.randn(2, 4), options=OPTIONS)
    (tmp_path / "folder.json").mkdir()
    for name, why in (
        ("folder.json", "can't be written: Is a directory"),
        ("missing/report.json", "does not exist"),
        (f"{'x' * 300}.json", "can't be written: File name too long"),
    ):
        with pytest.raises(cgpass.errors.ReportError, match=why):
            report.save(tmp_path / name)
    report.save(tmp_path / f"{'x' * 250}.json")


ENDS = """
import os, sys, torch, cgpass
options = {"driver": "simulated", "compiler": "eager"}
module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
call = torch.compile(module, backend="cgpass", options=options)
wrapper = cgpass.CUDAGraphWrapper(lambda x: x.sin() + 1, options=options)
held = []
for _ in range(4):
    held.append(call(torch.randn(3, 4)))
    held.append(wrapper(torch.randn(3)))
held[0].sum().backward()
assert cgpass.counters()["replays"] > 2
print("there", flush=True)
%s
"""


def ends(end, **kwargs):
    command = [sys.executable, "-c", ENDS % end]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, **kwargs
    )


@pytest.mark.parametrize(
    ("end", "status"),
    [
        ("", 0),
        ("sys.exit(3)", 3),
        ("raise KeyboardInterrupt", -signal.SIGINT),
        ("import threading; threading.Thread(target=lambda: call(torch.randn(3, 4))).start()", 0),
        ("cgpass.reset(); del call", 0),
    ],
)
def test_a_process_that_ends_with_graphs_alive(end, status):
    run = ends(end)
    assert run.stdout == "there\n", run.stderr
    assert run.returncode == status, run.stderr
    assert "cgpass" not in run.stderr
