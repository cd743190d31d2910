"""A collective's timeout says which one it was, on whose line, and what to do."""

import linecache
import types

import pytest
import torch

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.errors import CollectiveTimeoutError
from cgpass.runtime.collectives import CollectiveCall, is_timeout, timeouts_told
from tests.graphs import fake_cuda_graph
from tests.unit.runners import COPIED, call, counts, runner

pytestmark = pytest.mark.skipif(torch_private.wait_tensor() is None, reason="no torch.distributed")
functional = torch.ops._c10d_functional
GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 3000ms for recv"
CALLS = (
    CollectiveCall("all_reduce", "all_reduce", "", "model.py:4 in forward: code"),
    CollectiveCall("wait_tensor", "wait_tensor", "all_reduce", "model.py:5 in forward: code"),
)


@pytest.mark.parametrize(
    ("text", "is_one"),
    [
        (GLOO, True),
        ("Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)", True),
        ("wait timeout after 600000ms, keys: /default_pg/0//store", True),
        ("nccl: unhandled system error", False),
        ("the request timed out", False),  # the user's own
    ],
)
def test_which_errors_are_timeouts_of_collectives(text, is_one):
    assert is_timeout(RuntimeError(text)) is is_one
    assert not is_timeout(ValueError(text))


def test_errors_of_torchs_own_are_known_by_their_type():
    assert is_timeout(torch.distributed.DistStoreError("wait timeout after 10ms"))
    assert is_timeout(torch.distributed.DistBackendError("Timeout at the barrier"))


def test_a_wait_is_listed_with_what_it_waits_for():
    def fn(x, y):
        first, second = functional.all_gather_into_tensor_coalesced([x.sin(), y], 2, "0")
        return functional.wait_tensor(second), functional.all_reduce(first, "sum", "0")

    found = [
        (op, source)
        for _, op, source, _ in values.collective_calls(fake_cuda_graph(fn, (4,), (4,)))
    ]
    assert found == [
        ("all_gather_into_tensor_coalesced", ""),
        ("wait_tensor", "all_gather_into_tensor_coalesced"),
        ("all_reduce", ""),
    ]


def test_the_message():
    def fn(args):
        raise RuntimeError(GLOO)

    with pytest.raises(CollectiveTimeoutError) as raised:
        timeouts_told(fn, "forward captured_0", CALLS[1:])([])
    assert str(raised.value) == (
        "forward captured_0: a collective timed out while the partition ran without a graph, to warm up: wait_tensor (of "
        f"all_reduce) at model.py:5 in forward: code: {GLOO}. Another process did not come to it, or came later than the "
        "process group allows. Have all processes call the function with the same shapes and options, equally often; "
        "where one of them only takes long (it compiles, it loads), give the group a longer timeout: "
        "init_process_group(timeout=...), new_group(timeout=...)."
    )
    assert str(raised.value.__cause__) == GLOO


def generated(line):
    """What a compiler makes of a graph: a function whose line raises."""

    def raises(*args):
        raise RuntimeError(GLOO)

    source = f"def call(args):\n    {line}\n"
    linecache.cache["<generated>"] = (len(source), None, source.splitlines(True), "<generated>")
    ops = types.SimpleNamespace(default=raises)
    spaces = types.SimpleNamespace(wait_tensor=ops, all_reduce=ops, all_reduce_=ops)
    found = {"functional": types.SimpleNamespace(_c10d_functional=spaces), "buf0": 0}
    exec(compile(source, "<generated>", "exec"), found)
    return found["call"]


@pytest.mark.parametrize(
    ("line", "blamed"),
    [
        ("wait_tensor = functional._c10d_functional.wait_tensor.default(0)", (1,)),
        ("all_reduce = functional._c10d_functional.all_reduce.default(0)", (0,)),
        ("functional._c10d_functional.all_reduce_.default(buf0, 'sum', '0')", (0,)),
        ("functional._c10d_functional.wait_tensor.default(buf0)", (1,)),
        ("buf1 = functional._c10d_functional.wait_tensor.default; buf1(0)", (1,)),
        ("(lambda all: all.all_reduce)(functional.__dict__.popitem()[1]).default()", (0, 1)),
    ],
)
def test_the_line_of_generated_code_tells_which_one_it_was(line, blamed):
    with pytest.raises(CollectiveTimeoutError) as raised:
        timeouts_told(generated(line), "p", CALLS)([])
    text = str(raised.value)
    assert tuple(n for n, call in enumerate(CALLS) if str(call) in text) == blamed


def test_other_errors_come_through():
    def fn(args):
        raise RuntimeError("something else")

    with pytest.raises(RuntimeError, match="something else") as raised:
        timeouts_told(fn, "p", CALLS)([])
    assert type(raised.value) is RuntimeError


@pytest.mark.parametrize("fails_at", [1, 2])
def test_a_timeout_of_a_warm_up_or_a_capture_is_raised_and_not_tried_again(fails_at):
    calls = []

    def fn(args):
        calls.append(1)
        if len(calls) == fails_at:
            raise RuntimeError(GLOO)
        return [args[0] + 1]

    told = timeouts_told(fn, "forward captured_0", CALLS)
    run = runner(lambda x: told([x]), COPIED)
    outputs = []
    for number in range(1, 5):
        if number == fails_at:
            when = "ran without" if fails_at == 1 else "was captured"
            with pytest.raises(CollectiveTimeoutError, match=f"the partition {when}"):
                call(run, torch.ones(1))
            assert len(calls) == fails_at
        else:
            outputs += call(run, torch.ones(1))
    assert outputs == 3 * [[2.0]]
    assert counts(run)[3] == 0
    assert counts(run)[1] == 1
