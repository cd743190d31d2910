"""Ways in which parameters, buffers and other tensors that seem fixed move or change."""

import contextlib
import copy
from unittest import mock

import pytest
import torch
from torch import nn

from cgpass.errors import StaticInputMovedError
from tests.usage import programs
from tests.usage.programs import ALL, MLP, ConvNet, Tied, Ways, changed_in_training, learn, sgd_step

ways = Ways()


def poison(tensor):
    """What is in memory that was freed: whoever reads it there gives wrong numbers."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


# ---- changes before every third step of a training


def data_replaced_and_the_old_memory_overwritten(session, module):
    for p in module.parameters():
        old, p.data = p.data, p.data * 0.5
        poison(old)


def parameters_freed_and_reallocated_in_each_others_places(session, module):
    values = [p.data.clone() for p in module.parameters()]
    for p in module.parameters():
        poison(p.data)
        p.data = torch.empty(0, device=p.device)
    kept = [torch.empty_like(value) for value in values]  # takes what was freed
    for p, value in zip(reversed(list(module.parameters())), reversed(values), strict=True):
        p.data = value.clone()
    for value in kept:
        poison(value)


def storages_resized_to_nothing_and_back(session, module):
    for p in module.parameters():
        value = p.data.clone()
        size = p.untyped_storage().nbytes()
        p.untyped_storage().resize_(0)
        taken = torch.full_like(value, float("nan"))
        p.untyped_storage().resize_(size)
        with torch.no_grad():
            p.copy_(value)
        del taken


def parameters_assigned(session, module):
    for layer in module.layers[::2]:
        layer.weight = nn.Parameter(layer.weight.detach() * 0.5)


def parameters_frozen_and_thawed(session, module):
    first = module.layers[0]
    first.requires_grad_(not first.weight.requires_grad)


def tensors_swapped(session, module):
    for p in module.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))


def moved(flag):
    def change(session, module):
        with mock.patch.object(torch.__future__, flag, new=True):
            module.to(torch.float64)
            module.to(torch.float32)

    return change


CHANGES = {
    change.__name__: change
    for change in (
        data_replaced_and_the_old_memory_overwritten,
        parameters_freed_and_reallocated_in_each_others_places,
        storages_resized_to_nothing_and_back,
        parameters_assigned,
        parameters_frozen_and_thawed,
        tensors_swapped,
    )
} | {
    "moved with new parameters": moved("_overwrite_module_params_on_conversion"),
    "moved with swapping": moved("_swap_module_params_on_conversion"),
}
ways.add(
    {name: changed_in_training(change) for name, change in CHANGES.items()},
    replays="some",
)


def parameters_written_in_place(session, module):
    first, second = module.layers[::2]
    with torch.no_grad():
        first.weight.mul_(0.5)
        second.weight.copy_(first.weight)
        first.bias[2:5] = 1
    second.bias.data.zero_()
    nn.init.orthogonal_(first.weight)


def weights_untied_and_tied_again(session, module):
    if module.head.weight is module.embedding.weight:
        module.head.weight = nn.Parameter(module.embedding.weight.detach() * 2)
    else:
        module.head.weight = module.embedding.weight


def buffers_replaced(session, module):
    for layer in module.body:
        if isinstance(layer, nn.BatchNorm2d):
            old, layer.running_mean = layer.running_mean, layer.running_mean * 0.5
            poison(old)
            layer.register_buffer("running_var", layer.running_var.clone() + 1)


def normed():
    module = MLP()
    nn.utils.parametrizations.weight_norm(module.layers[0])
    nn.utils.parametrizations.spectral_norm(module.layers[2])
    return module


ways.add(
    {"parameters written in place": changed_in_training(parameters_written_in_place)},
    settings=ALL,
)
ways.add({"normed weights": changed_in_training(lambda session, module: None, normed)})
ways.add(
    {
        "weights untied and tied again": changed_in_training(
            weights_untied_and_tied_again, Tied, programs.tokens(16, 2, 5)
        ),
        "buffers replaced": changed_in_training(
            buffers_replaced, ConvNet, programs.rows(2, 3, 8, 8)
        ),
    },
    replays="some",
)


# ---- changes of other kinds


@ways(replays="some")
def modules_moved_to_another_dtype_and_back(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        dtype = torch.float64 if number // 3 % 2 else torch.float32
        module.to(dtype)
        yield sgd_step(module, call, batch.to(dtype))


@ways(replays="some")
def copies_of_a_module_and_of_its_compiled_form(session):
    module, call = session.compiled(MLP)
    batches = session.batches(4, 8, count=4)
    values = sgd_step(module, call, batches[0]) + sgd_step(module, call, batches[1])
    other = copy.deepcopy(call)  # as it is now, with weights of its own
    separate = copy.deepcopy(module)
    fresh = session.compile(separate)
    for batch in batches:
        for its_module, its_call in ((module, call), (other, other), (separate, fresh)):
            values += sgd_step(its_module, its_call, batch)
    return values


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(8, 8)
        self.base.requires_grad_(False)
        self.down = nn.Linear(8, 2, bias=False)
        self.up = nn.Linear(2, 8, bias=False)
        self.merged = False

    def forward(self, x):
        out = self.base(x).sin()
        return out if self.merged else out + self.up(self.down(x))


@ways(replays="some")
def an_adapter_merged_into_its_weight_and_taken_out(session):
    module, call = session.compiled(Adapted)
    for batch in session.batches(4, 8, count=8):
        yield sgd_step(module, call, batch)
        change = (module.up.weight @ module.down.weight).detach()
        module.base.weight.data = module.base.weight.data + change
        module.merged = True
        with torch.no_grad():
            yield [call(batch)]
        module.base.weight.data -= change
        module.merged = False


@ways(replays="some")
def tensors_in_a_closure_and_in_a_list_change(session):
    scale, tables = session.randn(8), [session.randn(8), session.randn(8)]
    call = session.compile(lambda x: ((x * scale).sin() + tables[0] - tables[1]).exp())
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        if number % 3 == 1:
            scale.mul_(0.5)
        if number % 3 == 2:
            old, tables[1] = tables[1], session.randn(8)
            poison(old)
        yield [call(batch)]


@ways(replays="some")
def an_input_that_is_filled_anew_for_every_call_and_then_moves(session):
    _, call = session.compiled(MLP)
    static = session.randn(4, 8)
    with torch.no_grad():
        for number, batch in enumerate(session.batches(4, 8, count=30)):
            if number % 10 == 9:
                old, static = static, session.randn(4, 8)
                poison(old)
            static.copy_(batch)
            yield [call(static)]


@ways(replays="some")
def a_tensor_marked_static_is_replaced(session):
    table = session.randn(8)
    torch._dynamo.mark_static_address(table)
    call = session.compile(lambda x, t: ((x * t).sin() + t).exp())
    for number, batch in enumerate(session.batches(4, 8, count=10)):
        if number == 6:
            old, table = table, session.randn(8)
            torch._dynamo.mark_static_address(table)
            poison(old)
        table.mul_(1.1)
        yield [call(batch, table)]


@ways(replays="some")
def a_vocabulary_that_grows(session):
    module, call = session.compiled(Tied)
    for number, ids in enumerate(programs.tokens(16, 2, 5)(session, 8)):
        if number == 4:
            old = module.embedding.weight.detach()
            module.embedding.weight = nn.Parameter(torch.cat([old, old[:4] * 0.5]))
            module.head.weight = module.embedding.weight
        yield sgd_step(module, call, ids)


# ---- what is another tensor in every single call


class Recurrent(nn.Module):
    """Keeps its state in a buffer that is another tensor after every call."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("state", torch.zeros(2, 8))

    def forward(self, x):
        self.state = torch.tanh(self.linear(x) + self.state.detach())
        return self.state * 2


