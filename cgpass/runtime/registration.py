"""Reads the environment on buffers that NCCL registers. Loads no torch: `import cgpass` is where it can be told.

Note [Buffers that NCCL registers]
    NCCL registers the buffers of captured collectives with the other devices, each as a part of one allocation. An
    expandable segment is many, mapped one behind the other as it grows: others then write elsewhere, or hang. With
    `NCCL_GRAPH_REGISTER=0` none are registered. NCCL reads that once, when it makes its first communicator, so it is
    set when cgpass is imported, if no process group is there yet. Where it is not set collectives are not captured.

    Source: https://github.com/pytorch/pytorch/issues/158029.
"""

import os
import sys
from typing import Final

NAME: Final = "NCCL_GRAPH_REGISTER"
_SETTINGS: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def asks_for_expandable_segments() -> bool:
    """Tell whether the environment turns them on, by either of the names that torch reads."""
    given = ",".join(os.environ.get(name, "") for name in _SETTINGS).replace(" ", "").split(",")
    values = [each.partition(":")[2] for each in given if each.startswith("expandable_segments:")]
    return any(value.lower() in ("true", "1") for value in values)


def is_off() -> bool:
    """Tell whether NCCL is told to register nothing."""
    try:
        return int(os.environ.get(NAME, "1"), 0) == 0
    except ValueError:
        return False


def turn_off_if_early() -> None:
    """Have NCCL register nothing where that is needed, nobody says otherwise and no process group is there yet."""
    distributed = sys.modules.get("torch.distributed")
    early = distributed is None or not distributed.is_initialized()
    if early and NAME not in os.environ and asks_for_expandable_segments():
        os.environ[NAME] = "0"
