"""Which environment scripts/demo.sh runs in, with interpreters that only tell what they were called for."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = "VIRTUAL_ENV='' prepare_venv demo"


def environment(directory):
    """An environment whose interpreter notes what pip is to install."""
    python = directory / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        f'#!/bin/sh\ncase "$*" in *pip*) echo "$@" >> "{directory}/installed";; esac\n'
    )
    python.chmod(0o755)
    return directory


@pytest.fixture
def run(tmp_path):
    """Runs shell code in a checkout that has a `.venv`; returns the interpreter that is taken and what was printed."""
    (tmp_path / "pyproject.toml").touch()
    environment(tmp_path / ".venv")

    def run(code, **variables):
        script = f'set -eu; source "{ROOT}/scripts/_venv.sh"; {code}; echo "$PYTHON"'
        env = {name: os.environ[name] for name in ("PATH",)} | {
            k: str(v) for k, v in variables.items()
        }
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=True,
        )
        *said, python = done.stdout.splitlines()
        return Path(python).parents[1], said

    return run


def installed(directory):
    path = directory / "installed"
    return path.read_text().splitlines() if path.exists() else []


def test_an_active_environment_is_left_alone(run, tmp_path):
    active = environment(tmp_path / "active")
    used, _ = run(DEMO, VIRTUAL_ENV=active)
    assert used == tmp_path / ".venv"
    assert installed(active) == []
    (line,) = installed(used)
    assert line.endswith("-e .[demo]")


def test_an_environment_that_has_what_tests_need_has_what_the_demo_needs(run, tmp_path):
    run("prepare_venv dev")
    used, said = run(DEMO)
    assert (used, said, len(installed(used))) == (tmp_path / ".venv", [], 1)


def test_an_environment_that_is_named_is_set_up(run, tmp_path):
    active, named = environment(tmp_path / "active"), environment(tmp_path / "named")
    assert run(DEMO, VIRTUAL_ENV=active, CGPASS_VENV=named)[0] == named
    assert (len(installed(named)), installed(active)) == (1, [])
