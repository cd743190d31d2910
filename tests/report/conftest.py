"""Tests of reports compile with the simulated driver."""

import pytest
import torch

import cgpass


@pytest.fixture(autouse=True)
def nothing_compiled_stays():
    yield
    torch.compiler.reset()


@pytest.fixture
def simulated():
    """Compiles for simulated graphs, without a word."""
    with cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="silent"):
        yield
