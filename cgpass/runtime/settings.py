"""What a runner may do, from the user's options."""

import dataclasses

from cgpass.options import Options
from cgpass.runtime.owner import Limits


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunnerSettings:
    """What a runner may do; each as the field of `cgpass.Options` of that name says."""

    limits: Limits = dataclasses.field(default_factory=Limits)
    static_input_check: str = "rerecord"
    on_skip: str = "warn"
    opaque: bool = False
    """Whether the callable's kernels bypass aten."""
    outputs: str = "shared"
    is_backward: bool = False
    """Whether outputs are gradients, which may be kept while other partitions run."""
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
    ) -> "RunnerSettings":
        """The settings that a user's options ask for."""
        return cls(
            limits=Limits(
                num_warmup_calls=options.num_warmup_calls,
                max_recordings=options.max_recordings,
                max_static_sets=options.max_static_sets,
                max_rerecords=options.max_rerecords,
            ),
            static_input_check=options.static_input_check,
            on_skip=options.on_skip,
            opaque=opaque,
            outputs=options.outputs,
            is_backward=is_backward,
            other_sets=not check_layout,
            check_layout=check_layout,
        )
