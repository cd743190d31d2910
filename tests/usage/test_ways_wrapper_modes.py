"""Modes of torch's that a wrapped callable runs in: what they decide is in the graph, or asks for another one."""

import pytest
import torch


@pytest.mark.parametrize("inside", ["nothing", "decorated", "made before", "with its cache"])
@pytest.mark.parametrize("static", [False, True])
def test_weights_that_autocast_has_cast_before_are_cast_in_the_graph(setting, static, inside):
    """What it keeps of one block would be read in every replay, whatever the weight is by then."""
    session = setting.session()
    linear = session.module(lambda: torch.nn.Linear(4, 4))

    def fn(x, weight):
        weight = weight if static else linear.weight
        return torch.nn.functional.linear(x, weight).sin() * 2

    kind = setting.device.type
    ready = torch.autocast(kind, torch.bfloat16)
    if inside == "decorated":
        fn = torch.autocast(kind, torch.bfloat16)(fn)
    elif inside != "nothing":
        plain = fn

        def fn(x, weight):
            again = torch.autocast(kind, torch.bfloat16, cache_enabled=True)
            with ready if inside == "made before" else again:
                return plain(x, weight)

    call = session.wrap(fn, static_input_indices=[1])
    for _ in range(3):
        x = session.randn(3, 4)
        with torch.autocast(kind, torch.bfloat16), torch.no_grad():
            linear(x)  # which casts the weight, too
            found = [call(x, linear.weight) for _ in range(3)]
        with torch.autocast(kind, torch.bfloat16), torch.no_grad():
            assert all(torch.equal(each, fn(x, linear.weight)) for each in found)
        assert torch.is_autocast_cache_enabled()
        with torch.no_grad():
            linear.weight.mul_(1.5)
    assert call.stats.replays >= 6


def test_what_decides_on_kernels_is_part_of_the_signature(setting):
    def fn(x):
        return x * 2 if torch.are_deterministic_algorithms_enabled() else x * 3

    session = setting.session()
    call, x = session.wrap(fn), session.randn(4)
    for _ in range(3):
        assert torch.equal(call(x), x * 3)
    torch.use_deterministic_algorithms(True)
    try:
        for _ in range(3):
            assert torch.equal(call(x), x * 2)
    finally:
        torch.use_deterministic_algorithms(False)
    precision = torch.get_float32_matmul_precision()
    recordings = call.stats.recordings
    torch.set_float32_matmul_precision("high" if precision == "highest" else "highest")
    try:
        for _ in range(3):
            assert torch.equal(call(x), x * 3)
    finally:
        torch.set_float32_matmul_precision(precision)
    assert call.stats.recordings == recordings + 1
