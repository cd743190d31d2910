"""Names and cost of `import cgpass`, and that the packaging says the same."""

import importlib
import importlib.metadata
import os
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

import cgpass

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]

LIGHT = """
import sys
import cgpass
cgpass.Options(driver="none")
cgpass.set_defaults(rng="paired")
loaded = [m for m in sys.modules if m.startswith(("torch._dynamo", "torch._inductor"))]
assert not loaded, loaded
assert "torch" not in sys.modules
"""


def test_completion_offers_public_names_alone():
    assert sorted(dir(cgpass)) == sorted([*cgpass.__all__, "__version__"])


def test_import_is_light():
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", LIGHT], env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_the_package_declares_version_and_backend():
    assert cgpass.__version__ == PROJECT["version"]
    module, _, name = PROJECT["entry-points"]["torch_dynamo_backends"]["cgpass"].partition(":")
    assert getattr(importlib.import_module(module), name) is cgpass.cgpass


def test_errors_derive_from_one_base_and_a_builtin():
    classes = [c for c in vars(cgpass.errors).values() if isinstance(c, type)]
    assert len(classes) > 5
    for each in classes:
        assert issubclass(each, cgpass.errors.CGPassError)
        if each is not cgpass.errors.CGPassError:
            base, builtin = each.__bases__
            assert base is cgpass.errors.CGPassError
            assert builtin.__module__ == "builtins"


@pytest.mark.parametrize(
    ("origin", "source"),
    [
        ("https://github.com/some/one.git", "https://github.com/some/one"),
        ("https://user:secret@gitlab.com/a/b/one", "https://gitlab.com/a/b/one"),
        ("git@codeberg.org:some/one.git", "https://codeberg.org/some/one"),
        ("https://git.inside.example/some/one.git", None),
        ("/srv/github.com/one", None),
        (None, None),
    ],
)
def test_the_metadata_names_the_public_place_of_a_clone(tmp_path, monkeypatch, origin, source):
    hooks = ModuleType("hatchling.metadata.plugin.interface")
    hooks.MetadataHookInterface = SimpleNamespace
    monkeypatch.setitem(sys.modules, hooks.__name__, hooks)
    built = runpy.run_path(str(ROOT / "hatch_build.py"))
    subprocess.run(["git", "init", "-q", tmp_path], check=True)
    if origin is not None:
        subprocess.run(["git", "-C", tmp_path, "remote", "add", "origin", origin], check=True)
    metadata = {}
    built["ProjectURLs"](root=str(tmp_path)).update(metadata)
    wanted = {} if source is None else {"Source": source, "Issues": f"{source}/issues"}
    assert metadata == {"urls": wanted}
    assert PROJECT["dynamic"] == ["urls"]
