"""`cgpass.summary()` and the counters, of functions that were compiled."""

import logging

import pytest
import torch

import cgpass
from cgpass import telemetry
from cgpass.errors import CaptureError
from tests.operators import tagged, waits
from tests.usage import programs
from tests.usage.test_bad_input import compiled

X = torch.ones(4)


class Breaks(torch.nn.Module):
    def forward(self, x):
        torch._dynamo.graph_break()  # of Breaks.forward
        return x.exp()


def summary_of(fn, **options):
    """Lines about the graphs of three calls, and what they added to the counters."""
    before = telemetry.counters()["graphs"]
    call = compiled(fn, **options)
    with programs.counted() as counters:
        for _ in range(3):
            assert torch.equal(call(X), fn(X))
    torch.compiler.reset()
    return "\n".join(map(str, telemetry.graphs(before))).splitlines(), counters


def long_unsafe(x):
    return tagged(tagged((x * 2).sin().cos().tanh()).cos().sin()) + 1


def test_operators_that_are_too_small_a_partition_have_their_reason():
    (head, first, second, third), counters = summary_of(long_unsafe, on_skip="silent")
    line = long_unsafe.__code__.co_firstlineno + 1
    assert head == (
        f"inference of test_summary.py:{line} in long_unsafe: 1 partition captured (4 operators), 1 eager (5 operators)"
    )
    assert first.startswith(f"  eager_1: tests.tagged.default at test_summary.py:{line} in")
    assert "[cudagraph_unsafe]" in first
    assert (
        "its partition would hold 2 operators that do work on the device (views don't count), min_partition_ops is 4 "
        "[too_small]"
    ) in second
    assert second.endswith("set min_partition_ops to 2 or less to capture it (and 1 more)")
    assert "its partition would hold 1 operator that does work on the device" in third
    assert third.endswith("set min_partition_ops to 1 to capture it")
    assert (counters["skips"], counters["partitions_eager"]) == (1, 1)


def test_a_graph_that_launches_nothing_is_no_skip(caplog):
    with caplog.at_level(logging.INFO, "cgpass"):
        (line, *_), counters = summary_of(lambda x: x.view(2, 2).T)
    assert line.endswith("(2 operators): it launches no work on the device")
    assert counters["skips"] == counters["plain_calls"] == counters["replays"] == 0
    (record,) = [r for r in caplog.records if "runs without CUDA graphs" in r.getMessage()]
    assert record.levelno == logging.INFO
    assert record.getMessage().startswith("inference of test_summary.py:")


def test_calls_that_ran_without_a_graph_are_named():
    call = compiled(lambda x: x.sin().cos().exp().tan(), max_recordings=1)
    for size in (4, 5, 6):
        x = torch.ones(size)
        torch._dynamo.mark_dynamic(x, 0)
        for _ in range(3):
            call(x)
    *_, head, line, _ = cgpass.summary().splitlines()
    assert head.endswith("1 partition captured (4 operators), 0 eager (0 operators)")
    assert line.startswith("  captured_0: 6 of 9 calls ran without a graph: max_recordings=")
    assert line.endswith(" [max_recordings]; pad inputs to a few sizes, or raise max_recordings")
    torch.compiler.reset()


@pytest.mark.parametrize("fn", [long_unsafe, lambda x: x.sin().cos() + 1, lambda x: tagged(x)])
def test_none_captures_nothing_and_has_nothing_to_say(fn, caplog):
    with caplog.at_level(logging.INFO, "cgpass"):
        (line, *_), counters = summary_of(
            fn, driver="none", on_skip="raise", unsafe_ops=("aten::linear",)
        )
    assert line.endswith('driver="none" turns them off')
    assert "runs without CUDA graphs (" in line
    changed = {name: count for name, count in counters.items() if count}
    assert changed == {"graphs": 1}
    assert not [r for r in caplog.records if r.name.startswith("cgpass") and r.levelno > 20]


