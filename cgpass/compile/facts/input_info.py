"""Inputs of partitions as the runtime knows them: kind, the name its user knows, where it is used."""

import enum
from dataclasses import dataclass


class InputKind(enum.Enum):
    """A recording's treatment of an input."""

    STATIC = "static"
    """Parameter, buffer or marked static: read where it lies; a new address needs a new recording."""
    POOLED = "pooled"
    """Made by a captured partition: static while it lies where a recording put it."""
    COPIED = "copied"
    """User input, tangent, or value of an eager partition: copied into a placeholder every call."""
    SYMINT = "symint"
    """A Python integer that is part of the signature."""
    OPAQUE = "opaque"
    """Any other object, part of the signature by identity; a `torch.Generator` is registered with the graph, too."""
    IN_PLACE = "in place"
    """A tuple of tensors that are read and written where they lie; another object stands for their places."""


@dataclass(frozen=True)
class InputInfo:
    """One input of a partition, as messages and reports name it."""

    name: str
    """As the user knows it, e.g. `fc.weight`, else the node's name."""
    kind: InputKind
    line: str | None = None
    """User's source line that first reads it, `model.py:41 in forward: code`."""
    mutated: bool = False
    """Written by the partition: a copied input is written back after every replay."""
    is_seed: bool = False
    """Read as a pointer to wherever its reader runs; see Note [Seeds of attention]."""
    whole_storage: bool = False
    """Read by its storage's addresses (`as_strided`): a copied input is copied with all of its storage."""
    is_resized: bool = False
    """A tensor with sizes or strides that no integer among the inputs tells."""
    in_place: bool = False
    """Never copied: its writer knows it by itself, and not as an input."""
