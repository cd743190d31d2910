"""What a backward of the callable's own unpacks while it is recorded: just what it gets in eager."""

import pytest
import torch

from tests.graphed.steps import same


class Fused(torch.autograd.Function):
    """Adds the weight's gradient to an attribute of it, as fused gradient accumulation does."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        weight.main_grad.addmm_(grad.t(), x)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return grad @ weight, None
        weight.grad_added_to_main_grad = True
        return grad @ weight, torch.zeros_like(weight)


class FusedLinear(torch.nn.Module):
    def __init__(self, device, *, asks):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.randn(4, 4, device=device))
        self.weight.main_grad = torch.zeros(4, 4, device=device)
        if asks:
            self.weight.grad_added_to_main_grad = False

    def forward(self, x):
        return Fused.apply(x, self.weight)


@pytest.mark.parametrize("asks", [False, True])
def test_fused_gradient_accumulation(setting, asks):
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        module, fired = FusedLinear(setting.device, asks=asks), []
        sample, xs = setting.randn(2, 4, grad=True), [setting.randn(2, 4) for _ in range(3)]
        fn = setting.graphed(module, (sample,), allow_unused_input=not asks) if graphed else module
        module.weight.main_grad.zero_()
        module.weight.register_post_accumulate_grad_hook(fired.append)
        for x in xs:
            x.requires_grad_()
            fn(x).sum().backward()
        found.append((module.weight.main_grad, *[x.grad for x in xs], len(fired)))
    for plain, now in zip(*found, strict=True):
        if isinstance(plain, int):
            assert plain == now == 3
        else:
            same(now, plain)
