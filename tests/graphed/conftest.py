"""Every test of graphed callables runs with the simulated driver, and on CUDA where there is a device."""

import pytest
import torch

from tests.graphed.steps import Setting


@pytest.fixture(params=["simulated", pytest.param("cuda", marks=pytest.mark.gpu)])
def setting(request):
    device = torch.device("cpu") if request.param == "simulated" else torch.device("cuda", 0)
    torch.manual_seed(0)
    yield Setting(request.param, device)
    torch.set_default_device(None)


def pytest_collection_modifyitems(items):
    for item in items:
        if item.path.parent.name == "graphed":  # Inductor's first import
            for kind in ("DeprecationWarning", "FutureWarning"):
                item.add_marker(pytest.mark.filterwarnings(f"ignore:`torch.jit:{kind}"))