@ways(counts={"warmups": 2, "recordings": 1, "replays": 58})
def a_buffer_is_replaced_in_the_forward(session):
    module, call = session.compiled(lambda: Recurrent().requires_grad_(False))
    for batch in session.batches(2, 8, count=60):
        yield [call(batch).clone(), module.state.clone()]


@ways(most={"recordings": 2, "warmups": 4})
def a_buffer_is_replaced_in_the_forward_and_every_value_kept(session):
    module, call = session.compiled(lambda: Recurrent().requires_grad_(False))
    for batch in session.batches(2, 8, count=60):
        call(batch)
        yield [module.state]


@ways(replays="none", most={"recordings": 1})
def a_state_that_is_assigned_in_every_call_and_kept(session):
    """Another module's parameters, or these at a new place? Either way nothing is recorded for one of them."""
    module, call = session.compiled(MLP)
    states = [{k: v * 1.01 for k, v in module.state_dict().items()} for _ in range(60)]
    with torch.no_grad():
        for state, batch in zip(states, session.batches(4, 8, count=60), strict=True):
            module.load_state_dict(state, assign=True)
            yield [call(batch).clone()]


@ways(most={"recordings": 4, "warmups": 5})
def data_of_every_parameter_is_new_in_every_step(session):
    """As where weights are brought to the device for each step."""
    module, call = session.compiled(MLP)
    kept = []
    for batch in session.batches(4, 8, count=60):
        for parameter in module.parameters():
            kept.append(parameter.data)
            parameter.data = parameter.data.clone()
        yield learn(module, call(batch).square().mean())


