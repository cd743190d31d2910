"""Random operators that the backward draws again: the split of a joint graph, and a generator state for each.

Note [Pairs of random operators]
    An operator that draws in the forward and is recomputed in the backward must draw the same numbers there. Both of
    its nodes carry the pair's number. Where the generator stood at each forward travels with what that forward saves:
    one more saved tensor, `rng_positions`, which these graphs name as an output and an input. Neither is computed
    by the graphs: `FunctionalizeRng` takes them out, and what calls the graphs puts them in.

Note [Random operators that are saved]
    A pair is one operator in the outermost graph. What draws otherwise, a higher-order operator or anything in the body
    of a `nested_compile_region`, which every call of the region shares, can't be given a state of its own. Its results
    are saved for the backward, whatever a checkpoint says: right always, captured, and paid for in memory. So are those
    of operators on the CPU where Inductor compiles, which makes no CPU kernel of what runs with a generator's state, and
    all under compiled autograd, which traces the backward once more and loses generators (torch 2.11 to 2.15).
"""

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.lines import user_line
from cgpass.compile.passes.base import Pass, PassContext
from cgpass.errors import CheckpointError

PAIR = "cgpass_rng_pair"
"""Key of `node.meta`: a pair's number."""
POSITIONS = "cgpass_rng_positions"
"""Key of `node.meta`: the node stands for the positions of the pairs' generators, which are on these devices."""


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
    random = [node for node in joint.graph.nodes if values.is_random(node)]
    traced_again = torch_private.uses_compiled_autograd()
    saved = set()
    for node in random:
        has_no_pair = traced_again or (compiler == "inductor" and _is_on_cpu(node))
        if has_no_pair or (_draws(node) and (nested or _needs_saving(node))):
            saved.add(node.name)
            _save(node)
    fw, bw = torch_private.min_cut_partition(
        joint,
        joint_inputs,
        compiler=compiler,
        num_fwd_outputs=num_fwd_outputs,
        random=random,
        **settings,
    )
    _require_drawn_once(fw, bw, saved)
    pair_random_ops(fw, bw, num_fwd_outputs)
    return fw, bw


def _is_on_cpu(node: fx.Node) -> bool:
    return any(value.device.type == "cpu" for value in values.tensors(node)[:1])


