"""Tests of reports compile with the simulated driver; what torch warns of itself is left to torch."""

import pytest
import torch

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
