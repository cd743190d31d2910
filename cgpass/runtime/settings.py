"""What a runner may do, from the user's options."""

import dataclasses

from cgpass.options import Options
from cgpass.progress import Setting


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """What a runner may do; each as the field of `cgpass.Options` of that name says."""

    max_recordings: int = 64
    max_copied_mib: int = 64
    static_input_check: str = "rerecord"
    on_skip: str = "warn"
    progress: Setting = "off"
    opaque: bool = False
    """Whether the callable's kernels bypass aten."""
    outputs: str = "shared"
    is_backward: bool = False
    """Whether outputs are gradients, which may be kept while other partitions run."""
    communicates: bool = False
    """Whether the callable communicates with other processes, which take no part in runs that this one makes alone."""
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
        communicates: bool = False,
    ) -> "RunnerSettings":
        """The settings that a user's options ask for."""
        return cls(
            max_recordings=options.max_recordings,
            max_copied_mib=options.max_copied_mib,
            static_input_check=options.static_input_check,
            on_skip=options.on_skip,
            progress=options.progress,
            opaque=opaque,
            outputs=options.outputs,
            is_backward=is_backward,
            communicates=communicates,
            check_layout=check_layout,
        )
