"""Every exception that cgpass raises. All derive from `CGPassError` and from the fitting builtin."""


class CGPassError(Exception):
    """Base class of all errors that cgpass itself raises.

    While `torch.compile` compiles, Dynamo wraps every backend's errors in `torch._dynamo.exc.BackendCompilerFailed`, with
    the error as `__cause__` or `inner_exception`.
    """


class OptionError(CGPassError, ValueError):
    """An option has an unknown name or a bad value."""


class DriverUnavailableError(CGPassError, RuntimeError):
    """The requested driver can't run here (no CUDA, or the graph is on another device)."""


class InputError(CGPassError, TypeError):
    """A CUDA graph can't take an input of a call, or a wrapper is called otherwise than before."""


class OutputError(CGPassError, TypeError):
    """A function returned a value that a replay can't return as it is."""


class StaticInputMovedError(CGPassError, RuntimeError):
    """A static input moved and `static_input_check="error"` forbids recording again."""


class CaptureError(CGPassError, RuntimeError):
    """A partition could not be captured, and `on_skip="raise"` forbids running it without a graph."""


class PassError(CGPassError, RuntimeError):
    """A graph pass failed; names the pass, its stage and the passes that ran before it."""


class ExpectationError(CGPassError, AssertionError):
    """Inside `cgpass.expect` a counter grew by another amount than expected."""


class VerificationError(CGPassError, AssertionError):
    """A replay gave other bits than the same kernels without a graph."""


class ReportError(CGPassError, ValueError):
    """A report can't be read (not a report, or of another version), or can't be written."""


class DoubleBackwardError(CGPassError, RuntimeError):
    """Gradients of a compiled function were differentiated again, which `torch.compile` does not support."""

    def __init__(self) -> None:
        """With what to do about it."""
        super().__init__(
            "a gradient of a function compiled by cgpass was differentiated again: torch.compile does not support "
            "double backward. Run the code that is differentiated twice (for a gradient penalty, say) without torch.compile, "
            "or compute the inner gradient inside of the compiled function (torch.func.grad)."
        )


class CheckpointArgumentError(CGPassError, ValueError):
    """`cgpass.checkpoint` was called with an argument that it can't take."""


class CheckpointError(CGPassError, RuntimeError):
    """A checkpoint's recomputation differs from its forward, or can't give a tensor again."""


class RNGTrackerError(CGPassError, LookupError):
    """An `RNGStatesTracker` has no such name or has it already, or it can't take a state or seed, or not now."""


class GraphedArgumentError(CGPassError, ValueError):
    """`cgpass.make_graphed_callables` was given callables, samples or settings that it can't take."""


class ScheduleError(CGPassError, ValueError):
    """The order of forwards and backwards given to `cgpass.make_graphed_callables` can't be run."""


class HookError(CGPassError, TypeError):
    """A capture-time or warm-up hook returned something: its result would go nowhere."""


class GraphedBackwardError(CGPassError, RuntimeError):
    """A backward of a graphed callable can't be replayed, and can't run without a graph either."""
