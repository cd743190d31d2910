"""`reset`: frees all that was recorded."""

from cgpass import _torch
from cgpass.runtime.gathered import give_pool_back
from cgpass.runtime.owner import release_all


def reset() -> None:
    """Free every recording of this process; `torch.compiler.reset()` calls it too.

    Compiled functions stay usable: their next calls warm up and record again.
    """
    release_all()
    give_pool_back()


def reset_with_torch() -> None:
    """The same as torch forgets what it compiled."""
    _torch.end_graph_breaks()
    reset()
