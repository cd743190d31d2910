"""What messages and reports call the inputs of a graph."""

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from cgpass import torch_private
from cgpass.torch_private.dynamo import named_by_user


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['fn']._modules['0']._parameters['weight']", "0.weight"),
        ("L['self']._modules['layers']._modules['3']._parameters['weight']", "layers.3.weight"),
        ("L['self']._buffers['mask']", "mask"),
        ("L['self'].scale", "self.scale"),
        ("L['self'].model._modules['fc']._parameters['weight']", "self.model.fc.weight"),
        ("L['self']._modules['m'].lst[0]._parameters['weight']", "m.lst[0].weight"),
        ("L['model']._modules['0']._parameters['weight'].grad", "model.0.weight.grad"),
        ("G['GM']._parameters['weight']", "GM.weight"),
        ("G['G']['w']", "G['w']"),
        ("G['__import_package_dot_module'].table", "package.module.table"),
        ("L['x'].size()[0]", "x.size(0)"),
        ("L['x'].stride()[1]", "x.stride(1)"),
        ("L['batch']['ids'][0]", "batch['ids'][0]"),
        ("L['args'][0]", "args[0]"),
        ("L['kwargs']['y']", "kwargs['y']"),
        ("___from_numpy(L['a'])", "a"),
        ("list(dict.keys(L['x']))[0]", "list(dict.keys(x))[0]"),
        ("L['self'].param_groups[0]['params'][0]", "self.param_groups[0]['params'][0]"),
        ("", ""),
    ],
)
def test_a_source_of_dynamo_is_named_as_the_user_names_it(source: str, name: str) -> None:
    assert named_by_user(source) == name


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.ModuleDict({"q_proj": nn.Linear(4, 4, bias=False)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attn["q_proj"](x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4)), nn.Parameter(torch.ones(4))])
        self.scale = torch.ones(4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(
        self, weight: torch.Tensor, *args: torch.Tensor, batch: dict[str, Any], **kwargs: Any
    ) -> torch.Tensor:
        x = weight * self.scale
        for layer, gain in zip(self.layers, self.gains, strict=True):
            x = layer(x) * gain
        return x * self.weight + args[0] + batch["ids"] + kwargs["y"]


def names_of(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> set[str]:
    found: list[list[str]] = []

    def backend(gm: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        del example_inputs
        found.append(torch_private.input_names(gm))
        return gm.forward

    torch.compile(fn, backend=backend, dynamic=False)(*args, **kwargs)
    (only,) = found
    assert len(set(only)) == len(only)
    return set(only)


def test_inputs_of_a_module_are_named_by_its_parameters_and_its_forward() -> None:
    x = [torch.ones(2, 4) for _ in range(4)]
    assert names_of(Model(), x[0], x[1], batch={"ids": x[2]}, y=x[3]) == {
        "weight",  # the argument: the parameter of that name is told from it
        "self.scale",
        "layers.0.attn.q_proj.weight",
        "gains.0",
        "layers.1.attn.q_proj.weight",
        "gains.1",
        "self.weight",
        "args[0]",
        "batch['ids']",
        "kwargs['y']",
    }


TABLE = torch.ones(4)


def test_globals_closures_and_modules_given_as_arguments_keep_their_names() -> None:
    w = torch.ones(4)

    def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(x) * w + TABLE

    model = nn.Sequential(nn.Linear(4, 4, bias=False))
    assert names_of(step, model, torch.ones(2, 4)) == {"model.0.weight", "x", "w", "TABLE"}


def test_gradients_that_a_compiled_optimizer_reads_are_found_in_its_groups() -> None:
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    w.sum().backward()
    found = names_of(functools.partial(optimizer.step))
    assert "self.param_groups[0]['params'][0].grad" in found
