"""Every exception that cgpass raises. All derive from `CGPassError` and from the fitting builtin."""


class CGPassError(Exception):
    """Base class of all errors that cgpass itself raises.

    While `torch.compile` compiles, Dynamo wraps every backend's errors, with the error as `inner_exception`.

    Examples:
        >>> try:
        ...     torch.compile(torch.sin, backend="cgpass", options={"outputs": "own"})(torch.ones(2))
        ... except torch._dynamo.exc.BackendCompilerFailed as error:
        ...     isinstance(error.inner_exception, cgpass.errors.CGPassError)
        True
    """


class OptionError(CGPassError, ValueError):
    """An option has an unknown name or a bad value.

    Examples:
        >>> cgpass.Options(max_recordings=0)
        Traceback (most recent call last):
        cgpass.errors.OptionError: cgpass: option 'max_recordings' must be an int >= 1, got 0 (int).
    """


class DriverUnavailableError(CGPassError, RuntimeError):
    """The requested driver can't run here (no CUDA, or the graph is on another device).

    Examples:
        >>> cgpass.CUDAGraphWrapper(torch.sin, options={"driver": "cuda"})(torch.ones(2))
        Traceback (most recent call last):
        cgpass.errors.DriverUnavailableError: driver="cuda" can't record on cpu; use driver="auto", or move the tensors
    """


class InputError(CGPassError, TypeError):
    """A graph, or a function of cgpass, can't take an argument, or a wrapper is called otherwise than before.

    Examples:
        >>> cgpass.CUDAGraphWrapper(torch.add, name="add")(torch.ones(2), 0.5)
        Traceback (most recent call last):
        cgpass.errors.InputError: add: input 1 is a float: a graph would freeze its value; pass tensors (...
    """


class OutputError(CGPassError, TypeError):
    """A function returned a value that a replay can't return as it is.

    Examples:
        >>> cgpass.CUDAGraphWrapper(torch.nn.Parameter)(torch.ones(2))
        Traceback (most recent call last):
        cgpass.errors.OutputError: Parameter: output 0 is a Parameter, but a replay makes plain tensors that ...
    """


class StaticInputMovedError(CGPassError, RuntimeError):
    """A static input moved and `static_input_check="error"` forbids recording again.

    Examples:
        >>> sine = cgpass.CUDAGraphWrapper(torch.sin, static_input_indices=[0], options={"static_input_check": "error"})
        >>> x = torch.ones(2)
        >>> results = [sine(x), sine(x), sine(x.clone())]
        Traceback (most recent call last):
        cgpass.errors.StaticInputMovedError: ...: static inputs moved or were replaced since they were recorded: input 0 ...
    """


class CaptureError(CGPassError, RuntimeError):
    """Something can't be captured, and may not run without a graph: `on_skip="raise"`, or it is graphed by hand.

    Examples:
        >>> rows = cgpass.CUDAGraphWrapper(torch.nonzero, name="rows", options={"on_skip": "raise"})
        >>> results = [rows(torch.ones(2)) for _ in range(2)]  # the first call warms up
        Traceback (most recent call last):
        cgpass.errors.CaptureError: rows can't be captured and on_skip="raise" refuses its calls: RuntimeError: ...
    """


class PassError(CGPassError, RuntimeError):
    """A graph pass failed; names the pass, its stage and the passes that ran before it. Please report it.

    Examples:
        >>> from unittest import mock
        >>> with mock.patch("cgpass.compile.passes.partition.Partition.run", side_effect=KeyError("a bug")):
        ...     torch.compile(torch.sin, backend="cgpass")(torch.ones(2))
        Traceback (most recent call last):
        torch._dynamo.exc.BackendCompilerFailed: backend='cgpass' raised:
        PassError: pass 'partition' failed in stage 'graph' (inference): KeyError: 'a bug'. Passes that ran before it: ...
    """


class ExpectationError(CGPassError, AssertionError):
    """Inside `cgpass.expect` a counter grew by another amount than expected.

    Examples:
        >>> with cgpass.expect(replays=1):
        ...     pass
        Traceback (most recent call last):
        cgpass.errors.ExpectationError: cgpass.expect: replays grew by 0, not by 1. No graph was compiled inside.
    """


class VerificationError(CGPassError, AssertionError):
    """A replay gave other bits than the same kernels without a graph.

    Examples:
        >>> op = torch.library.custom_op("docs::op", lambda x: x + x.data_ptr(), mutates_args=(), schema="(Tensor x) -> Tensor")
        >>> fake = op.register_fake(torch.empty_like)
        >>> compiled = torch.compile(op, backend="cgpass")
        >>> with cgpass.verify():
        ...     results = [compiled(x) for x in torch.arange(12).split(4)]
        Traceback (most recent call last):
        cgpass.errors.VerificationError: cgpass.verify: ... differs in 4 of 4 elements from its value without a graph. ...
    """


