"""Split a joint graph into a forward and a backward graph."""

from collections.abc import Sequence
from typing import Any, Literal

from torch import fx

from cgpass import torch_private
from cgpass.compile.facts.rng_pairs import (
    pair_random_ops,
    recomputed_random_ops,
    require_drawn_once,
    runs_on,
    save_random_ops,
)
from cgpass.compile.facts.values import is_random


def split_joint(
    joint: fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    num_fwd_outputs: int,
    compiler: Literal["inductor", "eager"],
    **settings: Any,
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Cut where the fewest bytes are saved for the backward; AOTAutograd's `partition_fn`.

    What a checkpoint policy marked (`node.meta["recompute"]`) is recomputed or saved as it says;
    cheap operators are recomputed where that saves memory, whatever makes the kernels. Random operators in both graphs
    are marked; see Note [Pairs of random operators] and Note [Random operators that are saved].

    Raises:
        CheckpointError: Random numbers that a checkpoint's recomputation could not draw again.
    """
    nested = not joint_inputs  # the body of an `invoke_subgraph`
    random = [node for node in joint.graph.nodes if is_random(node)]
    again = random if torch_private.recomputes_unmarked(joint) else recomputed_random_ops(joint)
    traced_again = torch_private.uses_compiled_autograd()
    on_cpu = [node for node in again if compiler == "inductor" and runs_on(node, "cpu")]
    saved = again if traced_again else on_cpu
    save_random_ops(joint, nested=nested, also=saved)
    fw, bw = torch_private.min_cut_partition(
        joint,
        joint_inputs,
        compiler=compiler,
        num_fwd_outputs=num_fwd_outputs,
        random=random,
        **settings,
    )
    require_drawn_once(fw, bw, saved)
    if not nested and not traced_again:
        pair_random_ops(fw, bw, num_fwd_outputs)
    return fw, bw
