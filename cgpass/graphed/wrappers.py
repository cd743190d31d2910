"""Modules that reduce or gather by hooks of their own, found wherever a callable may reach them."""

from collections.abc import Iterable

import torch

from cgpass.errors import GraphedArgumentError

_WRAPPERS = {
    "DistributedDataParallel": "torch.nn.",
    "DataParallel": "torch.nn.",
    "FullyShardedDataParallel": "torch.distributed.",
    "FSDPModule": "torch.distributed.",
}
"""Names of classes, and where these come from."""


def refuse_wrappers(name: str, modules: Iterable[torch.nn.Module]) -> None:
    """Have nothing recorded whose backward does more than its graph says.

    Args:
        name: Of the callable.
        modules: What it is or reaches.

    Raises:
        GraphedArgumentError: It is or reaches a wrapper such as DistributedDataParallel.
    """
    seen: set[torch.nn.Module] = set()
    for top in modules:
        for path, module in top.named_modules(memo=seen):
            bases = {base.__name__: base.__module__ for base in type(module).__mro__}
            found = [
                kind for kind, home in _WRAPPERS.items() if bases.get(kind, "").startswith(home)
            ]
            if found:
                where = f" at {path!r}" if path else ""
                raise GraphedArgumentError(
                    f"make_graphed_callables: {name} is or reaches a module that is already wrapped, a "
                    f"{type(module).__name__}{where}, whose hooks ({found[0]}) would not run on a replay, so that gradients "
                    "would not be reduced. Record the module inside, naming it by itself, then wrap."
                )
