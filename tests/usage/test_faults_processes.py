"""Forks and the end of a process, in the middle of calls."""

import gc
import os
import signal
import subprocess
import sys
import threading
import traceback

import pytest
import torch

import cgpass
from cgpass.runtime.capturing import is_any_capture_running

OPTIONS = {"driver": "simulated", "compiler": "eager"}


def status_of_a_fork(check):
    """What a forked process exits with that makes a check: 0 if it holds."""
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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_between_calls():
    weight = torch.randn(4, 4)

    def fn(x):
        return (x @ weight).sin().cos()

    call = torch.compile(fn, backend="cgpass", options=OPTIONS)
    inputs = [torch.randn(3, 4) for _ in range(6)]
    for x in inputs[:3]:
        held = call(x)

    def goes_on():
        for x in inputs:
            assert torch.equal(call(x), fn(x))
        assert torch.equal(held, fn(inputs[2]))

    assert status_of_a_fork(goes_on) == 0
    goes_on()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no forks here")
def test_a_fork_while_another_thread_captures():
    """That thread is not in the new process, which collects garbage, and captures functions of its own."""
    inside, done = threading.Event(), threading.Event()

    def waits(x):
        if is_any_capture_running():
            inside.set()
            done.wait(60)
        return x.sin() + 1

    wrapper = cgpass.CUDAGraphWrapper(waits, options=OPTIONS)
    thread = threading.Thread(target=lambda: [wrapper(torch.randn(3)) for _ in range(2)])

    def goes_on():
        assert gc.isenabled()
        assert not is_any_capture_running()
        other = cgpass.CUDAGraphWrapper(lambda x: x.cos() + 1, options=OPTIONS)
        for _ in range(3):
            x = torch.randn(3)
            assert torch.equal(other(x), x.cos() + 1)

    thread.start()
    assert inside.wait(60)
    try:
        assert status_of_a_fork(goes_on) == 0
    finally:
        done.set()
        thread.join()


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
    run = subprocess.run(
        [sys.executable, "-c", ENDS % end], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "there\n", run.stderr
    assert run.returncode == status, run.stderr
    assert "cgpass" not in run.stderr
