"""Programs of PyTorch's issue tracker in which CUDA graphs failed: a program is named after its number."""

import torch
from torch import nn

from tests.usage.programs import ALL, MLP, Ways, gradients, state

ways = Ways()


@ways(settings=ALL)
def issue_96693_accumulated_gradients(session):
    """Four microbatches whose bias gradients add up to one."""
    module, call = session.compiled(lambda: nn.Sequential(MLP(), nn.Linear(8, 1)))
    for _ in range(4):
        for batch in session.batches(4, 8, count=4):
            (call(batch).mean() / 4).backward()
        assert module[1].bias.grad.item() == 1.0
        yield gradients(module)
        module.zero_grad()


@ways(most={"recordings": 6})
def issue_182531_addresses_that_take_turns_are_recorded_once_each(session):
    module, call = session.compiled(MLP)
    sets = [[p.data * factor for p in module.parameters()] for factor in (1.0, 0.5, 2.0)]
    with torch.no_grad():
        for number, batch in enumerate(session.batches(4, 8, count=24)):
            for p, data in zip(module.parameters(), sets[number % 3], strict=True):
                p.data = data
            yield [call(batch)]


@ways(replays="some", on_skip="silent")
def issue_183313_a_weight_replaced_through_data_in_the_forward(session):
    class Standardised(nn.Conv2d):
        def forward(self, x):
            w = self.weight
            self.weight.data = (w - w.mean()) / (w.std() + 1e-5)
            return super().forward(x).relu()

    module, call = session.compiled(lambda: Standardised(3, 4, 3))
    for batch in session.batches(2, 3, 6, 6):
        with torch.no_grad():
            out = call(batch)
        yield [out, *state(module)]


@ways(replays="some")
def issue_188755_a_result_marked_static(session):
    table = session.randn(4, 8)
    torch._dynamo.mark_static_address(table)

    def fn(x):
        table.mul_(0.5).add_(x)
        return table, (table * x).sin()

    call = session.compile(fn)
    for batch in session.batches(4, 8):
        same, out = call(batch)
        assert same.data_ptr() == table.data_ptr()
        yield [same.clone(), out]


@ways(most={"recordings": 12})
def issue_191369_results_of_one_function_change_places_in_the_next(session):
    make = session.compile(lambda x: tuple((x * n).sin().cos() for n in (1, 2, 3)))
    use = session.compile(lambda a, b: (a * 2 - b).exp().cos())
    for number in range(18):
        parts = make(session.randn(4, 8))
        yield [use(parts[number % 3], parts[(number + 1) % 3])]


@ways.everywhere
def test_issues(way, program):
    program.check(way)
