"""What compiling assumes of symbolic sizes: noted, forgotten by torch, checked per call."""

import pytest
import sympy
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from cgpass import _torch
from cgpass.graph import size_check
from cgpass.graph.size_check import SizeCheck


@pytest.fixture
def gm():
    """A graph on 6 rows and another number of columns, neither of them fixed."""

    def fn(rows, x):
        return x.new_empty(rows), x * 2

    traced = make_fx(fn, tracing_mode="symbolic")(6, torch.ones(6, 8))
    traced.graph.find_nodes(op="placeholder")[1].meta["val"].fake_mode.shape_env.freeze()
    return traced


def inputs(gm):
    return [node.meta["val"] for node in gm.graph.find_nodes(op="placeholder")]


def checked(gm, assume):
    check = SizeCheck(gm)
    with _torch.sizes_assumed(inputs(gm)) as assumed:
        assume(*inputs(gm))
    check.assume(assumed)
    return check


def test_conditions_hold_or_do_not(gm):
    check = checked(gm, lambda rows, x: bool(rows < 7) and bool(x.shape[1] % 4 == 0))
    assert check.has_conditions
    assert check([6, torch.ones(6, 8)])
    assert check([3, torch.ones(3, 12)])
    assert not check([9, torch.ones(9, 8)])
    assert not check([6, torch.ones(6, 9)])
    assert check([6, torch.ones(6, 8)])


def test_nothing_assumed(gm):
    check = checked(gm, lambda rows, x: None)
    assert not check.has_conditions
    assert check([9, torch.ones(9, 9)])


def test_a_size_that_became_a_number(gm):
    check = checked(gm, lambda rows, x: int(x.shape[1]))
    assert check([6, torch.ones(6, 8)])
    assert not check([6, torch.ones(6, 9)])


def test_torch_forgets_what_was_assumed(gm):
    _, x = inputs(gm)
    env = x.fake_mode.shape_env
    guards, symbol = list(env.guards), x.shape[1].node.expr
    checked(gm, lambda rows, x: int(x.shape[1]))
    assert isinstance(symbol, sympy.Symbol)
    assert x.shape[1].node.expr == symbol
    assert env.guards == guards
    assert env.frozen
    again = checked(gm, lambda rows, x: int(x.shape[1]))
    assert not again([6, torch.ones(6, 9)])


def test_a_failed_compile_is_forgotten_too(gm):
    def fail(rows, x):
        raise ValueError(f"no kernel for {int(x.shape[1])} columns")

    with pytest.raises(ValueError, match="no kernel for 8"):
        checked(gm, fail)
    assert isinstance(inputs(gm)[1].shape[1].node.expr, sympy.Symbol)


def test_a_symbol_of_no_input_holds_nothing(gm):
    check = SizeCheck(gm)
    check.assume([sympy.Symbol("stranger") < 3])
    assert not check([6, torch.ones(6, 8)])


def test_graphs_without_symbols_assume_nothing():
    with _torch.sizes_assumed([torch.ones(3), 4]) as assumed:
        pass
    assert assumed == []


def test_verdicts_do_not_grow_for_ever(gm, monkeypatch):
    monkeypatch.setattr(size_check, "_VERDICTS_KEPT", 4)
    check = checked(gm, lambda rows, x: bool(rows < 7))
    x = torch.ones(6, 8)
    for _ in range(2):
        assert [check([rows, x]) for rows in range(2, 12)] == [True] * 5 + [False] * 5
    assert len(check._verdicts) <= 4
