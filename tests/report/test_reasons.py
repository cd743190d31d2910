"""Every reason code is provoked; reports name the operator, the user's line and what to do."""

import pytest
import torch

import cgpass
from cgpass.compile import culprits
from cgpass.compile.facts import op_tables
from cgpass.report.model import GraphReport, PartitionReport
from cgpass.report.report import Report, html
from cgpass.runtime.simulated import SimulatedDriver
from cgpass.telemetry.reason import CHOSEN, OTHER_FIXES
from cgpass.telemetry.summaries import counted
from tests.operators import doubling, tagged, with_effect
from tests.report.test_call_reasons import CALLS
from tests.unit.compile.facts.test_capturability import PROVOKED, fix_of

X = torch.linspace(0.1, 0.9, 16).view(4, 4)


fails, fails_too = (doubling(name, in_captures=False) for name in ("fails", "fails_too"))
notes, opaque = doubling("notes"), doubling("opaque")
with_effect(notes)


def _reading_backward(ctx, grad):
    (x,) = ctx.saved_tensors
    return grad * x.sum().item()


opaque.register_autograd(
    _reading_backward, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs)
)


def observer(x):
    one, zero = torch.ones(1), torch.zeros(1)
    on = torch.ones(1, dtype=torch.int64)
    fused = torch.ops.aten._fused_moving_avg_obs_fq_helper_functional
    return fused(x, on, on, zero, one, one, zero.int(), 0.1, 0, 255, -1)[0]


# Code of the reason: what provokes it amid work that is captured, and the operator to blame.
COMPILED = {
    "unsafe_ops": (lambda x: x.sigmoid(), "aten.sigmoid.default"),
    "failed_capture": (
        lambda x: fails_too(fails(x).sin().cos().exp().tanh()),
        "tests.fails_too.default",
    ),
    "opaque_autograd": (lambda x: opaque(x), "tests.opaque.default"),
    "cudagraph_unsafe": (lambda x: tagged(x), "tests.tagged.default"),
    "host_read": (
        lambda x: x * torch.ones(int((x.sum() * 0 + 4).item())).sum(),
        "aten._local_scalar_dense.default",
    ),
    "dynamic_shape": (lambda x: x + x.nonzero().sum(), "aten.nonzero.default"),
    "host_only": (
        lambda x: (torch._check(x.sum().item() > -9), x)[1],
        "aten._assert_scalar.default",
    ),
    "host_sync": (lambda x: x + torch.histc(x, 4), "aten.histc.default"),
    "side_effect": (lambda x: notes(x), "with_effects(tests.notes.default)"),
    "bool_index": (
        lambda x: torch.ops.aten.index_put(x, [x > 0.5], x.sum()),
        "aten.index_put.default",
    ),
    "control_flow": (
        lambda x: torch.cond(x.sum() > 0, lambda y: y.sin(), lambda y: y.cos(), (x,)),
        "cond",
    ),
    "unbacked_size": (lambda x: x + x.nonzero().sin().sum(), "aten.sin.default"),
    "host_scalar": (
        lambda x: torch.nn.functional.leaky_relu(x, x.sum().item()),
        "aten.leaky_relu.default",
    ),
    "torch_unsafe": (observer, "aten._fused_moving_avg_obs_fq_helper_functional.default"),
    "too_small": (lambda x: tagged(tagged(x).cos()), "aten.cos.default"),
    "no_work": (
        lambda x: tagged(torch.cat([tagged(x)[:0], tagged(x.sin())[:0]])),
        "aten.cat.default",
    ),
}


def test_every_code_is_here():
    others = {*CALLS, "graph_break", "recompile_limit", "recompiled"}
    assert {*COMPILED, *PROVOKED, *others} == {*op_tables.FIXES, *OTHER_FIXES}
    assert {*op_tables.FIXES, *OTHER_FIXES} >= CHOSEN
    assert not op_tables.FIXES.keys() & OTHER_FIXES.keys()


