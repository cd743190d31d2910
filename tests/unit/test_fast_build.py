"""The C++ functions are built in the background and kept; where that fails the Python versions go on."""

import logging
import os
import shlex
import shutil
import subprocess
import sys
import traceback
import warnings
from pathlib import Path

import pytest
import torch

from cgpass import options
from cgpass.errors import OptionError
from cgpass.runtime import fast, fast_build, node

PYTHON = fast.PYTHON


def fresh_loader(monkeypatch, folder, mode="1"):
    """A loader that has loaded nothing, with an empty cache."""
    for name, function in PYTHON.items():
        monkeypatch.setattr(fast, name, function)
    monkeypatch.setattr(fast, "_loader", fast._Loader())
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    monkeypatch.setenv("CGPASS_FAST", mode)


@pytest.mark.skipif(
    not any(map(shutil.which, ("c++", "g++", "clang++"))) or os.environ.get("CGPASS_FAST") == "0",
    reason="no C++ compiler, or it is not to be used",
)
def test_where_there_is_a_compiler_all_is_built():
    """Tests of what is built skip what is not."""
    assert fast.wait()
    assert node.wait(), node.why_not()


@pytest.mark.parametrize(
    ("compiler", "expected"),
    [
        ("/nowhere/c++", "No such file"),
        ("false", "false failed with status 1"),
        (f"{sys.executable} -c 'print(\"x.cpp:1: error: bad\"); exit(3)'", "status 3: x.cpp:1"),
    ],
)
def test_a_failed_build_is_said_once_and_python_goes_on(
    monkeypatch, tmp_path, caplog, compiler, expected
):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setenv("CXX", compiler)
    with caplog.at_level(logging.INFO, "cgpass"):
        fast.start()
        assert not fast.wait()
        assert not fast.wait()
    (record,) = caplog.records
    assert record.levelno == logging.INFO
    assert expected in record.message
    assert list(tmp_path.rglob("*.so")) == []
    assert len(fast.aliases((torch.zeros(1),))) == 1


def test_no_compiler_is_said(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert "no C++ compiler" in caplog.text


def test_a_broken_file_in_the_cache_is_not_loaded(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    fast_build.cached_path().write_text("nothing to load")
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert "can't be loaded" in caplog.text


def test_an_unknown_layout_of_tensors_is_not_compiled_for(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path)
    monkeypatch.setattr(fast_build, "_layout_is_known", lambda: False)
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert "lays tensors out" in caplog.text


def test_it_can_be_switched_off(monkeypatch, tmp_path, caplog):
    fresh_loader(monkeypatch, tmp_path, mode="0")
    with caplog.at_level(logging.INFO, "cgpass"):
        assert not fast.wait()
    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []


def test_what_the_variable_may_say(monkeypatch):
    for text, mode in {"0": "off", "1": "on", "WAIT": "wait"}.items():
        monkeypatch.setenv("CGPASS_FAST", text)
        assert options.fast_mode() == mode
        assert options.current_defaults() == options.Options()
    monkeypatch.setenv("CGPASS_FAST", "yes")
    with pytest.raises(
        OptionError, match=r"CGPASS_FAST must be one of '0', '1', 'wait', got 'yes'"
    ):
        options.fast_mode()
    with pytest.raises(OptionError, match="CGPASS_FAST must be one of"):
        options.Options.parse({"driver": "none"})


def test_an_unwritable_cache_is_replaced_by_a_temporary_one(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    path = fast_build.cached_path()
    assert tmp_path not in path.parents
    assert path.parent.is_dir()


def forked(fn):
    """A child that starts with nothing but what was built here; its status is 0 where all went well."""
    if child := os.fork():
        return child
    try:
        fn()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def builds_and_uses(ones):
    fast.start()
    assert fast.is_compiled()
    assert fast.aliases((ones,))[0].item() == 1.0


def test_two_processes_at_once_leave_one_file(compiled, tmp_path, monkeypatch):
    del compiled  # there is a compiler, and what it made
    code = (
        "import shutil, sys, time; time.sleep(1); "
        f"shutil.copy({str(fast_build.cached_path())!r}, sys.argv[sys.argv.index('-o') + 1])"
    )
    monkeypatch.setenv("CXX", shlex.join([sys.executable, "-S", "-c", code]))
    fresh_loader(monkeypatch, tmp_path, mode="wait")
    ones = torch.ones(1)
    assert not fast.is_compiled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a fork beside threads
        children = [forked(lambda: builds_and_uses(ones)) for _ in range(2)]
    statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert statuses == [0, 0]
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [fast_build.cached_path().name]


def test_a_process_that_ends_early_leaves_nothing(compiled, tmp_path, monkeypatch):
    del compiled  # there is a compiler
    monkeypatch.setenv("CGPASS_FAST", "1")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(Path(fast.__file__).parents[2]))
    program = "import time; from cgpass.runtime import fast; fast.start(); time.sleep(0.3)"
    subprocess.run([sys.executable, "-c", program], check=True)
    assert [p for p in tmp_path.rglob("*") if p.is_file()] == []


@pytest.mark.skipif(
    options.fast_mode() == "off"
    or not ("CXX" in os.environ or any(map(shutil.which, ("c++", "g++", "clang++")))),
    reason="no C++ compiler, or not to be used",
)
def test_what_is_compiled_compiles_here():
    """Else tests of it would skip themselves."""
    assert fast.wait()
    assert node.wait()
