"""The functions of `fast.py` in both versions, a CUDA driver without CUDA, training functions with either node."""

import pytest

from cgpass.runtime import fast, native
from tests.unit.fake_cuda import fake_driver
from tests.unit.training_functions import maker


@pytest.fixture(scope="session")
def compiled():
    """The compiled versions by name."""
    try:
        path, _ = native.build()
        return fast.functions_of(native.load(path, native.FUNCTIONS))
    except native.BuildError as error:
        pytest.skip(str(error))


@pytest.fixture(params=["python", "compiled"])
def functions(request):
    return fast.PYTHON if request.param == "python" else request.getfixturevalue("compiled")


@pytest.fixture
def cuda(monkeypatch):
    return fake_driver(monkeypatch)


@pytest.fixture(params=["node", "function"])
def made(request, monkeypatch):
    yield from maker(request.param, monkeypatch)