class ReportError(CGPassError, ValueError):
    """A report can't be read (not a report, or of another version), or can't be written.

    Examples:
        >>> cgpass.Report.load("no.json")
        Traceback (most recent call last):
        cgpass.errors.ReportError: no.json can't be read: No such file or directory
    """


class DoubleBackwardError(CGPassError, RuntimeError):
    """Gradients of a compiled function were differentiated again, which `torch.compile` does not support.

    Examples:
        >>> compiled = torch.compile(lambda x: x.exp().sum(), backend="cgpass")
        >>> torch.autograd.functional.hessian(compiled, torch.ones(2))
        Traceback (most recent call last):
        cgpass.errors.DoubleBackwardError: a gradient of a function compiled by cgpass was differentiated again: ...
    """

    def __init__(self) -> None:
        """With what to do about it."""
        super().__init__(
            "a gradient of a function compiled by cgpass was differentiated again: torch.compile does not support "
            "double backward. Run the code that is differentiated twice (for a gradient penalty, say) without torch.compile, "
            "or compute the inner gradient inside of the compiled function (torch.func.grad)."
        )


class CheckpointArgumentError(CGPassError, ValueError):
    """`cgpass.checkpoint` was called with an argument that it can't take.

    Examples:
        >>> cgpass.checkpoint(torch.sin(torch.ones(2)))
        Traceback (most recent call last):
        cgpass.errors.CheckpointArgumentError: cgpass.checkpoint: fn must be callable, got Tensor. Pass the function and its ...
    """


class CheckpointError(CGPassError, RuntimeError):
    """A checkpoint's recomputation differs from its forward, or can't give a tensor again.

    Examples:
        >>> sizes = [1, 2]
        >>> y = cgpass.checkpoint(lambda x: x[: sizes.pop()].sin(), torch.ones(2, requires_grad=True))
        >>> y.sum().backward()
        Traceback (most recent call last):
        cgpass.errors.CheckpointError: ... was float32[2] on cpu in the forward and is float32[1] on cpu in the recomputation...
    """


class RNGTrackerError(CGPassError, LookupError):
    """An `RNGStatesTracker` has no such name or has it already, or it can't take a state or seed, or not now.

    Examples:
        >>> with cgpass.RNGStatesTracker().fork("a"):
        ...     pass
        Traceback (most recent call last):
        cgpass.errors.RNGTrackerError: RNGStatesTracker: there is no state named 'a'; there are none. add('a', seed) it first.
    """


class GraphedArgumentError(CGPassError, ValueError):
    """`cgpass.make_graphed_callables` was given callables, samples or settings that it can't take.

    Examples:
        >>> cgpass.make_graphed_callables(torch.sin, torch.ones(2))
        Traceback (most recent call last):
        cgpass.errors.GraphedArgumentError: make_graphed_callables: sample_args must be a tuple, got Tensor.
    """


class ScheduleError(CGPassError, ValueError):
    """The order of forwards and backwards given to `cgpass.make_graphed_callables` can't be run.

    Examples:
        >>> cgpass.make_graphed_callables(torch.sin, (torch.ones(2),), options={"order": [-1, 1]})
        Traceback (most recent call last):
        cgpass.errors.ScheduleError: make_graphed_callables: order[0] is -1: a backward before the forward that it belongs to.
    """


class HookError(CGPassError, TypeError):
    """A capture-time or warm-up hook returned something: its result would go nowhere.

    Examples:
        >>> options = cgpass.GraphedOptions(driver="simulated", warmup_hooks={"pre_warmup": lambda: 1})
        >>> cgpass.make_graphed_callables(torch.sin, (torch.ones(2),), options=options)
        Traceback (most recent call last):
        cgpass.errors.HookError: make_graphed_callables: the hook 'pre_warmup' returned a int. Hooks can't replace ...
    """


class GraphedBackwardError(CGPassError, RuntimeError):
    """A backward of a graphed callable can't be replayed, and can't run without a graph either.

    Examples:
        >>> x, options = torch.ones(2, requires_grad=True), {"driver": "simulated"}
        >>> loss = cgpass.make_graphed_callables(lambda x: x.sin().sum(), (x,), options=options)(x)
        >>> loss.backward(), loss.backward()
        Traceback (most recent call last):
        cgpass.errors.GraphedBackwardError: <lambda>: a second backward through one forward. Ask for its gradients together, ...
    """
