"""Every exception that cgpass raises. All derive from `CGPassError` and from the fitting builtin."""


class CGPassError(Exception):
    """Base class of whatever cgpass itself raises.

    What is raised while `torch.compile` compiles arrives wrapped, as Dynamo wraps every backend's errors:
    `torch._dynamo.exc.BackendCompilerFailed`, with the error as `__cause__` or `inner_exception`.
    """


class OptionError(CGPassError, ValueError):
    """An option's name or value is not one that cgpass knows."""


class DriverUnavailableError(CGPassError, RuntimeError):
    """The driver that was asked for can't run here (no CUDA, or the graph lives on another device)."""


class InputError(CGPassError, TypeError):
    """A call's input is of a kind that a CUDA graph can't take, or a sealed wrapper was misused."""


class OutputError(CGPassError, TypeError):
    """A function returned what a replay can't hand out as it is."""


class StaticInputMovedError(CGPassError, RuntimeError):
    """A static input moved and `static_input_check="error"` forbids recording again."""


class CaptureError(CGPassError, RuntimeError):
    """A partition could not be captured and `on_skip="raise"` forbids running it plainly."""


class StagingError(CGPassError, RuntimeError):
    """An input can't be given the memory that a recording reads; never raised at a user, the partition runs plainly."""


class PassError(CGPassError, RuntimeError):
    """A graph pass failed; names the pass, its stage and the passes that ran before it."""


class PostconditionError(CGPassError, RuntimeError):
    """A pass left a graph that breaks what the pass ensures."""


class ExpectationError(CGPassError, AssertionError):
    """Inside `cgpass.expect` something happened more or less often than was said."""


class VerificationError(CGPassError, AssertionError):
    """A replay gave other bits than the same kernels without a graph."""


class ReportError(CGPassError, ValueError):
    """A report can't be read, since it is none or of another version, or can't be written as asked."""


class DoubleBackwardError(CGPassError, RuntimeError):
    """Gradients of a compiled function were differentiated again, which `torch.compile` does not support."""

    def __init__(self) -> None:
        """With what to do about it."""
        super().__init__(
            "a gradient of a function compiled by cgpass was differentiated again: torch.compile does not support "
            "double backward. Call what is differentiated twice (for a gradient penalty, say) without torch.compile, "
            "or compute the inner gradient inside of the compiled function (torch.func.grad)."
        )


class CheckpointArgumentError(CGPassError, ValueError):
    """`cgpass.checkpoint` was called with what it can't take."""


class CheckpointError(CGPassError, RuntimeError):
    """A checkpoint's recomputation differs from its forward, or was asked for what it can't give."""


class RNGTrackerError(CGPassError, LookupError):
    """A name that an `RNGStatesTracker` doesn't have or has already, or a state, seed or moment it can't take."""


class GraphedArgumentError(CGPassError, ValueError):
    """`cgpass.make_graphed_callables` was given callables, samples or settings that it can't take."""


class ScheduleError(CGPassError, ValueError):
    """The order of forwards and backwards given to `cgpass.make_graphed_callables` is none that can be run."""


class HookError(CGPassError, TypeError):
    """A capture-time or warm-up hook returned something: its result would go nowhere."""


class GraphedBackwardError(CGPassError, RuntimeError):
    """A backward of a graphed callable can't be replayed, and what it would take to run it plainly is gone."""
