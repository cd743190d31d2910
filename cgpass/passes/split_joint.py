"""Split a joint graph into a forward and a backward graph."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import fx

from cgpass import _torch


def split_joint(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    static_lifetime_input_indices: Sequence[int] | None = None,
    compiler: Literal["inductor", "eager"],
    **_: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut where the fewest bytes are saved for the backward; AOTAutograd's `partition_fn`.

    What a checkpoint policy marked (`node.meta["recompute"]`) is recomputed or saved as it says;
    cheap operators are recomputed where that saves memory, whatever makes the kernels.

    Args:
        joint: The joint graph; what is left of it afterwards is not to be used.
        joint_inputs: The graph's inputs, primals then tangents.
        num_fwd_outputs: How many of the outputs are the forward's.
        static_lifetime_input_indices: Inputs that live as long as the function: saving them is free.
        compiler: What will make the kernels.

    Returns:
        The forward graph, whose outputs end with the saved values, and the backward graph.
    """
    indices = None
    if static_lifetime_input_indices is not None:
        indices = list(static_lifetime_input_indices)
    return _torch.min_cut_partition(
        joint,
        joint_inputs,
        compiler=compiler,
        num_fwd_outputs=num_fwd_outputs,
        static_lifetime_input_indices=indices,
    )
