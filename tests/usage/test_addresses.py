"""Addresses may change: each set of addresses has its recording, and new places are copied once."""

import contextlib
import copy
import functools
import random

import pytest
import torch
from torch import nn

import cgpass
from cgpass import torch_private
from cgpass.errors import StaticInputMovedError
from tests.usage import programs
from tests.usage.programs import MLP, Tied, Ways, assert_replays, learn, sgd, trained
from tests.usage.test_programs_settle import check


def assigned_states(session):
    module, call = session.compiled(MLP)
    states = [{k: v * factor for k, v in module.state_dict().items()} for factor in (1.0, 0.5)]
    kept = []  # one that is gone may leave its id to one that counts as moved then
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        kept += module.parameters()
        module.load_state_dict(states[number // 2 % 2], assign=True)
        yield learn(module, call(batch).square().mean())


def test_a_known_set_of_parameters_replays_at_once(setting):
    counters = setting.compare(assigned_states)
    assert (counters["recordings"], counters["rerecordings"]) == (4, 0), counters
    assert_replays(counters)


def moved_in_every_call(session):
    module, call = session.compiled(MLP)
    kept = []
    with torch.no_grad():
        for batch in session.batches(4, 8, count=12):
            for parameter in module.parameters():
                kept.append(parameter.data)
                parameter.data = parameter.data * 0.99
            yield [call(batch)]


def test_what_moves_in_every_call_is_copied_for_good(setting, caplog):
    counters = setting.compare(moved_in_every_call)
    assert (counters["warmups"], counters["plain_calls"]) == (2, 0), counters
    assert counters["recordings"] == 1, counters
    assert not caplog.records


def body_replaced(session, times=1, **options):
    """The backward of a frozen body reads none of its parameters."""
    module, call = session.compiled(MLP, **options)
    module.layers[0].requires_grad_(False)
    for number, batch in enumerate(session.batches(4, 8, count=5 + 5 * times)):
        if number and number % 5 == 0:
            module.layers[0].weight.data = module.layers[0].weight.data * 0.5
        yield learn(module, call(batch).square().mean())


def test_a_parameter_that_is_replaced_costs_a_warm_up_of_each_partition(setting):
    with cgpass.explain() as report:
        counters = setting.compare(body_replaced)
    assert (counters["warmups"], counters["plain_calls"]) == (4, 0), counters
    notes = [each.recordings for each in report.partitions]
    assert [[n.cause for n in each] for each in notes] == [["first", "moved"], ["first", "memory"]]
    assert "values of other partitions moved, or were recorded again: " in notes[1][-1].detail


def test_recordings_for_values_of_recordings_that_are_gone_go_too(setting):
    program = functools.partial(body_replaced, times=4)
    counters = setting.compare(program, max_recordings=2)
    assert counters["plain_calls"] == 0, counters


def moved_in_every_other_call(session, *, replaced):
    """As by SAM, whose second step puts back what the first one moved, and by weights that are lent for an evaluation."""
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=30)):
        if number % 2 == 0:
            for each in module.layers[::2]:
                if replaced:
                    each.weight = nn.Parameter(each.weight.detach() * 0.9)
                else:
                    each.weight.data = each.weight.data * 0.9
        yield learn(module, call(batch).square().mean())


@pytest.mark.parametrize("replaced", [False, True])
def test_what_moves_in_every_other_call_is_copied_for_good(setting, replaced):
    program = functools.partial(moved_in_every_other_call, replaced=replaced)
    counters = setting.compare(program)
    assert counters["warmups"] <= 8 >= counters["recordings"], counters
    assert counters["plain_calls"] == 0, counters


ways = Ways()


def poison(tensor):
    """Fill memory that is freed: whoever reads it there gives wrong numbers."""
    with torch.no_grad():
        tensor.fill_(float("nan") if tensor.is_floating_point() else -1)


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


def tensors_swapped(session, module):
    for p in module.parameters():
        torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.5))


CHANGES = (
    data_replaced_and_the_old_memory_overwritten,
    parameters_freed_and_reallocated_in_each_others_places,
    storages_resized_to_nothing_and_back,
    tensors_swapped,
)


def replace_all(module):
    module.load_state_dict({k: v.clone() for k, v in module.state_dict().items()}, assign=True)


def weights_untied_and_tied_again(session, module):
    if module.head.weight is module.embedding.weight:
        module.head.weight = nn.Parameter(module.embedding.weight.detach() * 2)
    else:
        module.head.weight = module.embedding.weight


tied = trained(Tied, programs.tokens(16, 2, 5), change=weights_untied_and_tied_again, count=12)
ways.add(
    {change.__name__: trained(MLP, change=change, count=12) for change in CHANGES}
    | {"weights untied and tied again": tied},
    replays="some",
)
# as the guide to performance says
ways.add(
    {
        "data replaced unguarded": trained(MLP, change=CHANGES[0], count=12),
        "state assigned unguarded": trained(MLP, change=lambda _, module: replace_all(module)),
    },
    replays="some",
    guard_filter_fn=torch.compiler.skip_guard_on_all_nn_modules_unsafe,
)


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
def a_parameter_is_laid_out_otherwise_where_it_lies(session):
    """No guard of torch 2.11 notices."""
    module, call = session.compiled(lambda: nn.Linear(8, 8))
    for number, batch in enumerate(session.batches(4, 8, count=10)):
        if number == 5 and session.options["compiler"] == "eager":  # Inductor's code refuses it
            module.weight.data = module.weight.data.t()
        yield learn(module, call(batch).square().mean())


