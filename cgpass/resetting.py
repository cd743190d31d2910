"""`reset`: frees all that was recorded."""

from cgpass import _torch, culprits, telemetry
from cgpass.runtime.gathered import give_pool_back
from cgpass.runtime.owner import release_all


def reset() -> None:
    """Free every recording of this process; `torch.compiler.reset()` calls it too.

    Compiled functions stay usable: their next calls warm up and record again. `cgpass.summary()` begins anew, with the
    graphs that are compiled or called from now on and the graph breaks of their functions; functions at torch's limit on
    compilations stay named, since they stay in eager until `torch.compiler.reset()`. `cgpass.counters()` go on.
    """
    telemetry.begin_summary()
    for each in _torch.graph_breaks():
        each.earlier = True
    release_all()
    give_pool_back()


def reset_with_torch() -> None:
    """The same as torch forgets what it compiled."""
    _torch.end_notes()
    culprits.forget_all()
    reset()
