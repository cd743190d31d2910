"""The pass that the guide writes from beginning to end does what the guide says."""

import pytest
import torch
from expecttest import assert_expected_inline
from torch.fx.experimental.proxy_tensor import make_fx

from cgpass.compile.facts.text import graph_text
from cgpass.compile.passes.base import PassContext, PassResult, run_passes
from cgpass.errors import PassError
from tests.docs.test_documents import DOCS, code_blocks

GUIDE = (DOCS / "writing-a-pass.md").read_text()
CONTEXT = PassContext(device=torch.device("cuda"), stage="example", direction="inference")


@pytest.fixture(scope="module")
def guide():
    """What the guide's code defines."""
    names = {"__name__": "guide"}
    for block in code_blocks(GUIDE):
        exec(block, names)
    return names


def run(guide, fn):
    gm = make_fx(fn)(torch.randn(3))
    return run_passes([guide["DropDoubleNegations"]()], gm, CONTEXT)


def test_what_the_guide_runs(guide, capsys):
    assert guide["result"].modified
    assert_expected_inline(
        graph_text(guide["result"].gm),
        """\
x_1: float32[3]@cpu = placeholder
sin: float32[3]@cpu = aten.sin.default(x_1)
return sin""",
    )


def test_twice_is_once(guide):
    result = run(guide, lambda x: x.neg().neg().neg().neg().sin())
    assert result.modified
    again = run_passes([guide["DropDoubleNegations"]()], result.gm, CONTEXT)
    assert not again.modified
    assert graph_text(again.gm) == graph_text(result.gm)


@pytest.mark.parametrize("fn", [lambda x: x.neg().sin().neg(), lambda x: x.neg().neg()])
def test_left_alone(guide, fn):
    result = run(guide, fn)
    assert (result.modified, result.notes) == (False, ())


def test_what_is_left_is_an_error(guide):
    class Blind(guide["DropDoubleNegations"]):
        def run(self, gm, ctx):
            return PassResult(gm, False)

    gm = make_fx(lambda x: x.neg().neg().sin())(torch.randn(3))
    with pytest.raises(PassError, match="node 'neg_1' negates a negation"):
        run_passes([Blind()], gm, CONTEXT)