@ways.everywhere
def test_ways_to_move(way, program):
    program.check(way)


def test_a_state_is_loaded_in_place_and_by_assignment(way):
    def program(session):
        module, call = session.compiled(ConvNet)
        saved = copy.deepcopy(module.state_dict())
        for number, batch in enumerate(session.batches(2, 3, 8, 8, count=12)):
            if number == 4:
                module.load_state_dict(saved)
            if number in (6, 9):
                module.load_state_dict(copy.deepcopy(saved), assign=True)
            yield sgd_step(module, call, batch)

    way.compare(program)


def test_modules_that_are_new_in_every_call_and_kept_are_warned_of(way, caplog):
    def program(session):
        first = session.module(MLP)
        modules = [copy.deepcopy(first) for _ in range(150)]
        with torch.no_grad():
            for module, batch in zip(modules, session.batches(4, 8, count=150), strict=True):
                yield [session.compile(module)(batch).clone()]

    way.compare(program)
    assert len(caplog.records) == 1, caplog.text
    assert "layers.0.weight" in caplog.text


# ---- static_input_check="error"


def replace_all(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def replace_a_parameter(module):
    module.layers[2].bias = nn.Parameter(module.layers[2].bias.detach() + 1)


@pytest.mark.parametrize("replace", [replace_all, replace_a_parameter])
@pytest.mark.parametrize("kept", [True, False], ids=["kept by an optimizer", "gone"])
def test_a_parameter_that_is_replaced_is_an_error_where_that_is_asked_for(way, replace, kept):
    """Once something was recorded with it."""
    session = way.session(static_input_check="error")
    module, call = session.compiled(MLP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if kept else None
    batch = session.randn(4, 8)
    call(batch).square().mean().backward()
    replace_all(module)
    for _ in range(4):
        call(batch).square().mean().backward()
    replace(module)
    for _ in range(2):
        with pytest.raises(StaticInputMovedError, match=r"replaced since.*bias"):
            call(batch)
    del optimizer


@pytest.mark.parametrize("training", [True, False])
def test_another_module_is_no_error_where_replacing_is(way, training):
    """Nor is one that is made after another one was freed, and whose tensors lie in the same places."""
    session = way.session(static_input_check="error")
    shared = session.compile(lambda module, x: module(x))
    batch = session.randn(4, 8)
    with contextlib.nullcontext() if training else torch.no_grad():
        for _ in range(3):
            modules = [session.module(MLP) for _ in range(2)]
            for module in modules * 4:
                out = shared(module, batch)
                torch.testing.assert_close(out, module(batch))
                if training:
                    out.square().mean().backward()
        weight = modules[0].layers[0].weight
        kept = weight.data
        weight.data = kept.clone()
        with pytest.raises(StaticInputMovedError, match="weight"):
            shared(modules[0], batch)
        weight.data = kept
        torch.testing.assert_close(shared(modules[0], batch), modules[0](batch))
