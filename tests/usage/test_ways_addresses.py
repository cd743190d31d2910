"""Ways in which parameters, buffers and other tensors that seem fixed move or change."""

import copy

import pytest
import torch
from torch import nn

from cgpass.errors import StaticInputMovedError
from tests.usage import programs
from tests.usage.programs import MLP, ConvNet, Tied, assert_replays, changed_in_training, sgd_step


def poison(tensor):
    """What is in memory that was freed: whoever reads it there gives wrong numbers."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


def replace_data_and_poison(session, module):
    for p in module.parameters():
        old, p.data = p.data, p.data * 0.5
        poison(old)


def test_data_is_replaced_and_the_old_memory_overwritten(way):
    way.compare(changed_in_training(replace_data_and_poison))


def test_parameters_are_freed_and_reallocated_in_each_others_places(way):
    def change(session, module):
        values = [p.data.clone() for p in module.parameters()]
        for p in module.parameters():
            poison(p.data)
            p.data = torch.empty(0, device=p.device)
        kept = [torch.empty_like(value) for value in values]  # takes what was freed
        for p, value in zip(reversed(list(module.parameters())), reversed(values), strict=True):
            p.data = value.clone()
        for value in kept:
            poison(value)

    way.compare(changed_in_training(change))


def test_storages_are_resized_to_nothing_and_back(way):
    def change(session, module):
        for p in module.parameters():
            value = p.data.clone()
            size = p.untyped_storage().nbytes()
            p.untyped_storage().resize_(0)
            taken = torch.full_like(value, float("nan"))
            p.untyped_storage().resize_(size)
            with torch.no_grad():
                p.copy_(value)
            del taken

    way.compare(changed_in_training(change))


def test_a_state_is_loaded_in_place_and_by_assignment(way):
    def program(session):
        module, call = session.compiled(ConvNet)
        batches = session.batches(2, 3, 8, 8, count=12)
        values, saved = [], copy.deepcopy(module.state_dict())
        for number, batch in enumerate(batches):
            if number == 4:
                module.load_state_dict(saved)
            if number in (6, 9):
                module.load_state_dict(copy.deepcopy(saved), assign=True)
            values += sgd_step(module, call, batch)
        return values

    way.compare(program)


def test_functional_call_with_new_parameters_and_their_gradients(way):
    def program(session):
        module = session.module(MLP)
        call = session.compile(lambda params, x: torch.func.functional_call(module, params, (x,)))
        slow = {name: p.detach().clone() for name, p in module.named_parameters()}
        values = []
        for batch in session.batches(4, 8, count=6):
            params = {name: p.clone().requires_grad_() for name, p in slow.items()}
            for _ in range(2):  # the inner steps of meta learning
                loss = call(params, batch).square().mean()
                grads = torch.autograd.grad(loss, list(params.values()))
                params = {
                    name: (p - 0.1 * g).detach().requires_grad_()
                    for (name, p), g in zip(params.items(), grads, strict=True)
                }
                values += [loss.detach(), *grads]
            slow = {name: slow[name].lerp(params[name].detach(), 0.5) for name in slow}
        return [*values, *slow.values()]

    way.compare(program)


def test_parameters_replaced_by_assignment(way):
    def change(session, module):
        for layer in module.layers:
            if isinstance(layer, nn.Linear):
                layer.weight = nn.Parameter(layer.weight.detach() * 0.5)

    way.compare(changed_in_training(change))


def test_parameters_written_in_place_by_the_user(slow_way):
    def change(session, module):
        first, second = (layer for layer in module.layers if isinstance(layer, nn.Linear))
        with torch.no_grad():
            first.weight.mul_(0.5)
            second.weight.copy_(first.weight)
            first.bias[2:5] = 1
        second.bias.data.zero_()
        nn.init.orthogonal_(first.weight)

    assert_replays(slow_way.compare(changed_in_training(change)))


def test_parameters_swapped_with_their_averages_for_evaluation(way):
    def program(session):
        module, call = session.compiled(MLP)
        averages = [p.detach().clone() for p in module.parameters()]
        values = []

        def swap():
            for p, i in zip(module.parameters(), range(len(averages)), strict=True):
                p.data, averages[i] = averages[i], p.data

        for batch in session.batches(4, 8, count=8):
            values += sgd_step(module, call, batch)
            with torch.no_grad():
                for average, p in zip(averages, module.parameters(), strict=True):
                    average.lerp_(p, 0.1)
            swap()
            with torch.no_grad():
                values.append(call(batch))
            swap()
        return values

    assert_replays(way.compare(program))


def test_two_sets_of_data_take_turns_every_call(way):
    def program(session):
        module, call = session.compiled(MLP)
        sets = [[p.data for p in module.parameters()]]
        sets.append([data * 0.5 for data in sets[0]])
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=16)):
            for p, data in zip(module.parameters(), sets[number % 2], strict=True):
                p.data = data
            values += sgd_step(module, call, batch)
        return values

    assert_replays(way.compare(program))


def test_copies_of_a_module_and_of_its_compiled_form(way):
    def program(session):
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

    counters = way.compare(program)
    assert counters["replays"] > 0, counters


def test_weights_untied_and_tied_again(way):
    def change(session, module):
        if module.head.weight is module.embedding.weight:
            module.head.weight = nn.Parameter(module.embedding.weight.detach() * 2)
        else:
            module.head.weight = module.embedding.weight

    way.compare(changed_in_training(change, Tied, programs.tokens(16, 2, 5)))


def test_buffers_replaced(way):
    def change(session, module):
        for layer in module.body:
            if isinstance(layer, nn.BatchNorm2d):
                old, layer.running_mean = layer.running_mean, layer.running_mean * 0.5
                poison(old)
                layer.register_buffer("running_var", layer.running_var.clone() + 1)

    way.compare(changed_in_training(change, ConvNet, programs.rows(2, 3, 8, 8)))


def test_parameters_frozen_and_thawed(way):
    def change(session, module):
        first = module.layers[0]
        first.requires_grad_(not first.weight.requires_grad)

    way.compare(changed_in_training(change))


def test_a_static_input_that_moves_is_an_error_where_that_is_asked_for(way):
    torch.compiler.reset()
    session = way.session(static_input_check="error")
    module, call = session.compiled(MLP)
    batches = session.batches(4, 8)
    for batch in batches[:4]:
        call(batch).square().mean().backward()
    kept = module.layers[2].bias.data
    module.layers[2].bias.data = kept + 1
    with pytest.raises(StaticInputMovedError, match="bias"):
        call(batches[4])
    module.layers[2].bias.data = kept
    torch.testing.assert_close(call(batches[4]), module(batches[4]))


def replace_all(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def replace_a_parameter(module):
    module.layers[2].bias = nn.Parameter(module.layers[2].bias.detach() + 1)


@pytest.mark.parametrize("replace", [replace_all, replace_a_parameter])
@pytest.mark.parametrize("kept", [True, False], ids=["kept by an optimizer", "gone"])
def test_a_parameter_that_is_replaced_is_an_error_where_that_is_asked_for(way, replace, kept):
    torch.compiler.reset()
    session = way.session(static_input_check="error")
    module, call = session.compiled(MLP)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1) if kept else None
    batch = session.batches(4, 8)[0]
    for _ in range(4):
        call(batch).square().mean().backward()
    replace(module)
    for _ in range(2):
        with pytest.raises(StaticInputMovedError, match=r"replaced since.*bias"):
            call(batch)
    del optimizer


def test_a_parameter_replaced_before_anything_is_recorded_is_no_error(way):
    torch.compiler.reset()
    session = way.session(static_input_check="error")
    module, call = session.compiled(MLP)
    batch = session.batches(4, 8)[0]
    call(batch).square().mean().backward()
    replace_all(module)
    for _ in range(4):
        call(batch).square().mean().backward()
    replace_all(module)
    with pytest.raises(StaticInputMovedError, match=r"replaced since.*bias"):
        call(batch)


def test_another_module_is_no_error_where_replacing_is(way):
    """Nor is one that is made after another one was freed, and whose tensors lie in the same places."""
    torch.compiler.reset()
    session = way.session(static_input_check="error")
    shared = session.compile(lambda module, x: module(x))
    batch = session.batches(4, 8)[0]
    for _ in range(3):
        modules = [session.module(MLP) for _ in range(2)]
        for module in modules * 4:
            torch.testing.assert_close(shared(module, batch), module(batch))
            shared(module, batch).square().mean().backward()


def test_an_adapter_merged_into_its_weight_and_taken_out(way):
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

    def program(session):
        module, call = session.compiled(Adapted)
        values = []
        for batch in session.batches(4, 8, count=8):
            values += sgd_step(module, call, batch)
            change = (module.up.weight @ module.down.weight).detach()
            module.base.weight.data = module.base.weight.data + change
            module.merged = True
            with torch.no_grad():
                values.append(call(batch))
            module.base.weight.data -= change
            module.merged = False
        return values

    way.compare(program)


def test_normed_and_pruned_weights(way):
    def make():
        module = MLP()
        nn.utils.parametrizations.weight_norm(module.layers[0])
        nn.utils.parametrizations.spectral_norm(module.layers[2])
        return module

    assert_replays(way.compare(changed_in_training(lambda session, module: None, make)))


def test_tensors_in_a_closure_and_in_a_list_change(way):
    def program(session):
        scale, tables = session.randn(8), [session.randn(8), session.randn(8)]

        def fn(x):
            return ((x * scale).sin() + tables[0] - tables[1]).exp()

        call = session.compile(fn)
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=12)):
            if number % 3 == 1:
                scale.mul_(0.5)
            if number % 3 == 2:
                old, tables[1] = tables[1], session.randn(8)
                poison(old)
            values.append(call(batch))
        return values

    way.compare(program)


def test_a_buffer_that_the_user_fills_anew_for_every_call(way):
    def program(session):
        _, call = session.compiled(MLP)
        static, values = session.randn(4, 8), []
        with torch.no_grad():
            for batch in session.batches(4, 8, count=10):
                static.copy_(batch)
                values.append(call(static))
        return values

    way.compare(program)


def test_an_input_that_stayed_for_long_moves_and_is_overwritten(way):
    def program(session):
        _, call = session.compiled(MLP)
        x, values = session.randn(4, 8), []
        with torch.no_grad():
            for number in range(30):
                if number % 10 == 9:
                    old, x = x, session.randn(4, 8)
                    poison(old)
                values.append(call(x))
                x.add_(0.1)
        return values

    way.compare(program)


def test_a_tensor_marked_static_is_replaced(way):
    def program(session):
        table = session.randn(8)
        torch._dynamo.mark_static_address(table)
        call = session.compile(lambda x, t: ((x * t).sin() + t).exp())
        values = []
        for number, batch in enumerate(session.batches(4, 8, count=10)):
            if number == 6:
                old, table = table, session.randn(8)
                torch._dynamo.mark_static_address(table)
                poison(old)
            table.mul_(1.1)
            values.append(call(batch, table))
        return values

    way.compare(program)


def test_a_vocabulary_that_grows(way):
    def program(session):
        module, call = session.compiled(Tied)
        values = []
        for number, ids in enumerate(programs.tokens(16, 2, 5)(session, 8)):
            if number == 4:
                old = module.embedding.weight.detach()
                module.embedding.weight = nn.Parameter(torch.cat([old, old[:4] * 0.5]))
                module.head.weight = module.embedding.weight
            values += sgd_step(module, call, ids)
        return values

    way.compare(program)
