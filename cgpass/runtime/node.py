"""The node of autograd's graph that outputs of compiled and graphed functions have, once `_node.cpp` is compiled.

Note [A node of our own]
    AOTAutograd makes one `autograd.Function` per compiled function, and `Function.apply` gets every parameter as an
    argument: with 400 parameters it takes about half a millisecond on the host, before the GPU has anything to do, and
    as much again to save tensors and to read them. The compiled node gets a list, makes an edge per input that requires
    grad and saves what is to be saved. It is a node like those of torch's own operators: hooks on tensors, on
    parameters and on their accumulation, hooks on saved tensors, `retain_graph`, `autograd.grad` of some inputs and the
    check that nothing saved was written all work as for those.

Note [Who adds to leaves]
    Autograd's engine comes to each leaf in a task of its own, which takes 2 us on the host, on CUDA some 8. Where a leaf's
    `AccumulateGrad` has no hooks, and nothing but our node leads to it, that task would do nothing but call it; so the
    node does, at its own end. The engine must not come there as well: while it looks where to go next the edge is gone.
    Another thread could look then, too, so that holds for the one backward of a graph: the node refuses a second one,
    since what was saved is dropped, or `run` does.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import torch

from cgpass import _torch
from cgpass.runtime import native

Attach = Callable[[Any, Any, Any, Any, Any, Any, Any, Any, Any, str, bool, bool], None]
"""`attach(run, rest, inputs, wanted, direct, outputs, differentiable, checked, unchecked, name, materialize, once)` puts
a node between tensors.

    run: `run(rest, saved, grads)` returns a list with a gradient, or None, for each of `inputs`; it gets two lists that
        it may empty: what was saved, and a gradient for each differentiable output. With None for both it raises:
        that is called where gradients that were taken under `create_graph=True` are differentiated.
    rest: What else the backward reads, for `run`.
    inputs: A list or tuple.
    wanted: Positions of the inputs that get gradients.
    direct: Positions of leaves that get gradients, too: the node adds them to `.grad` itself and has no edge to those
        that nothing is hooked on; where inputs are named (`autograd.grad`, `backward(inputs=...)`) it leaves them alone.
    outputs: A list. An output that is a view or requires grad already is replaced in it.
    differentiable: Positions of the outputs that get the node.
    checked: Tensors to be saved; that they were written in the meantime is an error, as for torch's own operators.
    unchecked: Tensors to be saved without that.
    name: What the node is called.
    materialize: Whether a gradient that nothing gave is zeros for `run`; else None.
    once: Whether `run` raises when it is called again. The node itself does so once saved tensors were dropped.
"""


class _Compiled:
    """What the compiled module has, once it is there."""

    attach: Attach | None = None
    drop_accumulators: Callable[[Any], None] | None = None


def _register(attach: Attach) -> None:
    """Have torch know the node for one of its own: `isinstance(out.grad_fn, torch.autograd.graph.Node)`."""
    with _torch.without_modes(), torch.inference_mode(False), torch.enable_grad():
        out = [torch.empty(0)]
        attach(
            None,
            None,
            [torch.empty(0, requires_grad=True)],
            (0,),
            (),
            out,
            (0,),
            [],
            [],
            "Node",
            True,
            False,
        )
    torch.autograd.graph.Node.register(type(out[0].grad_fn))


_compiled = _Compiled()


def _use(module: ModuleType) -> None:
    _register(module.attach)
    _compiled.drop_accumulators = module.drop_accumulators
    _compiled.attach = module.attach


native.loader.on_load(native.NODE, _use)


def wait() -> bool:
    """Wait until the node is compiled or has failed to be; returns whether it is."""
    native.loader.wait()
    return _compiled.attach is not None


def attach() -> Attach | None:
    """The compiled function, None as long as there is none."""
    return _compiled.attach


def drop_accumulators(leaves: Sequence[torch.Tensor]) -> None:
    """Have leaves forget the nodes that add to their `.grad`, but for those with hooks, which have to be met again.

    The next graph makes others; graphs that exist keep theirs. Does nothing where nothing is compiled.

    Args:
        leaves: Those that require no grad are left alone.
    """
    if wait() and _compiled.drop_accumulators is not None:
        _compiled.drop_accumulators(leaves)
