"""Ways to hand in tensors: changed ones, shared ones, of any layout, size, dtype and kind, call after call."""

import dataclasses
import math

import pytest
import torch
from torch import nn

from tests.usage import programs
from tests.usage.programs import (
    ALL,
    MLP,
    Block,
    ConvNet,
    Ways,
    called_with,
    gradients,
    learn,
    long_enough,
    state,
)

ways = Ways()

# ---- changed inputs


@ways(replays="some")
def batch_norm_counts_under_no_grad_and_keeps_its_buffers(session):
    module, call = session.compiled(ConvNet)
    for number, batch in enumerate(session.batches(2, 3, 8, 8, count=9)):
        with torch.set_grad_enabled(number % 2 == 0):
            out = call(batch)
        yield [out.detach(), *state(module)]
        if number == 5:
            module.body[1].reset_running_stats()


@ways()
def an_input_changed_by_the_graph_and_by_the_user_between_calls(session):
    def fn(x, state):
        state.mul_(0.9).add_(x.sum(0))
        return (state * x).sin()

    call, state = session.compile(fn), session.randn(8)
    for number, batch in enumerate(session.batches(4, 8, count=9)):
        yield [call(batch, state), state.clone()]
        if number % 3 == 2:
            state.zero_()
        if number == 4:
            state = session.randn(8)


@ways(replays="some")
def an_input_changed_without_gradient_that_needs_one_elsewhere(session):
    def fn(x, weight):
        with torch.no_grad():
            weight.mul_(0.9)
        return (x @ weight).sin().cos()

    call, weight = session.compile(fn), session.randn(8, 8).requires_grad_()
    for batch in session.batches(4, 8):
        call(batch, weight).sum().backward()
        yield [weight.detach().clone(), weight.grad.clone()]


def written_in_part_and_given_other_strides(x, y):
    x[1:3, ::2] = y[0, 0]
    y.t_()
    return (x.sum() + y).sin().cos()


def intermediate_result_changed_and_returned_before_and_after(x):
    y = x.sin() + 1
    before = y.clone()
    y.mul_(2)
    y[0] = before[1]
    return before, y, y.cos()


def rows(session):
    return (session.randn(4, 8),)


# ---- inputs that share memory


def overlapping(session):
    base = session.randn(6, 8)
    return base[:4], base[2:]


def reads_both(a, b):
    return (a.sin() * 2 - b.cos()) * (a + b)


def writes_the_first(a, b):
    a.mul_(2).add_(1)
    return (b.sin() + 1).cos() + a


ways.add(
    {
        "changed intermediate result": called_with(
            intermediate_result_changed_and_returned_before_and_after, rows
        ),
        "views that overlap": called_with(reads_both, overlapping),
        "windows that overlap themselves": called_with(
            lambda windows: (windows.sin() * 2 + windows.sum(-1, keepdim=True)).cos(),
            lambda session: (session.randn(12).unfold(0, 4, 2),),
        ),
    }
)
ways.add(
    {
        "written in part": called_with(
            written_in_part_and_given_other_strides,
            lambda session: (session.randn(4, 8), session.randn(4, 8)),
        ),
    },
    replays="some",
)
ways.add(
    {"views that overlap and one is written": called_with(writes_the_first, overlapping)},
    replays="none",
)


@ways(replays="some")
def parameters_and_their_views_as_inputs(session):
    module = session.module(MLP)
    call = session.compile(lambda x, weight, part: module(x) @ weight.t() + part.sum())
    weight = module.layers[0].weight
    for batch in session.batches(4, 8):
        yield learn(module, call(batch, weight, weight[:2]).square().mean())


@ways()
def gradients_as_inputs(session):
    module, call = session.compiled(MLP)
    shrink = session.compile(lambda gs: [(g * 0.5).sin() / (1 + g.norm()) for g in gs])
    for batch in session.batches(4, 8):
        call(batch).square().mean().backward()
        yield shrink([p.grad for p in module.parameters()])
        module.zero_grad()


# ---- kinds that change


