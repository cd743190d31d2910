"""A CUDA driver without CUDA, training functions with either node."""

import pytest

from tests.unit.fake_cuda import fake_driver
from tests.unit.training_functions import maker


@pytest.fixture
def cuda(monkeypatch):
    return fake_driver(monkeypatch)


@pytest.fixture(params=["node", "function"])
def made(request, monkeypatch):
    yield from maker(request.param, monkeypatch)
