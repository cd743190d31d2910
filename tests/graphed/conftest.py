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