@ways()
def inputs_that_need_a_gradient_or_not(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        batch.requires_grad_(number % 3 == 0)
        out = call(batch * 1 if number % 2 else batch)
        yield [out.detach(), *learn(module, out.square().mean()), batch.grad]


@ways(replays="some")
def tensors_made_in_inference_mode_and_outside(session):
    module, call = session.compiled(MLP)
    with torch.inference_mode():
        made_inside = session.randn(4, 8)
    for number, batch in enumerate(session.batches(4, 8, count=12)):
        if number % 3 == 0:
            with torch.inference_mode():
                values = [call(made_inside + batch).clone()]
        elif number % 3 == 1:
            with torch.no_grad():
                values = [call(made_inside)]
        else:
            values = learn(module, call(batch).square().mean())
        yield values


@ways(replays="some")
def a_state_changed_in_inference_mode(session):
    def fn(x, state):
        state.mul_(0.9).add_(x.sum(0))
        return (state * x).sin()

    call, outside, values = session.compile(fn), session.randn(8), []
    with torch.inference_mode():
        inside = session.randn(8)
        for number, batch in enumerate(session.batches(4, 8)):
            chosen = inside if number % 2 else outside
            values += [call(batch, chosen).clone(), chosen.clone()]
    return values


@ways(replays="some")
def an_optional_input_and_keywords(session):
    def fn(x, mask=None, *, scale=1.0, reverse=False):
        x = long_enough(x) * scale
        if mask is not None:
            x = x.masked_fill(mask, 0)
        return x.flip(0) if reverse else x

    call = session.compile(fn)
    for x in session.batches(4, 8, count=3):
        yield [call(x), call(x, x > 0), call(mask=None, x=x, reverse=True)]
        yield [call(x, scale=2.0), call(x, x > 0, reverse=True)]


@dataclasses.dataclass
class Batch:
    rows: torch.Tensor
    more: list


@ways()
def tensors_in_lists_dicts_and_dataclasses(session):
    def fn(batch, named):
        x = long_enough(batch.rows) + sum(batch.more)
        return Batch(x * named["scale"], [x, x.t()])

    call = session.compile(fn)
    for _ in range(6):
        batch = Batch(session.randn(4, 8), [session.randn(8), session.randn(4, 1)])
        out = call(batch, {"scale": session.randn(8), "unused": session.randn(1)})
        yield [out.rows, *out.more]


def numbers(*values):
    def program(session):
        call = session.compile(lambda x, n: long_enough(x * n) + n)
        return [call(session.randn(4, 8), n) for n in values]

    return program


ways.add(
    {
        "numbers that change": numbers(1, 2, 3, 2, 1.5, 2.5, 1.5, True, False, True, math.pi, 3),
        "a number on the host as a tensor": numbers(*map(torch.tensor, (1.5, 2.5, 1.5, 3.5, -1.0))),
    },
    replays="some",
    on_skip="silent",
)


@ways()
def autocast_on_and_off_around_the_call(session):
    module, call = session.compiled(MLP)
    for number, batch in enumerate(session.batches(4, 8)):
        with torch.autocast(session.device.type, torch.bfloat16, enabled=number % 2 == 1):
            out = call(batch)
        yield learn(module, out.float().square().mean())


# ---- layouts

ways.add(
    {
        "expanded and strided inputs in turn": called_with(
            long_enough,
            rows,
            lambda s: (s.randn(8, 4).t(),),
            lambda s: (s.randn(1, 8).expand(4, 8),),
            lambda s: (s.randn(8, 16)[::2, ::2],),
            lambda s: (s.randn(5, 8)[1:],),
            count=20,
        )
    },
    replays="some",
)


@ways()
def formats_of_memory_take_turns(session):
    _, call = session.compiled(ConvNet)
    with torch.no_grad():
        for number, batch in enumerate(session.batches(2, 3, 8, 8)):
            if number % 2:
                batch = batch.to(memory_format=torch.channels_last)
            yield [call(batch).contiguous()]


@ways()
def inputs_that_start_anywhere_in_their_memory(session):
    """Sines, no products: those of matrices round otherwise in memory that is less aligned."""
    call = session.compile(long_enough)
    for offset in (0, 1, 3, 8, 1, 0, 5, 16):
        yield [call(session.randn(64)[offset : offset + 32].view(4, 8))]


class Strided(nn.Module):
    """Reads its input's storage at fixed places."""

    def __init__(self, offset):
        super().__init__()
        self.offset = offset

    def forward(self, x):
        window = x.as_strided((2, 3), (3, 1), self.offset)
        return (window.sin() + 1).cos() * 2


class WritesStrided(nn.Module):
    def forward(self, x):
        x.as_strided((3,), (2,), 5).mul_(-2)
        return (x.sin() + 1).cos() * 2


def called_on_a_slice(make, *, grad=False):
    def program(session):
        _, call = session.compiled(make)
        for _ in range(8):
            whole = session.randn(24).requires_grad_(grad)
            out = call(whole[2:14])
            if grad:
                out.sum().backward()
            yield [out, whole.detach().clone(), whole.grad]

    return program


ways.add(
    {
        "as_strided inside": called_on_a_slice(lambda: Strided(2)),
        "as_strided past the end": called_on_a_slice(lambda: Strided(16)),
        "as_strided with a gradient": called_on_a_slice(lambda: Strided(4), grad=True),
        "as_strided written": called_on_a_slice(WritesStrided),
    }
)


@ways(replays="some")
def one_of_two_overlapping_slices_is_written(session):
    """AOTAutograd makes one tensor of the two, and counts from the beginning of its storage."""

    def fn(x, y):
        x.mul_(2)
        return ((x + y).sin() + 1).cos()

    _, source = session.compiled(nn.Identity)
    call = session.compile(fn)
    for _ in range(8):
        part = source(session.randn(24) * 2)[2:]
        yield [call(part[:12], part[4:16]), part.clone()]


@ways()
def neighbours_on_one_storage_are_both_written(session):
    def fn(x, y):
        y.mul_(2)
        x.as_strided((4,), (1,), 8).add_(1)
        return ((x.sum() + y).sin() + 1).cos()

    call, whole = session.compile(fn), session.randn(24)
    for _ in range(8):
        yield [call(whole[8:20], whole[:8]), whole.clone()]


# ---- sizes


def lengths_trained(make, shapes, **kwargs):
    def program(session):
        module, call = session.compiled(make, **kwargs)
        optimizer = programs.sgd(module)
        for shape in shapes:
            yield learn(module, call(session.randn(*shape)).square().mean(), optimizer)

    return program


def wide():
    return MLP(width=16)


BY_LENGTH = [(2, n, 16) for n in (5, 7, 9, 5, 9, 7, 7, 5)]
BY_BOTH = [(b, n, 16) for b, n in ((2, 5), (3, 7), (4, 5), (2, 5), (4, 5), (3, 7), (2, 7), (3, 7))]
ONE_AND_TWO = [(n, 8) for n in (4, 1, 2, 1, 4)]
PICTURES = [(2, 3, side, side) for side in (8, 10, 12, 8, 12, 10, 8)]
ways.add(
    {
        "lengths": lengths_trained(Block, BY_LENGTH, dynamic=True),
        "batches and lengths": lengths_trained(wide, BY_BOTH, dynamic=True),
        "lengths found out": lengths_trained(wide, BY_LENGTH),
        "lengths compiled one by one": lengths_trained(
            MLP, [(n, 8) for n in (3, 4, 3, 4, 5, 3, 5)], dynamic=False
        ),
    }
)
ways.add(
    {
        "empty inputs": lengths_trained(MLP, [(0, 8)] * 5),
        "sizes of one and two": lengths_trained(MLP, ONE_AND_TWO),
        "dynamic sizes of one and two": lengths_trained(MLP, ONE_AND_TWO, dynamic=True),
        "pictures of several sizes": lengths_trained(lambda: nn.Conv2d(3, 4, 3), PICTURES),
    },
    replays="some",
)
# as in other tests that build Inductor's kernels of it
ways.add(
    {"a last batch that is smaller": lengths_trained(MLP, [(4, 8), (4, 8), (4, 8), (2, 8)] * 4)},
    settings=ALL,
)


@ways()
def a_dimension_marked_dynamic(session):
    _, call = session.compiled(MLP)
    with torch.no_grad():
        for size in (4, 6, 5, 4, 6, 5, 4):
            x = session.randn(size, 8)
            torch._dynamo.mark_dynamic(x, 0)
            yield [call(x)]


@ways(replays="some")
def sizes_of_zero_take_turns_with_others(session):
    call = session.compile(lambda x, y: (long_enough(x), long_enough(y).sum(0)), dynamic=True)
    for size in (4, 0, 4, 0, 0, 4, 1, 0):
        yield call(session.randn(size, 8), session.randn(size))


@ways(replays="some")
def forwards_of_several_lengths_pending(session):
    module, call = session.compiled(wide, dynamic=True)
    for sizes in ((5, 7, 9), (9, 5, 7), (7, 7, 5), (5, 9, 9)):
        outs = [call(session.randn(2, n, 16)) for n in sizes]
        for out in reversed(outs):
            out.square().mean().backward()
        yield [*(out.detach() for out in outs), *gradients(module)]
        module.zero_grad()


@ways(replays="some")
def results_whose_size_follows_from_the_input(session):
    def fn(x, n):
        y = x.sin().repeat(n, 1)
        steps = torch.arange(x.shape[0], device=x.device)
        return y.cos(), y.sum(0), x.shape[0] * 2, steps * 2.5, y.new_zeros(x.shape[0] + n)

    call = session.compile(fn, dynamic=True)
    for size, n in ((4, 2), (6, 3), (4, 3), (4, 2), (6, 3), (6, 2), (4, 3)):
        yield call(session.randn(size, 8), n)


@ways(replays="some")
def numbers_that_change_with_dynamic_shapes(session):
    def fn(x, scale, count):
        return ((x * scale).sin() + count).cos()[: x.shape[0] - 1] / count

    call = session.compile(fn, dynamic=True)
    for scale, count in ((0.5, 2), (0.25, 3), (0.5, 3), (0.125, 2), (0.5, 2), (1.0, 7)):
        yield [call(session.randn(5, 8), scale, count)]


@ways(replays="some")
def lists_of_any_length(session):
    call = session.compile(lambda tensors: torch.stack([t.sin() for t in tensors]).sum(0).cos())
    for count in (1, 2, 3, 2, 1, 3, 3, 2):
        yield [call(session.batches(4, 8, count=count))]


class Padded(nn.Module):
    """Reads ids that are padded to the longest of a batch."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(16, 16, padding_idx=0)
        self.block = wide()

    def forward(self, ids, lengths):
        mask = torch.arange(ids.shape[1], device=ids.device) < lengths[:, None]
        out = self.block(self.embedding(ids)) * mask[..., None]
        return out.sum(1) / lengths[:, None]


@ways(replays="some")
def padding_to_the_longest_of_a_batch(session):
    module, call = session.compiled(Padded)
    for lengths in ((5, 3), (7, 2), (4, 4), (6, 5), (7, 7), (5, 1), (4, 2), (6, 6)):
        ids = [programs.tokens(16, n)(session, 1)[0] for n in lengths]
        ids = nn.utils.rnn.pad_sequence(ids, batch_first=True)
        yield learn(module, call(ids, session.tensor(lengths)).square().mean())


# ---- dtypes


def scaled_without_dimensions(x, scale, shift):
    scale.mul_(2)
    return (x * scale + shift).sin(), scale.sin().cos() + shift


DTYPES = {
    "complex": (
        lambda x: ((x * 2).sin() * x.conj()).sum(-1) + x.real.mean(),
        lambda s: torch.complex(s.randn(4, 8), s.randn(4, 8)),
    ),
    "bool": (lambda x: (x & x.roll(1)) | (x ^ x.flip(0)) & ~x, lambda s: s.randn(4, 8) > 0),
    "int64": (
        lambda x: (x * 3 + 1).cumsum(0) % 7 - x.flip(0),
        lambda s: (s.randn(4, 8) * 9).long(),
    ),
    "int8": (lambda x: (x // 3 + 1) * x.flip(0) - 2, lambda s: (s.randn(4, 8) * 9).char()),
    "uint8": (lambda x: (x + 3) * x.flip(0) // 2, lambda s: (s.randn(4, 8) * 9).byte()),
    "bfloat16": (long_enough, lambda s: s.randn(4, 8).bfloat16()),
    "float16": (long_enough, lambda s: s.randn(4, 8).half()),
    "float64": (long_enough, lambda s: s.randn(4, 8).double()),
    "float8": (
        lambda x, w: ((x.float() * 2).sin() @ w.float().t()).to(x.dtype).view(torch.uint8),
        lambda s: [s.randn(8, 8).to(torch.float8_e4m3fn) for _ in range(2)],
    ),
}


def of_a_dtype(fn, make):
    def program(session):
        call = session.compile(fn)
        for _ in range(5):
            made = make(session)
            yield [call(*([made] if isinstance(made, torch.Tensor) else made))]

    return program


ways.add({name: of_a_dtype(*case) for name, case in DTYPES.items()})
ways.add(
    {
        "inputs without dimensions": called_with(
            scaled_without_dimensions,
            lambda s: (s.randn(4), s.randn(()), s.randn(())),
            lambda s: (s.randn(4), s.randn(4)[2], s.tensor(3.0)),
        )
    }
)


@ways(replays="some")
def dtypes_take_turns(session):
    call = session.compile(long_enough)
    for number, batch in enumerate(session.batches(4, 8)):
        yield [call(batch.to((torch.float32, torch.float64, torch.bfloat16)[number % 3]))]


@pytest.mark.filterwarnings("ignore:Torchinductor does not support code generation")
@ways.everywhere
def test_ways_to_call(way, program):
    program.check(way)


def test_offsets_that_never_repeat(setting, caplog):
    """Each is a signature of its own: said after a while, and right all along."""

    def program(session):
        _, call = session.compiled(lambda: Strided(4))
        whole = session.randn(400)
        return [call(whole[2 * n : 2 * n + 12]) for n in range(131)]

    setting.compare(program)
    assert "128 calls came that were never recorded" in caplog.text


def test_few_recordings_allowed_and_lengths_in_any_order(way, caplog):
    program = lengths_trained(MLP, [(n, 8) for n in (5, 7, 9, 5, 9, 7, 11) * 3], dynamic=True)
    with caplog.at_level("WARNING", "cgpass"):
        counters = way.compare(program, max_recordings=2)
    assert counters["plain_calls"] > 0, counters
    assert any("max_recordings=2" in record.getMessage() for record in caplog.records)