def _save(node: fx.Node) -> None:
    """Mark a node and the parts of its result: the split saves tensors, never tuples."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for user in node.users:
        if user.target is operator.getitem:
            _save(user)


def _require_drawn_once(fw: fx.GraphModule, bw: fx.GraphModule, saved: set[str]) -> None:
    """Raise `CheckpointError` if something that was to be saved draws in both graphs after all."""
    again = saved.intersection(node.name for node in bw.graph.nodes if _draws(node))
    for node in fw.graph.nodes:
        if node.name in again:
            line = user_line(node)
            raise CheckpointError(
                f"the checkpoint or memory budget around {values.called(node)[0]}{f' ({line})' if line else ''} would "
                f"draw other random numbers in the backward: its results can be neither saved nor drawn again. Move it "
                f"out of the checkpoint, or leave the checkpoint out (of a memory budget: leave it out, or set it to 0)."
            )


def pair_random_ops(fw: fx.GraphModule, bw: fx.GraphModule, num_fwd_outputs: int) -> int:
    """Mark what both graphs draw, have the forward save its positions, and return the number of pairs.

    What the forward returns after its first `num_fwd_outputs` is saved; the backward gets symbolic sizes, saved tensors,
    then tangents.
    """
    again = {node.name: node for node in bw.graph.nodes if _can_pair(node)}
    drawn = [node for node in fw.graph.nodes if node.name in again and _can_pair(node)]
    for number, node in enumerate(drawn):
        node.meta[PAIR] = again[node.name].meta[PAIR] = number
    if drawn:
        devices = tuple(values.tensors(node)[0].device for node in drawn)
        _save_positions(fw, bw, num_fwd_outputs, devices)
    return len(drawn)


def _draws(node: fx.Node) -> bool:
    return values.is_random(node) and node.kwargs.get("generator") is None


def _can_pair(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and bool(values.tensors(node))
        and _draws(node)
    )


def _needs_saving(node: fx.Node) -> bool:
    """Tell if a higher-order operator draws, and not from a state that it is given or gives.

    DTensor's is given places, no state: it moves the default generator of its device.
    """
    name = values.hop_name(node)
    has_state = name in values.RANDOM_HOPS and name != "run_dtensor_rng_op"
    return name is not None and not has_state and values.is_random(node)


def _save_positions(
    fw: fx.GraphModule, bw: fx.GraphModule, first: int, devices: tuple[torch.device, ...]
) -> None:
    outputs = list(values.graph_outputs(fw))
    place = first
    while place < len(outputs) and values.tensor_of(outputs[place]) is not None:
        place += 1
    output = fw.graph.output_node()
    made = (len(devices), 2)
    like = next(tensor for node in fw.graph.nodes for tensor in values.tensors(node))
    with torch_private.mode_of(like):
        value = torch.empty(made, dtype=torch.int64, device="cpu")
    with fw.graph.inserting_before(output):
        kwargs: dict[str, Any] = {"dtype": torch.int64, "device": torch.device("cpu")}
        saved = fw.graph.call_function(torch.ops.aten.empty.memory_format, (made,), kwargs)
    saved.name = "rng_positions"
    saved.meta = {"val": value, POSITIONS: devices, "saved_tensor_with_no_vc_check": True}
    outputs.insert(place, saved)
    output.args = (tuple(outputs),)
    read = [n for n in bw.graph.find_nodes(op="placeholder") if not values.is_scalar(n)]
    tangent = read[place - first]
    with bw.graph.inserting_before(tangent):
        given = bw.graph.placeholder("rng_positions")
    given.meta = {"val": value, POSITIONS: devices}
    fw.recompile()
    bw.recompile()


@dataclass(frozen=True)
class RngPairs:
    """Describes how a graph with pairs is called. See Note [Pairs of random operators]."""

    devices: tuple[torch.device, ...]
    """One for each pair, which draws there."""
    positions_at: int
    """Place of the positions among a forward graph's outputs or a backward graph's inputs."""


@dataclass(frozen=True)
class FunctionalizeRng(Pass):
    """Rewrites each operator of a pair to `graphsafe_run_with_rng_state` on a state of its own.

    The states are inputs after all others, `fwd_rng_state_<i>` in a forward and `bwd_rng_state_<i>` in a backward
    graph. One state per operator: a backward meets the operators in another order.

    Source: pytorch PR 146878.
    """

    name: ClassVar[str] = "functionalize_rng"

    def run(self, gm: fx.GraphModule, ctx: PassContext) -> list[RngPairs]:
        """Return one `RngPairs`, or none where no operator has a pair."""
        mark = next((n for n in gm.graph.nodes if POSITIONS in n.meta), None)
        if mark is None:
            return []
        positions_at = _take_out(gm, mark)
        devices = mark.meta[POSITIONS]
        prefix = "bwd" if ctx.direction == "backward" else "fwd"
        states: list[fx.Node] = []
        last = gm.graph.find_nodes(op="placeholder")[-1]
        for number, device in enumerate(devices):
            with gm.graph.inserting_after(last):
                last = gm.graph.placeholder(f"{prefix}_rng_state_{number}")
            value = torch.Generator()  # any will do where the device isn't there
            if device.type == "cuda" and torch.cuda.is_available():
                value = torch_private.default_generator(device).clone_state()
            last.meta["val"] = value
            states.append(last)
        for node in [n for n in gm.graph.nodes if PAIR in n.meta]:
            _rewrite(gm, node, states[node.meta[PAIR]])
        return [RngPairs(devices, positions_at)]


def _take_out(gm: fx.GraphModule, mark: fx.Node) -> int:
    """Remove what stands for the positions; returns where it stood."""
    if mark.op == "placeholder":
        position = gm.graph.find_nodes(op="placeholder").index(mark)
    else:
        outputs = list(values.graph_outputs(gm))
        position = outputs.index(mark)
        del outputs[position]
        output = gm.graph.output_node()
        output.args = (tuple(outputs),)
    gm.graph.erase_node(mark)
    return position


def _rewrite(gm: fx.GraphModule, node: fx.Node, state: fx.Node) -> None:
    args: tuple[Any, ...] = (node.target, *node.args)
    with gm.graph.inserting_before(node):
        drawn = gm.graph.call_function(
            torch_private.run_with_rng_state, args, {**node.kwargs, "rng_state": state}
        )
    drawn.meta = {key: value for key, value in node.meta.items() if key != PAIR}
    node.replace_all_uses_with(drawn)
    gm.graph.erase_node(node)
