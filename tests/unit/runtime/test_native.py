"""The native code is compiled before the first recording, once, and kept; where it can't be one warning says so."""

import errno
import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch

import cgpass
from cgpass.__main__ import main
from cgpass.runtime import fast, native

OPTIONS = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
REPOSITORY = str(Path(cgpass.__file__).parents[1])


def fresh_loader(monkeypatch, folder):
    """A loader that has loaded nothing, with an empty cache."""
    monkeypatch.setattr(fast, "is_loaded", False)
    monkeypatch.setattr(native, "loader", native.Loader())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.delenv("CXX", raising=False)


@pytest.fixture
def copying(tmp_path, monkeypatch):
    """A compiler that takes a second and copies what was compiled before; the file that it notes its runs in."""
    built = native.build()
    compiler, runs = tmp_path / "c++", tmp_path / "runs"
    compiler.write_text(
        f"""#!/bin/sh
echo run >>'{runs}'
for word; do
  [ "$before" = -o ] && to=$word
  before=$word
done
head -c 1000 '{built}' >"$to"
sleep 1
cp '{built}' "$to"
"""
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PYTHONPATH", REPOSITORY)
    return runs


def files(folder):
    """All in the cache but the lock and folders."""
    found = [path for path in folder.glob("cgpass/*") if path.is_file()]
    return sorted(path.name for path in found if path.name != ".lock")


SHORT = """
import os, torch, cgpass
folder = os.path.join(os.environ["XDG_CACHE_HOME"], "cgpass")
def fn(x):
    return (x.sin() + 1).cos()
none = {"driver": "none", "compiler": "eager"}
plain = torch.compile(torch.nn.Linear(3, 3), backend="cgpass", options=none)
plain(torch.ones(3)).sum().backward()
assert "native code" not in cgpass.summary(), cgpass.summary()
assert not os.path.exists(folder), "nothing is recorded"
torch.compiler.reset()
compiled = torch.compile(fn, backend="cgpass", options=%r)
for _ in range(2):
    compiled(torch.ones(3))
assert cgpass.counters()["recordings"] == 1
assert cgpass.summary().splitlines()[-1] == "native code: in use", cgpass.summary()
"""


def test_a_short_process_that_records_leaves_what_was_compiled(copying, tmp_path, capsys):
    run = [sys.executable, "-c", SHORT % OPTIONS]
    subprocess.run(run, check=True, capture_output=True)
    assert files(tmp_path / "cache") == [native.file_name()]
    assert main(["build"]) == 0
    path, said = capsys.readouterr().out.splitlines()
    assert path == str(tmp_path / "cache" / "cgpass" / native.file_name())
    assert said == f"native code for torch {torch.__version__} is there"
    assert copying.read_text() == "run\n"


BUILDS = """
import os, sys, time
from cgpass.runtime import native
open(sys.argv[1] + str(os.getpid()), "w").close()
while len(os.listdir(os.path.dirname(sys.argv[1]))) < 2:
    time.sleep(0.01)
assert native.loader.wait(), native.loader.why_not
"""


def test_of_two_processes_one_compiles(copying, tmp_path):
    (tmp_path / "ready").mkdir()
    command = [sys.executable, "-c", BUILDS, str(tmp_path / "ready" / "process")]
    children = [subprocess.Popen(command) for _ in range(2)]
    assert [child.wait(timeout=120) for child in children] == [0, 0]
    assert files(tmp_path / "cache") == [native.file_name()]
    assert copying.read_text() == "run\n"


STARTS = (
    "import time; from cgpass.runtime import native; native.loader.start(); print(); time.sleep({})"
)


@pytest.mark.parametrize("how", ["ends", "is killed"])
def test_a_process_that_goes_before_leaves_nothing_that_stops_the_next(copying, tmp_path, how):
    program = STARTS.format(0.5 if how == "ends" else 60)
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        while not copying.exists() and process.poll() is None:
            time.sleep(0.01)
        if how == "is killed":
            process.kill()
        assert process.stderr.read() == b""
    assert process.returncode == (0 if how == "ends" else -signal.SIGKILL)
    assert files(tmp_path / "cache") == []
    folder = tmp_path / "cache" / "cgpass"
    assert how == "is killed" or list(folder.iterdir()) == [folder / ".lock"]
    assert main(["build"]) == 0
    assert [path.name for path in folder.iterdir() if path.name != ".lock"] == [native.file_name()]


def test_folders_of_a_machine_whose_name_is_longer_are_left_alone(copying, tmp_path, monkeypatch):
    folder = tmp_path / "cache" / "cgpass"
    folder.mkdir(parents=True)
    monkeypatch.setattr(native.platform, "node", lambda: "worker-1")
    theirs = native._temporary_folder(folder)
    monkeypatch.setattr(native.platform, "node", lambda: "worker")
    ours = native._temporary_folder(folder)  # as of a process that was killed
    native.build()
    assert theirs.exists()
    assert not ours.exists()


PRESSED = """
import os, signal, sys, time
from cgpass.runtime import native
os.setpgrp()
signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background may ignore it
native.loader.start()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
try:
    os.killpg(0, signal.SIGINT)
    native.loader.wait()
    time.sleep(60)  # another thread may get the signal first, and take its time
    sys.exit("nothing was raised")
except KeyboardInterrupt:
    pass
assert native.loader.wait(), native.loader.why_not
"""


def test_ctrl_c_ends_no_compiler(copying):
    """A terminal and a notebook send it to every process of the group."""
    command = [sys.executable, "-c", PRESSED, str(copying)]
    run = subprocess.run(command, check=False, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    assert copying.read_text() == "run\n"


def test_a_thread_that_can_not_be_started_is_started_by_the_next_call(
    copying, monkeypatch, tmp_path
):
    del copying
    fresh_loader(monkeypatch, tmp_path / "cache")
    monkeypatch.setenv("CXX", str(tmp_path / "c++"))
    with monkeypatch.context() as patched:
        patched.setattr(native.threading, "Thread", mock.Mock(side_effect=RuntimeError("no more")))
        with pytest.raises(RuntimeError, match="no more"):
            native.loader.wait()
    assert native.loader.wait(), native.loader.why_not


def test_a_file_that_can_not_be_written_whole_anywhere_gets_no_name(copying, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", mock.Mock(side_effect=OSError("no space left")))
    with pytest.raises(native.BuildError, match="no space left"):
        native.build()
    assert files(tmp_path / "cache") == []


@pytest.mark.parametrize("limit", ["no folder", "the compiler", "what it made"])
def test_a_cache_that_can_not_be_written_is_replaced_by_a_temporary_one(
    copying, monkeypatch, tmp_path, caplog, capsys, limit
):
    """No other compiler is tried on a full disk, told by the compiler or as the file is kept."""
    del copying
    full, error = str(tmp_path / "cache" / "cgpass"), "[Errno 28] No space left on device"
    compiler, sync = Path(os.environ["CXX"]), os.fsync
    if limit == "no folder":
        (tmp_path / "cache").touch()
        error = "[Errno 20] Not a directory"
    elif limit == "the compiler":
        first, rest = compiler.read_text().split("\n", 1)
        said = "as: can't write 4 bytes to section .text of x.o: no space left on device"
        no_space = f"case $TMPDIR in '{full}'/*) echo \"{said}\"; exit 1;; esac"
        compiler.write_text(f"{first}\n{no_space}\n{rest}")
    else:

        def fsync(file):
            if os.readlink(f"/proc/self/fd/{file}").startswith(full):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), full)
            sync(file)

        monkeypatch.setattr(os, "fsync", fsync)
    with caplog.at_level(logging.INFO, "cgpass"):
        path = native.build()
    assert path.exists()
    assert tmp_path not in path.parents
    said = "native code is compiled for this process alone, in /"
    (message,) = [each for each in caplog.messages if each.startswith(said)]
    assert message.endswith(f"{error}: '{full}'")
    assert main(["build"]) == 1
    fix = "Set XDG_CACHE_HOME to a folder that can be written."
    assert capsys.readouterr().err == f"cgpass build: {error}: '{full}'. {fix}\n"
    assert limit == "no folder" or os.listdir(full) == [".lock"]


def test_no_compiler_is_said_once_and_nothing_is_recorded(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    weight = torch.nn.Parameter(torch.ones(3))
    torch.compiler.reset()
    cgpass.reset()
    compiled = torch.compile(lambda x: x.sin() * weight, backend=cgpass.cgpass, options=OPTIONS)
    wrapped = cgpass.CUDAGraphWrapper(lambda x: [x * 2], options={"driver": "simulated"})
    with cgpass.expect(recordings=0, replays=0):
        for value in (1.0, 2.0, 3.0):
            weight.grad, x = None, torch.full((3,), value)
            compiled(x).sum().backward()
            assert torch.equal(weight.grad, x.sin())
            assert wrapped(x)[0].tolist() == [2 * value] * 3
        sample, linear = torch.ones(3), torch.nn.Linear(3, 3)
        by_hand = cgpass.make_graphed_callables(
            linear, (sample,), options=cgpass.GraphedOptions(driver="simulated")
        )
        assert torch.equal(by_hand(sample), linear(sample))
    summary = cgpass.summary()
    torch.compiler.reset()
    why = "no C++ compiler was found (c++, g++, clang++)"
    assert caplog.messages == [
        (f"cgpass has no native code, so everything runs without a graph: {why}. {INSTALL}")
    ]
    assert summary.splitlines()[-1] == f"native code: not in use: {why}"
    assert "3 of 3 calls ran without a graph: recording needs the native code" in summary


INSTALL = "Install g++ or clang++, or set CXX to a compiler."
ANOTHER = "Set CXX to another compiler, or install g++ or clang++."


@pytest.mark.parametrize(
    ("compiler", "why", "fix", "says"),
    [
        ("/nowhere/c++", "/nowhere/c++ can't be run: No such file or directory", INSTALL, ""),
        ("false", "false failed with status 1", ANOTHER, ""),
        ("c++ '-O3", 'CXX is no command, but "c++ \'-O3": No closing quotation', ANOTHER, ""),
        (
            "sh -c 'echo first; echo \"x.cpp:1: error: bad\"; exit 3'",
            "sh failed with status 3: x.cpp:1: error: bad",
            ANOTHER,
            "first\nx.cpp:1: error: bad\n",
        ),
    ],
)
def test_a_failed_build_is_said_once(
    monkeypatch, tmp_path, caplog, capsys, compiler, why, fix, says
):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setenv("CXX", compiler)
    native.loader.start()
    assert not native.loader.wait()
    assert not native.loader.wait()
    (message,) = caplog.messages
    more = " (`python -m cgpass build` shows its whole output)" if says else ""
    assert message.endswith(f" everything runs without a graph: {why}{more}. {fix}")
    assert main(["build"]) == 1
    assert capsys.readouterr().err == f"{says}cgpass build: {why}. {fix}\n"
    assert files(tmp_path) == []


def test_a_source_that_is_not_there_is_said(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setattr(native, "SOURCE", tmp_path / "_native.cpp")
    assert not native.loader.wait()
    assert "No such file or directory" in caplog.text
    assert native.loader.status.startswith("not in use: ")


def test_a_file_of_another_torch_is_not_loaded(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    (tmp_path / "cgpass").mkdir()
    (tmp_path / "cgpass" / native.file_name()).write_text("nothing to load")
    assert not native.loader.wait()
    assert "can't be loaded: " in caplog.text
    assert "Delete the file to compile it again." in caplog.text
