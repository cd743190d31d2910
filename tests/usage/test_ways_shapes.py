"""Ways in which shapes and numbers vary from call to call."""

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import MLP, Block, assert_replays


class Wide(MLP):
    def __init__(self):
        super().__init__(width=16)


def lengths_trained(make, shapes, **kwargs):
    def program(session):
        module, call = session.compiled(make, **kwargs)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        values = []
        for shape in shapes:
            out = call(session.randn(*shape))
            out.square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            values.append(out.detach())
        return values + programs.state(module)

    return program


BY_LENGTH = [(2, n, 16) for n in (5, 7, 9, 5, 9, 7, 7, 5)]
BY_BOTH = [(b, n, 16) for b, n in ((2, 5), (3, 7), (4, 5), (2, 5), (4, 5), (3, 7), (2, 7), (3, 7))]


@pytest.mark.parametrize(
    ("make", "shapes"), [(Block, BY_LENGTH), (Wide, BY_BOTH)], ids=["length", "batch and length"]
)
def test_sequences_of_any_length(way, make, shapes):
    assert_replays(way.compare(lengths_trained(make, shapes, dynamic=True)))


def test_sequences_of_any_length_found_out(way):
    assert_replays(way.compare(lengths_trained(Wide, BY_LENGTH)))


def test_lengths_that_are_compiled_one_by_one(way):
    assert_replays(
        way.compare(lengths_trained(MLP, [(n, 8) for n in (3, 4, 3, 4, 5, 3, 5)], dynamic=False))
    )


def test_a_dimension_marked_dynamic(way):
    def program(session):
        _, call = session.compiled(MLP)
        values = []
        with torch.no_grad():
            for size in (4, 6, 5, 4, 6, 5, 4):
                x = session.randn(size, 8)
                torch._dynamo.mark_dynamic(x, 0)
                values.append(call(x))
        return values

    assert_replays(way.compare(program))


def test_a_last_batch_that_is_smaller_every_epoch(slow_way):
    def program(session):
        module, call = session.compiled(MLP)
        data, values = session.randn(14, 8), []
        for _ in range(4):
            for batch in data.split(4):  # as in other tests that build Inductor's kernels of it
                out = call(batch)
                out.square().mean().backward()
                values += [out.detach(), *programs.gradients(module)]
                module.zero_grad()
        return values

    assert_replays(slow_way.compare(program))


def test_a_sequence_that_grows_by_what_was_returned(way):
    def program(session):
        _, call = session.compiled(Wide, dynamic=True)
        tokens, values = session.randn(1, 3, 16), []
        with torch.no_grad():
            for _ in range(10):
                out = call(tokens)
                tokens = torch.cat([tokens, out[:, -1:]], dim=1)
                values.append(out)
        return [*values, tokens]

    way.compare(program)


def test_forwards_of_several_lengths_pending(way):
    def program(session):
        module, call = session.compiled(Wide, dynamic=True)
        values = []
        for sizes in ((5, 7, 9), (9, 5, 7), (7, 7, 5), (5, 9, 9)):
            outs = [call(session.randn(2, n, 16)) for n in sizes]
            for out in reversed(outs):
                out.square().mean().backward()
            values += [out.detach() for out in outs] + programs.gradients(module)
            module.zero_grad()
        return values

    way.compare(program)


def test_sizes_of_one_and_two(way):
    shapes = [(n, 8) for n in (4, 1, 2, 1, 4)]
    way.compare(lengths_trained(MLP, shapes))
    way.compare(lengths_trained(MLP, shapes, dynamic=True))


def test_results_whose_size_follows_from_the_input(way):
    def program(session):
        def fn(x, n):
            y = x.sin().repeat(n, 1)
            steps = torch.arange(x.shape[0], device=x.device)
            return y.cos(), y.sum(0), x.shape[0] * 2, steps * 2.5, y.new_zeros(x.shape[0] + n)

        call = session.compile(fn, dynamic=True)
        values = []
        for size, n in ((4, 2), (6, 3), (4, 3), (4, 2), (6, 3), (6, 2), (4, 3)):
            values += call(session.randn(size, 8), n)
        return values

    way.compare(program)


def test_numbers_that_change_with_dynamic_shapes(way):
    def program(session):
        def fn(x, scale, count):
            return ((x * scale).sin() + count).cos()[: x.shape[0] - 1] / count

        call = session.compile(fn, dynamic=True)
        values = []
        for scale, count in ((0.5, 2), (0.25, 3), (0.5, 3), (0.125, 2), (0.5, 2), (1.0, 7)):
            values.append(call(session.randn(5, 8), scale, count))
        return values

    way.compare(program)


def test_lists_of_any_length(way):
    def program(session):
        call = session.compile(lambda tensors: torch.stack([t.sin() for t in tensors]).sum(0).cos())
        return [call(session.batches(4, 8, count=n)) for n in (1, 2, 3, 2, 1, 3, 3, 2)]

    way.compare(program)


def test_padding_to_the_longest_of_a_batch(way):
    class Padded(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(16, 16, padding_idx=0)
            self.block = Wide()

        def forward(self, ids, lengths):
            mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
            out = self.block(self.embedding(ids)) * mask[..., None]
            return out.sum(1) / lengths[:, None]

    def program(session):
        module, call = session.compiled(Padded)
        values = []
        for lengths in ((5, 3), (7, 2), (4, 4), (6, 5), (7, 7), (5, 1), (4, 2), (6, 6)):
            rows = [programs.tokens(16, n)(session, 1)[0] for n in lengths]
            ids = nn.utils.rnn.pad_sequence(rows, batch_first=True)
            out = call(ids, session.tensor(lengths))
            out.square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


def test_pictures_of_several_sizes(way):
    def program(session):
        module = session.module(
            lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.GELU(), nn.Conv2d(4, 4, 3))
        )
        call = session.compile(module)
        values = []
        for side in (8, 10, 12, 8, 12, 10, 8):
            out = call(session.randn(2, 3, side, side))
            out.square().mean().backward()
            values += [out.detach(), *programs.gradients(module)]
            module.zero_grad()
        return values

    way.compare(program)


def test_few_recordings_allowed_and_lengths_in_any_order(way, caplog):
    program = lengths_trained(MLP, [(n, 8) for n in (5, 7, 9, 5, 9, 7, 11) * 3], dynamic=True)
    with caplog.at_level("WARNING", "cgpass"):
        counters = way.compare(program, max_recordings=2)
    assert counters["plain_calls"] > 0, counters
    assert any("max_recordings=2" in record.getMessage() for record in caplog.records)
