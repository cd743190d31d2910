"""Ways to call a compiled function, or its backward, inside a transform of torch."""

import pytest
import torch

from cgpass.errors import InputError
from tests.usage.programs import MLP, counted

ORDERS = ["ppppb", "pbppp", "bpppp", "ppbbpp"]


def function(x):
    return (x.sin() * 2).cos()


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("outputs", ["shared", "owned"])
def test_gradients_are_batched(way, order, outputs, caplog):
    def program(session):
        call, values = session.compile(function), []
        for kind in order + "pp":
            x = session.randn(4).requires_grad_()
            if kind == "b":
                rows = torch.eye(4, device=session.device)
                values += torch.autograd.grad(call(x), x, rows, is_grads_batched=True)
            else:
                values += torch.autograd.grad(call(x).sum(), x)
        return values

    if way.compiler == "inductor":
        pytest.skip("Inductor's kernels take no batched tensors, graphs or not")
    assert way.compare(program, outputs=outputs, min_partition_ops=1)["replays"] > 0
    assert "can't be captured" not in caplog.text
    told = [r for r in caplog.messages if "from inside of a transform" in r]
    assert len(told) == 1


def test_jacobians_of_a_module(way):
    if way.compiler == "inductor":
        pytest.skip("Inductor's kernels take no batched tensors, graphs or not")

    def program(session):
        module, call = session.compiled(MLP)
        values = []
        for batch in session.batches(8, count=6):
            call(batch).square().mean().backward()
            values += [
                torch.autograd.functional.jacobian(call, batch, vectorize=True),
                *(p.grad.clone() for p in module.parameters()),
            ]
        return values

    assert way.compare(program)["replays"] > 0


def test_a_wrapper_inside_a_transform(setting, caplog):
    call = setting.session().wrap(lambda x: x.sin() + 1)
    x = setting.session().randn(3, 4)
    with counted() as counters:
        for _ in range(3):
            assert torch.equal(call(x), x.sin() + 1)
            assert torch.equal(torch.func.vmap(call)(x), x.sin() + 1)
    assert (counters["replays"], counters["plain_calls"]) == (2, 3)
    with pytest.raises(InputError, match="requires grad"):
        torch.func.grad(lambda x: call(x).sum())(x)
    assert caplog.text.count("from inside of a transform") == 1
