"""The former name of `cgpass.recompute.checkpointed`."""

from cgpass.recompute.checkpointed import Checkpoint

__all__ = ["Checkpoint"]
