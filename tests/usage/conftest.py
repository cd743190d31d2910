"""Every usage test runs through the simulated driver, and on CUDA where there is a device."""

import pytest
import torch

from tests.usage.programs import ALL, USUAL, Setting


def settings(*params):
    """Drivers with compilers as parameters of a fixture; those on CUDA are skipped without it."""
    return [
        pytest.param(param, id="-".join(param), marks=[pytest.mark.gpu] * (param[0] == "cuda"))
        for param in params
    ]


def each(request):
    driver, *compiler = request.param
    device = torch.device("cpu") if driver == "simulated" else torch.device("cuda", 0)
    yield Setting(device, driver, *compiler)
    torch.compiler.reset()


@pytest.fixture(params=settings(("simulated",), ("cuda",)))
def setting(request):
    yield from each(request)


@pytest.fixture(params=settings(*USUAL))
def way(request):
    """Both compilers on CUDA; on CPU aten alone, for Inductor takes seconds a graph there."""
    yield from each(request)


@pytest.fixture(params=settings(*ALL))
def slow_way(request):
    """Both compilers everywhere: for the few ways of a file that are worth those seconds."""
    yield from each(request)
