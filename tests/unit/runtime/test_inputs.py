"""Kinds of a call's inputs: a test for each row of Note [One rule for inputs]."""

import dataclasses

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import cgpass
from cgpass import torch_private
from cgpass.compile.facts.input_info import InputInfo
from cgpass.compile.layouts import _copied
from cgpass.runtime import fast
from cgpass.runtime.inputs import (
    COPIED_AS_THEY_ARE,
    Inputs,
    Layout,
    Placeholder,
    as_bits,
    copies_in,
    copy_in,
    describe,
)
from cgpass.runtime.owner import Owner
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.runtime.wrapper import _kind
from tests.operators import tagged
from tests.unit.runtime.runners import COPIED, OPAQUE, POOLED, STATIC, SYMINT, infos

X = torch.ones(2)


class Partition:
    """The inputs of a partition's calls, sorted and then remembered as the runner does."""

    def __init__(self, *kinds, mutated=(), whole=(), max_places=64, max_copied=64 << 20):
        described = tuple(
            dataclasses.replace(info, whole_storage=i in whole)
            for i, info in enumerate(infos(*kinds, mutated=mutated))
        )
        self.layout = Layout(described, check_static=True, check_layout=False)
        self.owner = Owner(SimulatedDriver())
        self.inputs = Inputs(self.layout, self.owner, max_places=max_places, max_copied=max_copied)

    def __call__(self, *args):
        key = self.layout.static_key(args)
        found = self.inputs.find(args, key)
        self.inputs.remember(args, found.new)
        return found


def places(*tensors):
    """Addresses; zero for numbers."""
    keys = (bytes(8) if isinstance(t, int) else fast.static_key([t], (0,)) for t in tensors)
    return b"".join(keys)


def number_known(partition):
    return sum(map(len, partition.inputs._known.values()))


def test_another_tensor_on_the_same_storage_has_moved():
    part, base = Partition(COPIED, STATIC), torch.ones(4)
    first, second = base[:2], base[2:]
    part(X, first)
    found = part(X, second)
    assert (found.code, found.copied) == (None, (1,))


def test_a_call_of_another_module_is_none_of_copies():
    """A buffer that both share does not make them one."""
    part, shared = Partition(STATIC, STATIC), X.clone()
    modules = [Parameter(X.clone()) for _ in range(3)]
    for w in modules:
        found = part(w, shared)
        assert (found.code, found.copied, found.places) == ("new_module", (), places(w, shared))
    for w in modules:
        found = part(w, shared)
        assert (found.code, found.new, found.places) == (None, (), places(w, shared))


def test_places_of_emptied_storages_are_not_new_for_others():
    """FSDP2 gathers one layer's parameters where it has just emptied those of another."""
    part, memory = Partition(COPIED, STATIC), np.ones(2, np.float32)
    first, other = (torch.from_numpy(memory) for _ in range(2))
    part(X, first)
    assert part(X, other).new == (1,), "both live"
    part, own = Partition(COPIED, STATIC), torch.ones(2)
    storage, address = own.untyped_storage(), own.data_ptr()
    part(X, own)
    storage.resize_(0)
    there = torch_private.storage_at(address, 8, torch.device("cpu"))  # never read
    assert part(X, torch_private.on_storage(there, X)).new == ()


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"max_copied": 8}, None),
        ({"max_copied": 7}, "too_large"),
        ({"whole": (1,)}, "whole_storage"),
    ],
)
def test_what_is_too_large_or_read_beside_its_view_is_not_copied(settings, code):
    part, w = Partition(COPIED, STATIC, **settings), Parameter(X.clone())
    part(X, w)
    kept, w.data = w.data, X.clone()
    found = part(X, w)
    assert (found.code, found.copied) == (code, () if code else (1,))
    assert found.places == (places(w) if code else places(0))
    assert part(X, w).places == places(w), "it is in place from the next call on"
    del kept


@pytest.mark.parametrize(
    ("written", "other", "code"),
    [
        ((2,), "shares", "shares_memory"),
        ((), "shares", None),
        ((2,), "own", None),
        ((1,), "own", None),
    ],
)
def test_what_shares_memory_with_what_is_written_is_not_copied(written, other, code):
    part, (v, w) = Partition(COPIED, STATIC, STATIC, mutated=written), (X.clone(), X.clone())
    part(X, v, w)
    base = torch.ones(4)
    kept, v.data = v.data, base[:2]
    if other == "shares":
        w.data = base[2:]
    assert part(X, v, w).code == code
    del kept


def test_what_was_made_without_a_graph_has_its_reader_run_without_one():
    part, saved, w = Partition(POOLED, STATIC), X.clone(), X.clone()
    part.owner.note_plain_results([saved, None, 3])
    assert part(saved, w).code == "new_module", "it is remembered as if nothing were amiss"
    found = part(saved[1:], w)
    assert (found.code, found.absent, found.copied) == ("not_in_the_pool", (0,), ())


def test_of_one_storage_the_oldest_places_are_forgotten():
    part, base = Partition(COPIED, STATIC, max_places=4), torch.ones(1000)
    for n in range(500):
        part(X, base[n:])
    assert number_known(part) <= 8
    assert part(X, base[499:]).new == ()
    assert part(X, base[1:]).new == (1,)


