"""Random operators that the backward runs again: their marks in a forward and a backward graph.

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
from collections.abc import Iterable

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from cgpass import torch_private
from cgpass.compile.facts import values
from cgpass.compile.facts.lines import user_line
from cgpass.errors import CheckpointError

PAIR = "cgpass_rng_pair"
"""Key of `node.meta`: a pair's number."""
POSITIONS = "cgpass_rng_positions"
"""Key of `node.meta`: the node stands for the positions of the pairs' generators, which are on these devices."""


def save_random_ops(joint: fx.GraphModule, *, nested: bool, also: Iterable[fx.Node] = ()) -> int:
    """Have the split save what draws and can have no pair, in a `nested` body all. See Note [Random operators that are saved]."""
    found = [n for n in joint.graph.nodes if _draws(n) if nested or _needs_saving(n)]
    found += also
    for node in found:
        _save(node)
    return len(found)


def recomputed_random_ops(joint: fx.GraphModule) -> list[fx.Node]:
    """Return what a checkpoint has the backward of a joint graph draw again, as things are marked."""
    recomputed = (CheckpointPolicy.MUST_RECOMPUTE, CheckpointPolicy.PREFER_RECOMPUTE)
    return [n for n in joint.graph.nodes if _draws(n) and n.meta.get("recompute") in recomputed]


def runs_on(node: fx.Node, device_type: str) -> bool:
    """Tell if a node's result lies on a type of device."""
    return any(value.device.type == device_type for value in values.tensors(node)[:1])


def _save(node: fx.Node) -> None:
    """Mark a node and the parts of its result: the split saves tensors, never tuples."""
    node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
    for user in node.users:
        if user.target is operator.getitem:
            _save(user)


def require_drawn_once(
    fw: fx.GraphModule, bw: fx.GraphModule, saved: Iterable[fx.Node] = ()
) -> None:
    """Raise `CheckpointError` if something that can have no pair, or is among `saved`, draws in both graphs after all."""
    names = {node.name for node in saved}
    drawn = bw.graph.nodes
    again = {n.name for n in drawn if _needs_saving(n) or (_draws(n) and n.name in names)}
    for node in fw.graph.nodes:
        if node.name in again and (_needs_saving(node) or node.name in names):
            line = user_line(node)
            raise CheckpointError(
                f"the checkpoint or memory budget around {values.called(node)[0]}{f' ({line})' if line else ''} would "
                f"draw other random numbers in the backward: its results can be neither saved nor drawn again. Move it "
                f"out of the checkpoint, or leave the checkpoint or the budget out (of budgets, 0 alone saves nothing)."
            )


def pair_random_ops(fw: fx.GraphModule, bw: fx.GraphModule, num_fwd_outputs: int) -> int:
    """Mark what both graphs draw, have the forward save its positions, and return the number of pairs.

    What the forward returns after its first `num_fwd_outputs` is saved; the backward gets symbolic sizes, saved tensors,
    then tangents.
    """
    again = {node.name: node for node in bw.graph.nodes if _can_pair(node)}
    pairs = [(node, again[node.name]) for node in fw.graph.nodes if node.name in again]
    pairs = [(node, other) for node, other in pairs if _can_pair(node)]
    for number, nodes in enumerate(pairs):
        for node in nodes:
            node.meta[PAIR] = number
    if pairs:
        devices = tuple(values.tensors(node)[0].device for node, _ in pairs)
        _save_positions(fw, bw, num_fwd_outputs, devices)
    return len(pairs)


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
    while place < len(outputs) and _is_tensor(outputs[place]):
        place += 1
    output = fw.graph.output_node()
    like = next(node for node in fw.graph.nodes if values.tensors(node))
    with torch_private.mode_of(values.tensors(like)[0]):
        value = torch.empty((len(devices), 2), dtype=torch.int64, device="cpu")
    with fw.graph.inserting_before(output):
        saved = fw.graph.call_function(
            torch.ops.aten.empty.memory_format,
            ((len(devices), 2),),
            {"dtype": torch.int64, "device": torch.device("cpu")},
        )
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


def _is_tensor(value: object) -> bool:
    return isinstance(value, fx.Node) and isinstance(value.meta.get("val"), torch.Tensor)