@ways(replays="none", most={"recordings": 1})
def a_state_that_is_assigned_in_every_call_and_kept(session):
    """Another module's parameters, or these at a new place? Either way nothing is recorded for one of them."""
    module, call = session.compiled(MLP)
    states = [{k: v * 1.01 for k, v in module.state_dict().items()} for _ in range(60)]
    with torch.no_grad():
        for state, batch in zip(states, session.batches(4, 8, count=60), strict=True):
            module.load_state_dict(state, assign=True)
            yield [call(batch).clone()]


@ways.everywhere
def test_ways_to_move(way, program):
    program.check(way)


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


def replace_a_parameter(module):
    module.layers[2].bias = nn.Parameter(module.layers[2].bias.detach() + 1)


@pytest.mark.parametrize("replace", [replace_all, replace_a_parameter])
def test_a_parameter_that_is_replaced_is_an_error_where_that_is_asked_for(way, replace):
    """Once something was recorded with it."""
    session = way.session(static_input_check="error")
    module, call = session.compiled(MLP)
    batch = session.randn(4, 8)
    call(batch).square().mean().backward()
    replace_all(module)
    for _ in range(4):
        call(batch).square().mean().backward()
    replace(module)
    for _ in range(2):
        with pytest.raises(StaticInputMovedError, match=r"replaced since.*bias"):
            call(batch)


@pytest.mark.parametrize("training", [True, False])
def test_another_module_is_no_error_where_replacing_is(way, training):
    session = way.session(static_input_check="error")
    shared = session.compile(lambda module, x: module(x))
    batch = session.randn(4, 8)
    with contextlib.nullcontext() if training else torch.no_grad():
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


def test_a_call_whose_own_input_is_moved_to_make_room_is_not_recorded_at_its_old_place(setting):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.a = nn.Parameter(torch.linspace(0.5, 1.5, 6))
            self.b = nn.Parameter(torch.linspace(1.0, 2.0, 6))

        def forward(self, x):
            q = (x * self.a).sin().exp()
            k = torch.nonzero(q > 1.0).sum()
            return ((q + k).sin() * self.b).cos(), q

    def program(session):
        module, call = session.compiled(Model, dynamic=False)
        first, other, b = module.a.data, module.a.data * 0.5, module.b.data
        with torch.no_grad():
            for number in range(10):
                if number == 3:
                    module.a.data = other
                if number == 6:
                    module.a.data = first
                    module.b.data = b.clone()
                yield [t.clone() for t in call(session.randn(3, 6))]

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        setting.compare(program, min_partition_ops=1, on_skip="silent")


class Large(nn.Module):
    """Has a weight of 1.2 MiB between small ones."""

    def __init__(self):
        super().__init__()
        self.first, self.large, self.last = nn.Linear(8, 320), nn.Linear(320, 1000), MLP(1000, 1)

    def forward(self, x):
        return self.last(torch.tanh(self.large(self.first(x))))


def test_a_large_parameter_that_is_new_in_every_call_runs_without_a_graph(way, caplog):
    def program(session):
        module, call = session.compiled(lambda: Large().requires_grad_(False))
        for _ in range(20):
            module.large.weight = nn.Parameter(module.large.weight * 0.9, requires_grad=False)
            yield [call(session.randn(4, 8)).clone()]

    counters = way.compare(program, max_copied_mib=1)
    (message,) = caplog.messages
    assert "large.weight (float32[1000, 320], read at " in message
    assert "in forward: return self.last(torch.tanh(self.large(self.first(x)))))" in message
    assert "too large to be copied (max_copied_mib=1)" in message
    assert (counters["replays"], counters["recordings"]) == (0, 0), counters


def made_anew(memory):
    """A tensor in memory that was another one's."""
    storage = torch_private.storage_at(memory.data_ptr(), memory.nbytes, memory.device)
    return torch_private.on_storage(storage, memory)


def buffer_that_is_made_anew(session):
    module, call = session.compiled(lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)))
    norm, memories, order = module[1], session.batches(8), random.Random(0)
    while True:
        norm.running_mean = None
        norm.running_mean = made_anew(order.choice(memories))
        with torch.no_grad():
            yield [call(session.randn(4, 8)), norm.running_mean, *memories]


def data_swapped_in_every_step(session):
    module, call = session.compiled(lambda: nn.Linear(8, 8))
    memories, order = session.batches(8, 8), random.Random(0)
    while True:
        module.weight.data = made_anew(order.choice(memories))
        loss = call(session.randn(4, 8)).square().mean()
        yield learn(module, loss, sgd(module)) + memories


@pytest.mark.parametrize(
    ("program", "most"), [(buffer_that_is_made_anew, 2), (data_swapped_in_every_step, 4)]
)
def test_what_comes_to_lie_at_recycled_addresses_is_copied(setting, program, most):
    """Also where the one before it lay, or one long ago."""
    counters = check(setting, program, steps=200, settled=8)
    assert counters["recordings"] <= most, counters
