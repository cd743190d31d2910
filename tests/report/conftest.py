"""Tests of reports compile with the simulated driver; what torch warns of itself is left to torch."""

import pytest
import torch

import cgpass
from cgpass import telemetry

TORCHS_OWN_WARNINGS = (
    "ignore:The .grad attribute of a Tensor:UserWarning",  # Dynamo reads it off every input
    "ignore:`torch.jit:DeprecationWarning",  # Inductor's first import
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "report":
            for warning in TORCHS_OWN_WARNINGS:
                item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(autouse=True)
def nothing_compiled_stays():
    yield
    torch.compiler.reset()


@pytest.fixture
def simulated():
    """Compiles for simulated graphs, without a word."""
    with cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="silent"):
        yield


@pytest.fixture
def counted_alone(monkeypatch):
    """Nothing that was compiled before is counted."""
    monkeypatch.setattr(telemetry, "_registry", telemetry._Registry())
    monkeypatch.setattr(telemetry, "compile_stats", telemetry._registry.compiled)
