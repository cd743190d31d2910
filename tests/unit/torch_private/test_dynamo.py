"""Names of inputs in messages and reports."""

import functools

import pytest
import torch
from torch import nn

import cgpass
from cgpass import torch_private
from cgpass.torch_private.dynamo import named_by_user


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("L['fn']._modules['0']._parameters['weight']", "0.weight"),
        ("L['self']._buffers['mask']", "mask"),
        ("L['fn'].__self__._parameters['weight']", "weight"),
        ("L['self'].scale", "self.scale"),
        ("L['model']._modules['0']._parameters['weight'].grad", "model.0.weight.grad"),
        ("G['GM']._parameters['weight']", "GM.weight"),
        ("G['G']['w']", "G['w']"),
        ("G['__import_package_dot_module'].table", "package.module.table"),
        ("L['x'].size()[0]", "x.size(0)"),
        ("L['fn'].__closure__[0].cell_contents._modules['0']._parameters['bias']", "0.bias"),
        ("L['fn'].__closure__[0].cell_contents.__closure__[1].cell_contents.table", "table"),
        ("L['self'].f.__closure__[0].cell_contents._modules['net']._buffers['x']", "net.x"),
        ("L['batch']['ids'][0]", "batch['ids'][0]"),
        ("L['kwargs']['y']", "kwargs['y']"),
        ("___from_numpy(L['a'])", "a"),
        ("list(dict.keys(L['x']))[0]", "list(dict.keys(x))[0]"),
        ("L['self'].param_groups[0]['params'][0]", "self.param_groups[0]['params'][0]"),
        (
            "L['self'].state[list(dict.keys(L['self'].state))[1]]['step']",
            "self.state[key 1]['step']",
        ),
        (
            "L['s'][list(dict.keys(L['s']))[0]][list(dict.keys(L['s'][list(dict.keys(L['s']))[0]]))[2]]",
            "s[key 0][key 2]",
        ),
        ("", ""),
    ],
)
def test_a_source_of_dynamo_is_named_as_the_user_names_it(source, name):
    assert named_by_user(source) == name


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"q_proj": nn.Linear(4, 4, bias=False)})])
        self.gains = nn.ParameterList([nn.Parameter(torch.ones(4))])
        self.scale = torch.ones(4)
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, weight, *args, batch, **kwargs):
        x = self.layers[0]["q_proj"](weight * self.scale) * self.gains[0]
        return x * self.weight + args[0] + batch["ids"] + kwargs["y"]


def names_of(fn, *args, **kwargs):
    found = []

    def backend(gm, example_inputs):
        found.append([*torch_private.input_names(gm).values()])
        return gm.forward

    torch.compile(fn, backend=backend, dynamic=False)(*args, **kwargs)
    (only,) = found
    assert len(set(only)) == len(only)
    return set(only)


def test_inputs_of_a_module_are_named_by_its_parameters_and_its_forward():
    x = [torch.ones(2, 4) for _ in range(4)]
    assert names_of(Model(), x[0], x[1], batch={"ids": x[2]}, y=x[3]) == {
        "weight",  # the argument: the parameter of that name is told from it
        "self.scale",
        "layers.0.q_proj.weight",
        "gains.0",
        "self.weight",
        "args[0]",
        "batch['ids']",
        "kwargs['y']",
    }


def test_gradients_that_a_compiled_optimizer_reads_are_found_in_its_groups():
    w = nn.Parameter(torch.ones(4))
    optimizer = torch.optim.SGD([w], lr=0.1)
    w.sum().backward()
    found = names_of(functools.partial(optimizer.step))
    assert "self.param_groups[0]['params'][0].grad" in found


def partition_of(fn, *args, calls=4):
    options = {"driver": "simulated", "compiler": "eager"}
    call = torch.compile(fn, backend="cgpass", options=options)
    with cgpass.explain() as report:
        for _ in range(calls):
            call(*args)
    (partition,) = report.partitions
    return partition


def test_a_compiled_optimizer_reads_what_it_holds_where_it_lies():
    """Its parameters and their states were copied there and back in each replay, by names as arg0_1."""
    params = [nn.Parameter(torch.ones(8)) for _ in range(2)]
    optimizer = torch.optim.Adam(params, lr=torch.tensor(0.1))
    for each in params:
        each.grad = torch.ones(8)
    partition = partition_of(functools.partial(optimizer.step))
    assert partition.static_inputs == 8
    names = {each.name for each in partition.copied_inputs}
    assert names <= {
        "self.param_groups[0]['params'][0].grad",
        "self.param_groups[0]['params'][1].grad",
        "self.param_groups[0]['lr']",
    }


def test_what_several_inputs_view_is_named_by_one_of_them():
    def fn(x, y):
        x.add_(1)
        y.mul_(2)
        return y.sin().cos().exp()

    base = torch.zeros(8, 8)
    partition = partition_of(fn, base[:4], base[2:])
    assert [each.name for each in partition.copied_inputs] == ["x._base"]
