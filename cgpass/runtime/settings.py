"""What a runner may do, from the user's options."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from cgpass.inputs import InputInfo
from cgpass.options import Options
from cgpass.progress import Setting
from cgpass.reason import CallReasons
from cgpass.runtime.driver import BoxedCallable, CUDADriver
from cgpass.runtime.failures import Resplit
from cgpass.runtime.fallback import Fallback
from cgpass.runtime.limits import Limits
from cgpass.runtime.owner import Owner
from cgpass.runtime.signature import Layout
from cgpass.runtime.table import RecordingTable
from cgpass.telemetry import CallStats


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """What a runner may do; each as the field of `cgpass.Options` of that name says."""

    limits: Limits = dataclasses.field(default_factory=Limits)
    static_input_check: str = "rerecord"
    on_skip: str = "warn"
    progress: Setting = "off"
    opaque: bool = False
    """Whether the callable's kernels bypass aten."""
    outputs: str = "shared"
    capture_policy: str = "always"
    is_backward: bool = False
    """Whether outputs are gradients, which may be kept while other partitions run."""
    communicates: bool = False
    """Whether the callable communicates with other processes, which take no part in runs that this one makes alone."""
    other_sets: bool = False
    """Whether other tensors in the parameters' places are another module's that shares the code, and no move."""
    check_layout: bool = False
    """Whether tensors' sizes, strides and dtypes belong to the signature; needed where no guard covers them."""

    @classmethod
    def of(
        cls,
        options: Options,
        *,
        opaque: bool,
        check_layout: bool = False,
        is_backward: bool = False,
        is_repeatable: bool = False,
        communicates: bool = False,
    ) -> "RunnerSettings":
        """The settings that a user's options ask for.

        Args:
            options: The user's.
            opaque: See the field.
            check_layout: See the field.
            is_backward: See the field.
            is_repeatable: Whether a call may run more often than it is made, to find out how long it takes.
            communicates: See the field.
        """
        return cls(
            limits=Limits(
                num_warmup_calls=options.num_warmup_calls,
                max_recordings=options.max_recordings,
                max_static_sets=options.max_static_sets,
                max_rerecords=options.max_rerecords,
            ),
            static_input_check=options.static_input_check,
            on_skip=options.on_skip,
            progress=options.progress,
            opaque=opaque,
            outputs=options.outputs,
            capture_policy=options.capture_policy if is_repeatable else "always",
            is_backward=is_backward,
            communicates=communicates,
            other_sets=not check_layout,
            check_layout=check_layout,
        )

    def fallback(
        self,
        name: str,
        fn: BoxedCallable,
        stats: CallStats,
        resplit: Resplit | None,
        reasons: CallReasons,
        owner: Owner,
    ) -> Fallback:
        """What takes a partition's place where it is not captured; see there for the arguments."""
        return Fallback(
            name,
            fn,
            stats,
            on_skip=self.on_skip,
            resplit=resplit,
            capture_policy=self.capture_policy,
            reasons=reasons,
            owner=owner,
        )

    def layout(self, infos: Sequence[InputInfo]) -> Layout:
        """What is checked of inputs."""
        return Layout(
            infos,
            check_static=self.static_input_check != "off",
            check_layout=self.check_layout,
        )

    def table(
        self, name: str, layout: Layout, stats: CallStats, reasons: CallReasons
    ) -> RecordingTable:
        """An empty table of recordings.

        Args:
            name: Of the partition, for messages.
            layout: Of its inputs.
            stats: Where it counts.
            reasons: Told what is new in calls.
        """
        return RecordingTable(
            name,
            layout,
            self.limits,
            stats,
            on_moved=self.static_input_check,
            other_sets=self.other_sets,
            on_skip=self.on_skip,
            reasons=reasons,
        )


def cuda_driver(device: torch.device, options: Options, **given: Any) -> CUDADriver:
    """A CUDA driver that keeps of graphs what a user's options ask for.

    Args:
        device: With its index.
        options: The user's.
        **given: What else `CUDADriver` is to be given.
    """
    annotate, keep = options.annotate_kernels == "on", options.keep_graphs == "on"
    return CUDADriver(device, annotate=annotate, keep=keep, **given)
