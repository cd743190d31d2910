"""What a new node takes over from the node it stands for."""

from torch import fx

_KEPT = (
    "stack_trace",
    "nn_module_stack",
    "fwd_nn_module_stack",
    "seq_nr",
    "fwd_source_fn_stack",
    "source_fn_stack",
    "recompute",
    "ac_graph_id",
    "partitioner_tag",
    "custom",
)


def inherit_meta(new: fx.Node, old: fx.Node, value: object) -> None:
    """Give `new` the fake value `value` and, of `old`, where it comes from and what the user asked for."""
    new.meta.update({key: old.meta[key] for key in _KEPT if key in old.meta})
    new.meta["val"] = value