def refusal(call):
    with pytest.raises(CaptureError) as error:
        call(X)
    return str(error.value)


def test_a_partition_whose_calls_are_refused_is_not_shown_as_captured():
    before = telemetry.counters()
    call = compiled(lambda x: waits(x.sin().cos().exp().tan()) + 1, on_skip="raise")
    with programs.counted() as counters:
        call(X)
        for _ in range(3):
            message = refusal(call)
    assert 'can\'t be captured as a whole, and on_skip="raise" refuses its calls' in message
    assert 'with "warn" all but this would be captured: tests.waits' in message
    assert (counters["calls"], counters["warmups"], counters["skips"]) == (4, 1, 1)
    assert counters["partitions_captured"] == 0
    (graph,) = telemetry.graphs(before["graphs"])
    head, reason = str(graph).splitlines()
    assert head.endswith("0 partitions captured (0 operators), 1 eager (6 operators)")
    assert reason.startswith("  captured_0: tests.waits.default at test_summary.py:")
    assert ': on_skip="raise" refuses its calls: capturing it failed (' in reason
    cgpass.reset()
    (graph,) = telemetry.graphs(before["graphs"])
    assert str(graph).endswith("1 partition captured (6 operators), 0 eager (0 operators)")
    call(X)
    assert refusal(call) == message
    torch.compiler.reset()


def test_a_reset_leaves_out_graph_breaks_of_what_is_not_called_again():
    torch.compiler.reset()
    options = {"driver": "simulated", "compiler": "eager"}

    def breaks(x):
        torch._dynamo.graph_break()
        return x.sin()

    first = torch.compile(breaks, backend="cgpass", options=options)
    second = torch.compile(lambda x: x.cos(), backend="cgpass", options=options)
    module = torch.compile(
        torch.nn.Sequential(Breaks(), torch.nn.Linear(4, 4)), backend="cgpass", options=options
    )
    for call in (first, second, module):
        call(X)
    assert cgpass.summary().count("torch._dynamo.graph_break()") > 2
    cgpass.reset()
    assert cgpass.summary() == "no graph was compiled"
    second(X)
    assert "graph break" not in cgpass.summary()
    for call, code in (
        (first, "in breaks: torch._dynamo.graph_break()"),
        (module, "of Breaks.forward"),
    ):
        cgpass.reset()
        call(X)
        assert code in cgpass.summary()
    torch.compiler.reset()


def many_options(fn, *args):
    torch.compiler.reset()
    for number in range(10):
        options = {"driver": "simulated", "compiler": "eager", "max_recordings": number + 1}
        torch.compile(fn(), backend="cgpass", options=options)(*args)


def one_more(x):
    return x.sin() + 1


@pytest.mark.parametrize(
    ("fn", "place"),
    [
        (lambda: one_more, f"test_summary.py:{one_more.__code__.co_firstlineno} in one_more"),
        (
            lambda: torch.nn.Sequential(torch.nn.Linear(4, 4)),
            "modules of torch's own classes, as nn.Sequential (they count as one function)",
        ),
    ],
)
def test_the_recompile_limit_is_named(fn, place):
    many_options(fn, X)
    said = (
        "it was compiled 8 times, as often as torch._dynamo.config.recompile_limit allows, the last time since backend or "
        "options were others. Calls that no compiled version fits run in eager"
    )
    head, *lines = cgpass.summary().splitlines()
    assert head.endswith(" eager (0 operators) (8 times)")
    (line,) = [each for each in lines if "left to eager" in each]
    assert line == (
        f"left to eager: {place}: {said} [recompile_limit]; compile it once, for one backend and with one set of options, or call "
        "torch.compiler.reset() before you change them"
    )
    (left,) = cgpass.explain(fn(), X).left_to_eager
    assert (left.rest, left.detail, left.is_earlier) == (place, said, True)
    torch.compiler.reset()
    assert cgpass.summary() == "no graph was compiled"