# ---- copies of every dtype, with the multi-tensor kernel as on CUDA: it knows few of them


KNOWN = set(COPIED_AS_THEY_ARE)
EVERY = {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
OTHERS = [each for each in sorted(EVERY - KNOWN, key=str) if not str(each).startswith("torch.q")]
"""All that this torch has, but for quantised ones."""
pytestmark = pytest.mark.filterwarnings("ignore:B?Complex")


@pytest.fixture(autouse=True)
def few_kernels(monkeypatch):
    copy = torch._foreach_copy_

    def refusing(targets, sources):
        for tensor in (*targets, *sources):
            if tensor.dtype not in KNOWN:
                raise RuntimeError(f'"foreach_tensor_copy" not implemented for {tensor.dtype}')
        return copy(targets, sources)

    monkeypatch.setattr(torch, "_foreach_copy_", refusing)


def values(dtype, *size):
    shape = (*size[:-1], size[-1] * dtype.itemsize)
    return torch.randint(0, 100, shape, dtype=torch.uint8).view(dtype)


def layouts(dtype):
    whole = values(dtype, 4, 6)
    return [whole, whole.t(), whole[:, 1:5], whole[0].expand(3, 6), whole[:0]]


@pytest.mark.parametrize("dtype", OTHERS, ids=str)
def test_inputs_of_every_dtype_are_copied_in_and_back(dtype):
    values_in = layouts(dtype)
    placeholders = {i: Placeholder(value) for i, value in enumerate(values_in)}
    copy_in(copies_in(placeholders), values_in)
    for i, placeholder in placeholders.items():
        assert placeholder.tensor.dtype == dtype
        assert placeholder.tensor.stride() == values_in[i].stride()
        assert torch.equal(as_bits(placeholder.tensor), as_bits(values_in[i]))
    whole = Placeholder(values_in[2], whole_storage=True)
    whole.copy_from(values_in[2])
    written = values(dtype, 4, 6)[:, 1:5]
    whole.copy_to(written)
    assert torch.equal(as_bits(written), as_bits(values_in[2]))


def test_a_conjugate_is_copied_as_its_values():
    source = torch.complex(torch.randn(4), torch.randn(4)).to(torch.complex32)
    copy = _copied(source.conj(), (1,))
    assert torch.equal(as_bits(copy), as_bits(source.conj().resolve_conj()))


# ---- recordings of one compiled function copy inputs of the same layout to the same memory


def fn(x):
    """Five captured partitions that read what operators between them made."""
    for _ in range(4):
        x = tagged((x * 2).sin().cos())
        y = tagged((x + 1).tanh())
        x = (x * y).exp().tanh()
    return x


def test_memory_of_one_partition_for_all(monkeypatch):
    made = []
    add = Owner.add_recording
    monkeypatch.setattr(Owner, "add_recording", lambda self, r: made.append(r) or add(self, r))
    options = {"driver": "simulated", "compiler": "eager", "min_partition_ops": 1}
    compiled = torch.compile(fn, backend=cgpass.cgpass, options=options)
    held = []
    with torch.no_grad():
        for _ in range(4):
            x = torch.randn(64)
            held.append((compiled(x), fn(x)))
    assert all(torch.equal(a, b) for a, b in held)
    copying = [r for r in made if len(r.copied_inputs) == 2]
    assert len(copying) >= 4
    places = {p.target.data_ptr() for r in copying for p in r.placeholders.values()}
    assert len(places) == 2
    torch.compiler.reset()


CPU = torch.device("cpu")
WIDE = torch.zeros(2, 3)


def test_integers_and_identities_make_the_shape_key():
    found = Layout(infos(SYMINT, OPAQUE, COPIED), check_static=True, check_layout=False)
    a, b = [], []
    assert found.shape_key([3, a, WIDE]) == found.shape_key([3, a, torch.ones(5)])
    assert found.shape_key([3, a, WIDE]) != found.shape_key([4, a, WIDE])
    assert found.shape_key([3, a, WIDE]) != found.shape_key([3, b, WIDE])


def test_describe_names_and_lines():
    some = [InputInfo("w", STATIC, "model.py:3 in forward: w"), InputInfo("b", STATIC)]
    assert describe(some, range(2)) == "w (read at model.py:3 in forward: w), b"
    many = [InputInfo(f"p{i}", STATIC) for i in range(8)]
    assert describe(many, range(8)) == "p0, p1, p2, p3, p4, and 3 more"


def test_kinds_inferred_from_values():
    args = [WIDE, WIDE, 3, True, "text", None, torch.float32, torch.Generator(), object()]
    found = [_kind("x", value, CPU, is_static=i == 1) for i, value in enumerate(args)]
    assert found == [COPIED, STATIC, *[SYMINT] * 5, OPAQUE, OPAQUE]


@pytest.mark.parametrize(
    ("known", "other"), [("is_resized", torch.zeros(3, 2)), ("whole_storage", torch.zeros(9)[3:])]
)
def test_what_no_integer_tells_belongs_to_it(known, other):
    info = InputInfo("x", COPIED, **{known: True})
    found = Layout((info,), check_static=True, check_layout=False)
    assert found.shape_key([WIDE]) == found.shape_key([WIDE + 1])
    assert found.shape_key([WIDE]) != found.shape_key([other])
