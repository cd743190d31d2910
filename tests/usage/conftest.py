"""Every usage test runs through the simulated driver, and on CUDA where there is a device."""

import pytest
import torch

from tests.usage.programs import Setting

TORCHS_OWN_WARNINGS = (
    "ignore:The .grad attribute of a Tensor:UserWarning",  # Dynamo reads it off every input
    "ignore:`torch.jit:DeprecationWarning",  # Inductor's first import
)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name != "usage":
            continue
        for warning in TORCHS_OWN_WARNINGS:
            item.add_marker(pytest.mark.filterwarnings(warning))


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def setting(request):
    device = torch.device("cpu") if request.param == "simulated" else torch.device("cuda", 0)
    yield Setting(device, request.param)
    torch.compiler.reset()