def said(report, found):
    """Checks that a report's text names all of a reason; names and lines may be wrapped."""
    whole = "".join(str(report).split())
    for text in (found.op, found.detail, f"[{found.code}]", f"Do: {found.fix}", found.line or ""):
        assert "".join(text.split()) in whole, text


@pytest.mark.parametrize("code", COMPILED)
def test_reasons_of_compiled_functions(code):
    provoke, op = COMPILED[code]

    def fn(x):
        return provoke((x * 2).sin().cos().exp()).sin().cos().tanh().exp()

    options = {"unsafe_ops": ("aten::sigmoid",)} if code == "unsafe_ops" else {}
    reads = code != "opaque_autograd"  # with it, the formula could be traced
    with (
        cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="silent", **options),
        torch._dynamo.config.patch(
            capture_scalar_outputs=reads, capture_dynamic_output_shape_ops=True
        ),
    ):
        report = cgpass.explain(fn, X.clone().requires_grad_(code == "opaque_autograd"))
    parts = [part for graph in report.graphs for part in graph.partitions]
    assert any(part.captured for part in parts), str(report)
    found = [r for part in parts if not part.captured for r in part.reasons if r.code == code]
    (reason, *_) = [r for r in found if r.op == op]
    file, _, place = reason.line.partition(":")
    begins = provoke.__code__.co_firstlineno
    assert file == "test_reasons.py"
    assert begins <= int(place.split()[0]) <= begins + 4
    assert code in CHOSEN or reason.fix == fix_of(code)
    assert reason.fix
    said(report, reason)


@pytest.mark.parametrize("code", PROVOKED)
def test_reasons_of_graphs_that_no_function_here_is_compiled_to(code):
    (reason,) = counted(PROVOKED[code]())
    assert (reason.code, reason.fix, reason.count) == (code, op_tables.FIXES[code], 1)
    assert str(reason) == f"{reason.op} at {reason.line}: {reason.detail} [{code}]; {reason.fix}"
    assert "\n" not in str(reason)
    part = PartitionReport(name="eager_1", captured=False, num_ops=1, reasons=(reason,))
    graph = GraphReport(direction="forward", calls=1, num_ops=1, partitions=(part,))
    said(Report(made="now", graphs=(graph,)), reason)


def chain(x):
    x = (x * 2).sin()
    return x.cos().exp().tanh()


def unable(*args, **kwargs):
    raise RuntimeError(f"operation not permitted when stream is capturing{' words' * 50}")


def test_a_partition_of_which_no_operator_is_to_blame_names_its_lines(monkeypatch):
    monkeypatch.setattr(SimulatedDriver, "record", unable)
    monkeypatch.setattr(culprits, "find_culprit", lambda *_, **__: (None, False))
    with cgpass.set_defaults(driver="simulated", compiler="eager", on_skip="silent"):
        report = cgpass.explain(chain, X)
    (part,) = report.graphs[0].partitions
    (reason,) = part.reasons
    line = chain.__code__.co_firstlineno + 1
    assert (reason.code, reason.op) == ("capture", "")
    assert reason.line == f"test_reasons.py:{line} to test_reasons.py:{line + 1}"
    assert reason.detail.startswith("RuntimeError: operation not permitted")
    assert " words [...]" in reason.detail
    assert reason.fix == OTHER_FIXES["capture"]
    said(report, reason)
    assert reason.line in html(report)


@pytest.mark.gpu
def test_reasons_between_devices():
    def fn(x, y, scalar):
        x = (x * 2).sin().cos().exp() * scalar * y.sum()
        x = x + y.sin().cuda()
        x = x.cpu().cuda() + x
        return x.sin().cos().tanh().exp()

    with cgpass.set_defaults(compiler="eager", on_skip="silent"):
        report = cgpass.explain(fn, X.cuda(), X, torch.tensor(2.0))
    parts = [part for graph in report.graphs for part in graph.partitions]
    reasons = {reason.code: reason for part in parts for reason in part.reasons}
    assert {"cpu_tensor", "host_to_device", "device_to_host", "lifted"} <= reasons.keys()
    for reason in reasons.values():
        assert reason.line is not None
        assert "test_reasons.py:" in reason.line
        said(report, reason)
