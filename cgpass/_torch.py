"""The only file that touches private torch modules.

Each symbol is imported on first use (but for a base class, which torch loads anyway), so that importing cgpass loads
neither Dynamo nor Inductor. What differs between torch 2.11 and 2.15 is told apart here, by looking for the feature
first and at the version second.
"""

import contextlib
import contextvars
import ctypes
import functools
import importlib.util
import inspect
import itertools
import logging
import sys
import threading
import traceback
import types
from collections import deque
from collections.abc import (
    Callable,
    Collection,
    Container,
    Iterable,
    Iterator,
    Mapping,
    MutableMapping,
    MutableSequence,
    MutableSet,
    Sequence,
)
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode  # for all others

# ---- storages and addresses


storage_use_count = torch._C._storage_Use_Count
"""How many references C++ holds to the StorageImpl at an address (`UntypedStorage._cdata`).

Source: torch/csrc/Module.cpp, `_storage_Use_Count`, 2.11 to 2.15.
"""


def with_lazy_bits(tensor: torch.Tensor, *, conj: bool, neg: bool) -> torch.Tensor:
    """A view whose conjugate and negative bits are flipped where asked for."""
    if conj:
        tensor = torch._conj(tensor)
    return torch._neg_view(tensor) if neg else tensor


def tensor_at_address(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor that reads the memory where `tensor` lies now, whatever becomes of `tensor`'s storage.

    **Lifetime:** owns nothing; the caller keeps the memory alive.
    """
    storage = tensor.untyped_storage()
    raw = storage_at(storage.data_ptr(), storage.nbytes(), tensor.device)
    return on_storage(raw, tensor)


def on_storage(
    storage: torch.UntypedStorage, like: torch.Tensor, *, offset: int | torch.SymInt | None = None
) -> torch.Tensor:
    """A tensor laid out as `like` on a storage, from an offset in elements on; by default that of `like`."""
    out = torch.empty(0, dtype=like.dtype, device=like.device)
    offset = like.storage_offset() if offset is None else offset
    with torch.no_grad():
        out.set_(storage, offset, like.size(), like.stride())
    return with_lazy_bits(out, conj=like.is_conj(), neg=like.is_neg())


def storage_at(address: int, num_bytes: int, device: torch.device) -> torch.UntypedStorage:
    """A storage that lies where it is told to. **Lifetime:** owns nothing; the caller keeps the memory alive."""
    storage: Any = torch._C._construct_storage_from_data_pointer(address, device, num_bytes)
    return storage  # an UntypedStorage, whatever the stub says


def is_zero_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor stands for zeros and has no memory; forward-mode AD makes such."""
    return torch._is_zerotensor(tensor)


class WeakStorage:
    """Knows whether a storage has died.

    Source: torch/multiprocessing/reductions.py `StorageWeakRef`, 2.11 to 2.15.
    """

    def __init__(self, storage: torch.UntypedStorage) -> None:
        """Args: storage: is not held."""
        from torch.multiprocessing.reductions import StorageWeakRef

        self._ref = StorageWeakRef(storage)

    @property
    def expired(self) -> bool:
        """Whether it has died."""
        return self._ref.expired()

    def get(self) -> torch.UntypedStorage | None:
        """The storage, None if it has died."""
        if self._ref.expired():
            return None
        return torch.UntypedStorage._new_with_weak_ptr(self._ref.cdata)


swap_data_ptr: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] | None = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", None
)
"""Exchanges the memory under two storages, for everybody who holds them; from torch 2.13 on."""


def strided_allocator(
    device: torch.device,
) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], torch.Tensor]:
    """A function `(size, stride, dtype) -> uninitialised tensor` for `device`.

    On the current CUDA device it is Inductor's allocator, which parses no arguments: 0.5 us instead of 2 us a tensor.

    Source: torch/csrc/dynamo/guards.cpp, `_empty_strided_cuda`, 2.11 to 2.15.
    """
    if device.type == "cuda" and device.index == torch.cuda.current_device():
        from torch._C._dynamo import guards

        return getattr(guards, "_empty_strided_cuda")  # noqa: B009  in no stub
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


# ---- CUDA graphs


def clear_cublas_workspaces() -> None:
    """Free cuBLAS' persistent workspaces, so that none is left pinned in a graph's pool.

    Source: torch/_inductor/cudagraph_trees.py `clear_cublass_cache`, 2.11.
    """
    torch._C._cuda_clearCublasWorkspaces()


def make_library_handles(device: torch.device) -> None:
    """Make the handles of cuBLAS and cuDNN that the current thread will use.

    Each thread has its own, made when it first needs one: inside a capture that fails
    (`CUBLAS_STATUS_NOT_INITIALIZED`, torch 2.11).

    Source: aten/src/ATen/cuda/detail/DeviceThreadHandles.h, 2.11.
    """
    torch.cuda.current_blas_handle()
    if torch.backends.cudnn.is_available():
        with without_modes():
            one = torch.ones(1, 1, 1, 1, device=device)
            torch.nn.functional.conv2d(one, one)


def abandon_failed_capture(device: int, pool: tuple[int, int]) -> None:
    """Take the allocator out of capture routing after `capture_end` raised.

    torch 2.11's `CUDAGraph::capture_end` raises before it stops routing allocations to the pool; later versions
    clean up in `reset`, where these calls find nothing to do and say so by raising.
    """
    with contextlib.suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


def begin_allocating_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Have this thread's allocations come from a pool, which counts one more user.

    Source: torch/_inductor/cudagraph_trees.py `_use_cuda_memory_pool_manager`, 2.11 to 2.15.
    """
    torch._C._cuda_beginAllocateCurrentThreadToPool(device, pool)


def end_allocating_to_pool(device: int, pool: tuple[int, int]) -> None:
    """Undo `begin_allocating_to_pool`; the pool keeps its user until `release_pool`."""
    torch._C._cuda_endAllocateToPool(device, pool)


def has_process_groups() -> bool:
    """Whether this process may communicate with others."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@functools.cache
def before_process_groups_end(hook: Callable[[], None], abort_hook: Callable[[], None]) -> None:
    """Have `hook` called before a process group shuts down, and when the interpreter ends; the other before one is aborted.

    torch (2.11 to 2.15) has no such hooks. `destroy_process_group` may have been imported from anywhere, so what it
    calls is replaced: `ProcessGroup.shutdown` and, for `_abort_process_group`, `ProcessGroup.abort`; once for all.
    """
    import atexit

    from torch.distributed import ProcessGroup

    def replace(name: str, before: Callable[[], None]) -> None:
        method = getattr(ProcessGroup, name)

        @functools.wraps(method)
        def wrapper(self: Any) -> None:
            before()
            method(self)

        setattr(ProcessGroup, name, wrapper)

    replace("shutdown", hook)
    replace("abort", abort_hook)
    atexit.register(hook)


def around_gathering(
    begin: Callable[[torch.device], Callable[[], None] | None],
    note: Callable[[torch.UntypedStorage], None],
) -> None:
    """Be told when FSDP2 makes memory for what it gathers; nothing happens where it isn't loaded.

    It empties the storages of gathered parameters after use, and enlarges them again before the next one.

    Args:
        begin: Called before memory is made, with the device; what it returns is called afterwards.
        note: Called with a storage that is gathered into, before it is used.

    Source: torch/distributed/fsdp/_fully_shard/_fsdp_param.py and _fsdp_param_group.py, `alloc_storage`,
    `FSDPParam.init_all_gather_outputs`, 2.11 to 2.15.
    """
    package = "torch.distributed.fsdp._fully_shard"
    modules = [
        sys.modules.get(f"{package}.{name}") for name in ("_fsdp_param", "_fsdp_param_group")
    ]
    alloc: Any = getattr(modules[0], "alloc_storage", None)
    kind: Any = getattr(modules[0], "FSDPParam", None)
    init: Any = getattr(kind, "init_all_gather_outputs", None)

    def alloc_storage(tensor: torch.Tensor) -> None:
        if torch.compiler.is_compiling():
            alloc(tensor)
            return
        note(tensor.untyped_storage())
        _make(begin, tensor.device, alloc, tensor)

    def init_all_gather_outputs(self: Any, *args: Any, **kwargs: Any) -> None:
        if self.all_gather_outputs or torch.compiler.is_compiling():
            init(self, *args, **kwargs)
            return
        given = (each for each in (*args, *kwargs.values()) if isinstance(each, torch.device))
        _make(begin, next(given, None), init, self, *args, **kwargs)
        for tensor in self.all_gather_outputs:
            note(tensor.untyped_storage())

    for name, made, ours in (
        ("alloc_storage", alloc, alloc_storage),
        ("init_all_gather_outputs", init, init_all_gather_outputs),
    ):
        if made is None or hasattr(made, "_is_of_cgpass"):
            continue
        replacement: Any = functools.wraps(made)(ours)
        replacement._is_of_cgpass = True
        for place in (*modules, kind):
            if getattr(place, name, None) is made:
                setattr(place, name, replacement)


def _make(
    begin: Callable[[torch.device], Callable[[], None] | None],
    device: torch.device | None,
    make: Callable[..., None],
    *args: Any,
    **kwargs: Any,
) -> None:
    """Call `make` between `begin` and what that returns; if there is no memory, once more without.

    In a pool the allocator does not look for what others have cached.

    Source: c10/cuda/CUDACachingAllocator.cpp `DeviceCachingAllocator::malloc`, 2.11 to 2.15; pytorch#159674.
    """
    end = None if device is None else begin(device)
    if end is not None:
        try:
            make(*args, **kwargs)
        except torch.OutOfMemoryError:
            pass
        else:
            return
        finally:
            end()
    make(*args, **kwargs)


def finished_work() -> Any:
    """What an operator of `c10d` returns for work that is done.

    Source: torch/csrc/distributed/c10d/init.cpp, `FakeWork` and `Work.boxed`, 2.11 to 2.15.
    """
    from torch._C import _distributed_c10d as c10d

    return getattr(c10d.Work, "boxed")(getattr(c10d, "FakeWork")())  # noqa: B009  in no stub


def see_to_calls(types: Iterable[type]) -> bool:
    """Whether some of the types are those of tensors that see to calls themselves, as tensors around others do.

    A mode that lets them finds calls of the tensors inside, in memory: of a DTensor's shard, and the wait for the result
    of a collective that is used for the first time.
    """
    default = torch.Tensor.__torch_dispatch__
    return any(getattr(each, "__torch_dispatch__", default) != default for each in types)


@functools.cache
def wait_tensor() -> Any:
    """The operator that waits for a functional collective; None in a torch without them."""
    import torch.distributed

    if not torch.distributed.is_available():
        return None
    import torch.distributed._functional_collectives

    return torch.ops._c10d_functional.wait_tensor.default


def memory_bandwidth(device: torch.device) -> float:
    """Bytes per second that a device can read or write; a guess where it doesn't say."""
    if device.type == "cuda":
        found = torch.cuda.get_device_properties(device)
        bits_per_s = 2e3 * getattr(found, "memory_clock_rate", 0) * found.memory_bus_width
        if bits_per_s > 0:
            return 0.8 * bits_per_s / 8  # of what is promised
    return 1e12


def release_pool(device: int, pool: tuple[int, int]) -> None:
    """Take back one user of a pool."""
    torch._C._cuda_releasePool(device, pool)


def pool_segments(pool: tuple[int, int]) -> list[dict[str, Any]]:
    """What the allocator has of a pool, from its own records: `torch.cuda.memory_snapshot`'s segments.

    torch 2.11 drops a reference too many to what it is asked with: past 256 pools that frees numbers that are in use,
    and before Python 3.12 `False` in the end. There, it is given one more of each.
    """
    numbers = [_Number(number) for number in pool]
    given = [*numbers, False] if _drops_references() else []
    for each in given:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    return torch.cuda.memory_snapshot((numbers[0], numbers[1]), include_traces=False)


def uses_expandable_segments() -> bool | None:
    """Whether CUDA's allocator makes expandable segments; None if it has not been started, or does not say.

    Source: torch/csrc/cuda/Module.cpp, `THCPModule_memorySnapshot`, 2.11 to 2.15.
    """
    if not torch.cuda.is_initialized():
        return None
    numbers = (_Number(0), _Number(2**40))  # of no pool
    for each in (*numbers, False) if _drops_references() else ():
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(each))
    found: Any = torch._C._cuda_memorySnapshot((*numbers, False))
    return found.get("allocator_settings", {}).get("expandable_segments")


def nccl_communicates() -> bool:
    """Whether a process group has a communicator of NCCL's; one that is being made counts."""
    from torch.distributed import distributed_c10d, is_available, is_nccl_available

    if not is_available() or not is_nccl_available():
        return False
    device = torch.device("cuda")
    for group in distributed_c10d._world.pg_map:
        with contextlib.suppress(RuntimeError):  # of other devices only
            backend: Any = group._get_backend(device)
            backend = getattr(backend, "wrapped_pg", backend)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
            if isinstance(backend, distributed_c10d.ProcessGroupNCCL):
                is_initialized = getattr(backend, "_is_initialized", None)
                if is_initialized is None or is_initialized():
                    return True
    return False


class _Number(int):
    """No object that anybody else uses."""


@functools.cache
def _drops_references() -> bool:
    """Whether asking for a pool's memory drops a reference too many to the pool's numbers."""
    number = _Number(0)
    held = [number, number]  # more than can be dropped
    before = sys.getrefcount(number)
    torch.cuda.memory_snapshot((number, _Number(2**40)), include_traces=False)  # of no pool
    dropped = before - sys.getrefcount(number)
    for _ in range(dropped):
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(number))
    del held
    return dropped > 0


def current_raw_stream(device: int) -> int:
    """The current stream's handle as an integer, without building a `torch.cuda.Stream`."""
    return torch._C._cuda_getCurrentRawStream(device)


def have_stale_streams_follow(follow: bool) -> bool:
    """Whether autograd's nodes that were made on other streams run where a capture does; returns what was set before.

    Does nothing in a torch that has no such setting.

    Source: torch/autograd/graph.py `set_override_stale_capture_stream`, 2.15.
    """
    before: Any = getattr(torch._C, "_override_stale_capture_stream", None)
    if before is None:
        return False
    found = before()
    torch.autograd.graph.set_override_stale_capture_stream(follow)
    return found


def is_capturing() -> bool:
    """Whether the current stream is being captured by anybody."""
    return torch._C._cuda_isCurrentStreamCapturing()


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Have operators run for real, whatever traces or watches them here, and record no gradients."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    clear = temporarily_clear_interpreter_stack if in_functorch() else contextlib.nullcontext
    keys = torch._C._ForceDispatchKeyGuard(*_KEYS_OF_A_THREAD)
    with clear(), keys, _disable_current_modes(), torch.inference_mode(False), torch.no_grad():
        yield


def _dispatch_keys() -> tuple[Any, Any]:
    return (
        torch._C._dispatch_tls_local_include_set(),
        torch._C._dispatch_tls_local_exclude_set(),
    )


def _in_a_thread(fn: Callable[[], Any]) -> Any:
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(fn()))
    thread.start()
    thread.join()
    return found[0]


_KEYS_OF_A_THREAD = _in_a_thread(_dispatch_keys)
"""Dispatch keys that a thread starts with: whoever imports this may have others. Fake tensors' kernels run with the
meta device's (torch/_subclasses/fake_tensor.py `in_kernel_invocation_manager`, 2.11 to 2.15)."""


# ---- counters and traces


def dynamo_counters() -> MutableMapping[str, Any]:
    """What torch counts, by who does: `collections.Counter`s."""
    from torch._dynamo.utils import counters

    return counters


def compilations() -> list[Any]:
    """What torch noted of compilations, oldest first: which function each was of, how it went, why it was needed.

    Backwards that are compiled when they first run are among them, without a function's name. Dynamo is not loaded for
    it: a script may still set what that reads when it is.

    Source: torch/_dynamo/utils.py `CompilationMetrics`, `get_compilation_metrics`, 2.11 to 2.15.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    return [] if utils is None else list(utils.get_compilation_metrics())


def frames_compiled() -> int:
    """Functions that Dynamo was to compile since `torch.compiler.reset()`; their numbers in notes are below it.

    Source: torch/_dynamo/convert_frame.py `FRAME_COUNTER`, 2.11 to 2.15.
    """
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0)


def note_compilations(limit: int) -> int | None:
    """Have torch keep so many of its newest notes; returns how many it kept, None if Dynamo is not loaded.

    Source: torch/_dynamo/utils.py `set_compilation_metrics_limit`, 64 by default, 2.11 to 2.15.
    """
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        return None
    before = utils._compilation_metrics.maxlen
    utils.set_compilation_metrics_limit(limit)
    return before


def was_given_up(compilation: Any) -> bool:
    """Whether a compilation ended in a function, or what is left of it, that runs in eager.

    Source: torch/_dynamo/convert_frame.py `ConvertFrame.__call__`, 2.11 to 2.15.
    """
    from torch._dynamo import exc

    if not compilation.fail_type:
        return False
    kind = getattr(exc, compilation.fail_type, None)
    soft = isinstance(kind, type) and issubclass(kind, (exc.Unsupported, exc.UserError))
    return soft or bool(compilation.config_suppress_errors)


@dataclass(eq=False, slots=True)
class GraphBreak:
    """What Dynamo said of a graph break."""

    code: types.CodeType
    """Of the function that was compiled and had it, in itself or in what it calls."""
    compile_id: str
    text: str
    stack: tuple[traceback.FrameSummary, ...]
    """All frames that it was traced through, outermost first."""
    thread: int
    told: bool = False
    """Whether a graph tells of it."""
    over: bool = False
    """Whether Dynamo forgot since what it compiled."""

    @property
    def function(self) -> tuple[str, str]:
        """File and name."""
        return self.code.co_filename, self.code.co_name

    @property
    def line(self) -> traceback.FrameSummary | None:
        """The innermost."""
        return self.stack[-1] if self.stack else None

    def was_met_by(self, ran: Container[types.CodeType]) -> bool:
        """Whether what was compiled when it was met, or left to eager for it, is among code that ran.

        Source: torch/csrc/dynamo/cache_entry.h, `CacheEntry`, 2.11 to 2.15.
        """
        from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list

        if self.over:
            return False
        entries = _debug_get_cache_entry_list(self.code)
        made = [entry.code for entry in entries if str(entry.compile_id) == self.compile_id]
        return any(code in ran for code in made or [self.code])


_graph_breaks: deque[GraphBreak] = deque(maxlen=1024)


def note_graph_breaks() -> None:
    """Have graph breaks noted from now on; nothing happens as long as Dynamo is not loaded.

    Where Dynamo can't go on behind one, the graph that it compiles before it carries no word of it; where no operator
    is before it there is no such graph. Those of functions that are compiled for another backend are left out.

    Source: torch/_dynamo/symbolic_convert.py `InstructionTranslatorBase.log_graph_break`, 2.11 to 2.15.
    """
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    kind = getattr(convert, "InstructionTranslatorBase", None)
    log = getattr(kind, "log_graph_break", None)
    if kind is None or log is None or hasattr(log, "_notes_for_cgpass"):
        return
    from torch._guards import CompileContext

    @functools.wraps(log)
    def noting(self: Any, *args: Any, **kwargs: Any) -> Any:
        if _is_for_us(self):
            error = kwargs.get("exc", args[-1] if args else None)
            _graph_breaks.append(
                GraphBreak(
                    self.f_code,
                    str(CompileContext.current_compile_id()),
                    str(getattr(error, "msg", None) or error),
                    tuple(getattr(error, "real_stack", None) or ()),
                    threading.get_ident(),
                )
            )
        return log(self, *args, **kwargs)

    noting._notes_for_cgpass = True  # pyrefly: ignore[missing-attribute]
    kind.log_graph_break = noting


def _is_for_us(translator: Any) -> bool:
    """Whether what is compiled goes to our backend, by whatever name.

    Source: torch/_dynamo/repro/after_dynamo.py `WrapBackendDebug`, 2.11 to 2.15.
    """
    backend = getattr(getattr(translator, "output", None), "compiler_fn", None)
    while backend is not None:
        name = getattr(backend, "_compiler_name", None) or getattr(backend, "__name__", None)
        if str(name).startswith("cgpass"):
            return True
        inside = ("_torchdynamo_orig_backend", "compiler_fn", "func")
        backend = next((found for each in inside if (found := getattr(backend, each, None))), None)
    return False


def graph_breaks() -> list[GraphBreak]:
    """The newest of this process since they are noted, oldest first."""
    return list(_graph_breaks)


def end_graph_breaks() -> None:
    """Note that Dynamo forgets all that it compiled so far."""
    for each in graph_breaks():
        each.over = True


def is_traced() -> bool:
    """Whether torch's structured trace goes to a file (`TORCH_TRACE`). Handlers of others (pytest's) do not count.

    Source: torch/_logging/_internal.py `trace_log`, `LazyTraceHandler`, 2.11 to 2.15.
    """
    handlers = logging.getLogger("torch.__trace").handlers
    return bool(handlers) and any(map(_writes_a_trace, handlers))


def _writes_a_trace(handler: logging.Handler) -> bool:
    from torch._logging._internal import LazyTraceHandler

    return isinstance(handler, LazyTraceHandler) and bool(handler.root_dir or handler.stream)


def current_trace_id() -> Any:
    """What traces list the compilation that runs now under, None outside of one."""
    from torch._guards import CompileContext

    return CompileContext.current_trace_id()


@contextlib.contextmanager
def traced_under(trace_id: Any) -> Iterator[None]:
    """A block whose traces are listed under a compilation that is over; None: under none.

    Source: torch/_guards.py `CompileContext`, 2.11 to 2.15.
    """
    from torch._guards import CompileContext, compile_context

    if trace_id is None:
        yield
        return
    context = CompileContext(trace_id.compile_id)
    context.attempt = trace_id.attempt
    with compile_context(context):
        yield


def trace_artifact(name: str, encoding: str, payload: Callable[[], str]) -> None:
    """Add a text to the structured trace.

    Args:
        name: Of the text; tlparse makes it a file's name.
        encoding: "string" or "json".
        payload: Makes it; not called while nothing is traced.

    Source: torch/_logging/_internal.py `trace_structured_artifact`, 2.11 to 2.15.
    """
    from torch._logging import trace_structured

    trace_structured(
        "artifact",
        metadata_fn=lambda: {"name": name, "encoding": encoding},
        payload_fn=payload,
        expect_trace_id=False,
    )


def traced_event(name: str) -> contextlib.AbstractContextManager[Any]:
    """A block that is an event of the structured trace's timeline.

    Source: torch/_dynamo/utils.py `chromium_event_timed`, 2.11 to 2.15.
    """
    from torch._dynamo.utils import chromium_event_timed

    return chromium_event_timed(name)


def trace_past_event(
    name: str,
    span_ns: tuple[int, int],
    metadata: Mapping[str, Any],
    inner: Sequence[tuple[str, tuple[int, int]]] = (),
) -> None:
    """Add an event that is over to the structured trace's timeline.

    Args:
        name: Of the event.
        span_ns: When it began and ended, by `time.time_ns`.
        metadata: What else is known of it.
        inner: Names and spans of events within it, one after the other.

    Source: torch/_dynamo/utils.py `ChromiumEventLogger`, 2.11 to 2.15.
    """
    from torch._dynamo.utils import get_chromium_event_logger

    log = get_chromium_event_logger()
    log.log_event_start(name, span_ns[0], dict(metadata))
    for each, (start, end) in inner:
        log.log_event_start(each, start, {})
        log.log_event_end(each, end, {}, start, False)
    log.log_event_end(name, span_ns[1], {}, span_ns[0], False)


# ---- profiles

profiler_state: Any = torch.autograd.profiler
"""Has `_is_profiler_enabled`: whether `torch.profiler` records now, in whatever thread. Reading it takes 15 ns, the
function `torch.autograd._profiler_enabled` 70 ns, and a range that nobody records 340 ns.

Source: torch/autograd/profiler.py `_set_is_profiler_enabled`, 2.11 to 2.15.
"""


def profiler_range(name: str) -> contextlib.AbstractContextManager[Any]:
    """A block that is a range of this name in a profile. It calls no operator, so no dispatch mode sees it.

    Source: torch/csrc/autograd/profiler_python.cpp, `_RecordFunctionFast`, 2.11 to 2.15.
    """
    return torch._C._profiler._RecordFunctionFast(name)


def can_annotate_kernels() -> bool:
    """Whether this torch lists, by profilers' ids, what the kernels of a CUDA graph belong to; 2.15 does.

    Source: torch/cuda/graph_annotations.py. What 2.13 has in its place is on for the whole process.
    """
    return importlib.util.find_spec("torch.cuda.graph_annotations") is not None


@contextlib.contextmanager
def annotating_kernels(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """A block in which `graph` is captured and notes what its kernels belong to.

    Does what `torch.cuda.graph(..., enable_annotations=True)` does, which also waits for the device and empties caches.

    Source: torch/cuda/graphs.py `graph.__enter__`, `__exit__`, and torch/cuda/_graph_annotations.py, 2.15.
    """
    from torch.cuda import _graph_annotations as notes

    hooks = (
        graph.register_capture_start_hook(notes.maybe_stamp_capture_root),
        graph.register_capture_end_hook(lambda graph: notes.resolve_pending_annotations()),
    )
    notes._set_annotations_enabled(True)
    try:
        yield
    except BaseException:
        notes.discard_capture_annotations(graph)
        raise
    finally:
        notes._set_annotations_enabled(False)
        for hook in hooks:
            hook.remove()


def belonging_to(what: dict[str, str], fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, whose kernels are said to belong to something where a graph notes that.

    Args:
        what: "name" and all else that profiles are to show.
        fn: What launches them. Such functions may call others: inner ones add to what outer ones say.
    """
    from torch.cuda.graph_annotations import mark_kernels

    def marked(*args: Any, **kwargs: Any) -> Any:
        with mark_kernels(what, backward=False):
            return fn(*args, **kwargs)

    return marked


# ---- backward passes


def graph_task() -> int:
    """Number of the backward pass that this thread works for, negative outside of one. Numbers don't come back.

    Source: torch/csrc/autograd/graph_task.h, 2.11 to 2.15.
    """
    return torch._C._current_graph_task_id()


def after_backward(callback: Callable[[], None]) -> None:
    """Have the running backward pass call something when it is done; not if it fails.

    Source: torch/csrc/autograd/engine.h `queue_callback`, 2.11 to 2.15.
    """
    engine: Any = torch.autograd.Variable._execution_engine  # pyrefly: ignore
    engine.queue_callback(callback)


def set_versions(tensors: Sequence[torch.Tensor], versions: Sequence[int]) -> None:
    """Have the version counters of tensors, which their views share, say something else.

    Source: torch/autograd/grad_mode.py `_unsafe_preserve_version_counter`, 2.11 to 2.15.
    """
    torch._C._autograd._unsafe_set_version_counter(tuple(tensors), tuple(versions))


def saved_on(node: Any) -> Iterator[Any]:
    """What a node of an autograd graph saved: a `torch._C._autograd.SavedTensor` each."""
    for name in _raw_saved(type(node)):
        value = getattr(node, name)
        yield from value if isinstance(value, tuple) else (value,)


def saved_tensor(saved: Any) -> torch.Tensor | None:
    """The tensor that was saved, and that autograd checks the version of; None if hooks packed it or it was freed.

    The node's backward gets what it would have got.

    Args:
        saved: Of `saved_on`.

    Source: torch/csrc/autograd/init.cpp, `SavedTensor.data`, 2.11 to 2.15: the very tensor, or what hooks made of it.
    """
    return saved.data if unpack_hook(saved) is None else None


@contextlib.contextmanager
def no_outer_saved_tensors_hooks() -> Iterator[None]:
    """A block in which only those hooks of saved tensors are called that are set in it.

    Source: torch/csrc/autograd/python_saved_variable_hooks.cpp, `PyDefaultSavedVariableHooks`, 2.11 to 2.15: a stack
    for each thread.
    """
    autograd = torch._C._autograd
    hooks = []
    while (top := autograd._top_saved_tensors_default_hooks(True)) is not None:
        hooks.append(top)
        autograd._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            autograd._push_saved_tensors_default_hooks(pack, unpack)


def unpack_hook(saved: Any) -> Any:
    """What will give a saved tensor back, if hooks have packed it."""
    return getattr(saved, "unpack_hook", None)


def kept_by_checkpoint(hook: Any) -> list[Any]:
    """What torch's checkpoint without reentrancy keeps of its arguments, as of `saved_on`, where a hook is one of its.

    Source: torch/utils/checkpoint.py `_checkpoint_hook`, `_CheckpointFrame`: `input_saver` in 2.11, `saved_args` since
    2.13.
    """
    if getattr(hook, "__module__", None) != "torch.utils.checkpoint":
        return []
    cells = zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True)
    frame = next((cell.cell_contents for name, cell in cells if name == "frame"), None)
    saver = getattr(frame, "input_saver", None)
    if saver is not None:
        return list(saved_on(saver.grad_fn))
    return [arg for arg in getattr(frame, "saved_args", ()) if hasattr(arg, "register_hooks")]


@functools.cache
def _raw_saved(kind: type) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


def accumulates_everywhere() -> bool:
    """Whether the running backward pass fills every `.grad`: not for `autograd.grad` or `backward(inputs=...)`.

    Source: torch/autograd/__init__.py `_is_checkpoint_valid`, 2.11 to 2.15.
    """
    return torch.autograd._is_checkpoint_valid()


@contextlib.contextmanager
def checkpoint_hooks(
    pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
) -> Iterator[None]:
    """`saved_tensors_hooks` that torch's selective checkpoint policies know to be a checkpoint's, not the user's.

    Source: torch/utils/checkpoint.py `_current_user_saved_tensors_hooks`, 2.15; 2.11 does not look.
    """
    from torch.utils import checkpoint

    outer = getattr(checkpoint, "_current_user_saved_tensors_hooks", None)
    marked: Any = functools.partial(pack)
    marked._checkpoint_internal = True
    marked._user_hooks = None if outer is None else outer()
    try:
        with torch.autograd.graph.saved_tensors_hooks(marked, unpack):
            yield
    finally:
        del (
            marked._user_hooks
        )  # the graph keeps `marked`, and must not keep the user's hooks through it


def outside_dynamo(fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn`, never traced by Dynamo, nor what it calls."""
    return torch._disable_dynamo(fn)


# ---- Dynamo, AOTAutograd


_registering = threading.Lock()


def register_backend(name: str, backend: Callable[..., Any]) -> None:
    """Have Dynamo know a backend that was given as a function.

    For backends that it knows, newer versions drop the weak references to parameters that tracing leaves behind;
    with them `torch.utils.swap_tensors` refuses the parameters.

    Source: torch/_dynamo/convert_frame.py, `_is_registered_backend`, 2.15; the registry is the same from 2.11 on.
    """
    from torch._dynamo.backends import registry

    with _registering:
        if name not in registry._COMPILER_FNS:
            registry.register_backend(backend, name=name)


@contextlib.contextmanager
def backend_for_once(backend: Callable[..., Any]) -> Iterator[Callable[..., Any]]:
    """A backend that does what another one does, but shares nothing that Dynamo compiled with it.

    Afterwards Dynamo knows nothing of what it compiled with it, so that it does not count towards `recompile_limit`
    either: entries that are invalid do, unless they guard on another object. Where it reached that limit, Dynamo would
    compile nothing of the function any more.

    Source: torch/_dynamo/guards.py `CheckFunctionManager.invalidate`, cache_size.py `_has_same_id_matched_objs`,
    convert_frame.py `FrameAction.RUN_ONLY`, 2.11 to 2.15.
    """
    from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list, set_code_exec_strategy
    from torch._dynamo.backends import registry
    from torch._dynamo.convert_frame import register_bytecode_hook
    from torch._dynamo.guards import DeletedGuardManagerWrapper
    from torch._dynamo.types import FrameAction, FrameExecStrategy

    once: Any = functools.partial(backend)
    codes, nothing_like_it = set[types.CodeType](), object()

    def note(code: types.CodeType, new_code: types.CodeType) -> None:
        del new_code
        codes.add(code)

    functools.update_wrapper(once, backend)  # messages name it
    del once.__wrapped__
    name = f"{backend.__name__}_{id(once)}"
    registry._COMPILER_FNS[name] = once  # as of `register_backend`
    hook = register_bytecode_hook(note)
    try:
        yield once
    finally:
        hook.remove()
        del registry._COMPILER_FNS[name]
        for code in codes:
            # It compiled something of it, so this is what it did before.
            set_code_exec_strategy(
                code, FrameExecStrategy(FrameAction.DEFAULT, FrameAction.DEFAULT)
            )
            for entry in _debug_get_cache_entry_list(code):
                if _innermost_backend(entry.backend) is once:
                    deleted: Any = DeletedGuardManagerWrapper("it was compiled to be explained")
                    deleted.id_matched_objs = {"": lambda: nothing_like_it}
                    manager: Any = entry.guard_manager
                    manager.extra_state.invalidate(entry, deleted)


def _innermost_backend(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return getattr(backend, "compiler_fn", backend)


def is_compiled(fn: Any) -> bool:
    """Whether `torch.compile` returned a callable, or was called on a module in place.

    What `torch.compiler.disable` returns carries its original, too, and a mark.

    Source: torch/_dynamo/eval_frame.py `OptimizedModule`, `_TorchDynamoContext.__call__`, 2.11 to 2.15.
    """
    if isinstance(fn, torch.nn.Module):
        from torch._dynamo.eval_frame import OptimizedModule

        return isinstance(fn, OptimizedModule) or fn._compiled_call_impl is not None
    return hasattr(fn, "_torchdynamo_orig_callable") and not is_disabled(fn)


def is_compiled_by(fn: Any, backend: Callable[..., Any]) -> bool:
    """Whether `torch.compile` returned a function or module that a backend compiles, as far as that can be seen.

    Source: torch/_dynamo/eval_frame.py `OptimizedModule`, `_TorchDynamoContext.__call__`, 2.11 to 2.15.
    """
    from torch._dynamo.eval_frame import OptimizedModule

    if isinstance(fn, OptimizedModule):
        return _innermost_backend(getattr(fn.dynamo_ctx, "callback", None)) is backend
    if not isinstance(fn, types.FunctionType) or not is_compiled(fn):
        return False
    cells = zip(fn.__code__.co_freevars, fn.__closure__ or (), strict=True)
    around = {name: cell for name, cell in cells if name == "callback"}
    return any(_innermost_backend(cell.cell_contents) is backend for cell in around.values())


def is_disabled(fn: Any) -> bool:
    """Whether `torch.compiler.disable` returned a function."""
    return bool(getattr(fn, "_torchdynamo_disable", False))


@contextlib.contextmanager
def double_backwards_raise(error: Callable[[], Exception]) -> Iterator[None]:
    """Have what AOTAutograd compiles inside raise an error of ours where its gradients are differentiated again.

    AOTAutograd makes an autograd function for each graph, whose gradients under `create_graph=True` end in a node that
    raises; ours does before it.

    Source: torch/_functorch/_aot_autograd/runtime_wrappers.py, `CompiledFunction`, 2.11 to 2.15.
    """
    from torch.autograd.function import FunctionMeta

    init: Any = FunctionMeta.__init__

    def noting(cls: Any, name: str, bases: Any, attrs: Any) -> None:
        init(cls, name, bases, attrs)
        if name == "CompiledFunction" and cls.__module__.startswith("torch._functorch."):
            cls.backward = staticmethod(_once_differentiable(cls.backward, error))

    with _replaced(FunctionMeta, "__init__", noting):
        yield


def _once_differentiable(
    backward: Callable[..., Any], error: Callable[[], Exception]
) -> Callable[..., Any]:
    def refuse(grads: Any) -> None:
        del grads
        raise error()

    def once(ctx: Any, *grads: Any) -> Any:
        found = backward(ctx, *grads)
        if torch.is_grad_enabled():  # create_graph=True
            nodes = {value.grad_fn for value in found if isinstance(value, torch.Tensor)}
            for node in nodes:
                if node is not None:
                    node.register_prehook(refuse)
            found = only_once(found, error)
        return found

    return once


def only_once(values: Sequence[Any], error: Callable[[], Exception]) -> tuple[Any, ...]:
    """Values of which the tensors require grad, and raise an error of ours where they are differentiated."""
    places = [
        n for n, v in enumerate(values) if isinstance(v, torch.Tensor) and not v.requires_grad
    ]
    tensors = [values[n] for n in places]
    if not tensors:
        return tuple(values)
    leaf = torch.empty(0, requires_grad=True)
    results = list(values)
    made = _OnlyOnce.apply(error, leaf, *tensors)
    for n, value in zip(places, made, strict=True):
        results[n] = value
    return tuple(results)


class _OnlyOnce(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[torch.Tensor, ...]:  # pyrefly: ignore[bad-override]
        ctx.error, _, *tensors = args
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # pyrefly: ignore[bad-override]
        raise ctx.error()


Restore = Callable[[Any, Mapping[str, Any]], Callable[[list[Any]], Any]]
_restore: contextvars.ContextVar[Restore | None] = contextvars.ContextVar("_restore", default=None)


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    inner_compile: Callable[..., Any],
    partition_fn: Callable[..., Any],
    config_patches: Mapping[str, Any],
    cache_key: str | None = None,
    restore: Restore | None = None,
) -> Callable[..., Any]:
    """Run `compile_fx` with our split and our compiler of the split graphs.

    Args:
        gm: Dynamo's graph.
        example_inputs: Its inputs.
        inner_compile: Makes a forward, backward or inference graph callable. With a cache key: by `cached_code`.
        partition_fn: Splits a joint graph.
        config_patches: Inductor's settings.
        cache_key: What AOTAutograd's cache adds to its own key. None to leave that cache off: a hit calls neither of
            the two.
        restore: Called on a hit for each graph, with what `cached_code` was given and what the graph is compiled with.
    """
    from torch._functorch import config as functorch_config
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

    class Partitioner(CustomPartitionerFn):
        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            return partition_fn(*args, **kwargs)

        def uuid(self) -> str:
            return str(cache_key)

        def __reduce__(self) -> tuple[Any, ...]:
            return str, (self.uuid(),)

    patches = {
        **config_patches,
        "triton.cudagraphs": False,
        "custom_partitioner_fn": Partitioner(),
    }
    settings = {"enable_autograd_cache": False}
    if cache_key is not None:
        # What is kept is what the compiler gave, forward and backward together: both are compiled at once.
        names = ("enable_autograd_cache", "bundled_autograd_cache")
        settings = dict.fromkeys((*names, "force_non_lazy_backward_lowering"), True)
    token = _restore.set(restore)
    try:
        with functorch_config.patch(settings):
            compiled: Any = compile_fx(
                gm, list(example_inputs), inner_compile=inner_compile, config_patches=patches
            )
    finally:
        _restore.reset(token)
    return compiled


# ---- AOTAutograd's cache


def keeps_graphs() -> bool:
    """Whether AOTAutograd's cache is on, and nothing here and now is traced that its key doesn't know of."""
    from torch._dynamo import config as dynamo_config
    from torch._functorch import config
    from torch._inductor import config as inductor_config

    return (
        config.enable_autograd_cache
        and not config.strict_autograd_cache  # which takes a graph that can't be kept for an error
        and not torch.compiler.config.force_disable_caches
        and inductor_config.fx_graph_cache
        and not getattr(dynamo_config, "caching_precompile", False)
        and not uses_compiled_autograd()
        and not _has_default_saved_tensors_hooks()
        and not _knows_external_objects()
        and not has_process_groups()
        and not any(map(callable, settings_of_no_key()))
        and not _has_formulas_of_others()
        and not _has_patterns_of_others()
    )


def settings_of_no_key() -> tuple[Any, ...]:
    """AOTAutograd's settings that its key leaves out: passes and solvers, which may be callables.

    Source: torch/_functorch/config.py `_save_config_ignore`, 2.11 to 2.15.
    """
    from torch._functorch import config

    return tuple(getattr(config, name) for name in config._save_config_ignore)


def formulas(namespaces: Collection[str]) -> Iterator[str]:
    """Which formula Inductor has for each operator of some namespaces, which no key of torch's tells.

    Source: torch/_inductor/decomposition.py `decompositions`, 2.11 to 2.15.
    """
    from torch._inductor.decomposition import decompositions

    for op, fn in decompositions.items():
        if getattr(op, "namespace", None) not in namespaces:
            continue
        given: tuple[Any, ...] = ()
        while isinstance(fn, functools.partial):
            given += (fn.args, sorted(fn.keywords.items()))
            fn = fn.func
        name = getattr(fn, "__qualname__", type(fn).__qualname__)
        yield f"{op} {getattr(fn, '__module__', '')}.{name} {given or ''}"


_KERNELS = frozenset(
    {
        *("CPU", "CUDA", "MPS", "Meta", "Python", "BackendSelect", "ADInplaceOrView"),
        *("PythonTLSSnapshot", "FuncTorchDynamicLayerFrontMode"),  # torch's own are in Python
    }
)
"""Dispatch keys whose kernels leave a trace as it is."""


def _has_formulas_of_others() -> bool:
    """Whether somebody put formulas of his own in the place of those of torch's operators.

    Source: torch/library.py `_impls` and torch/_inductor/decomposition.py, 2.11 to 2.15.
    """
    from torch._inductor.decomposition import decompositions

    made: Any = getattr(torch.library, "_impls", frozenset())
    # torch.vmap's formulas come with its first call
    vmap = sys.modules.get("torch._functorch.predispatch")
    made = made - getattr(getattr(vmap, "VMAP_DECOMPOSITIONS_LIB", None), "_op_impls", set())
    if any(n.startswith("aten/") and n.rpartition("/")[2] not in _KERNELS for n in made):
        return True
    return not _are_torchs(decompositions.values())


def _has_patterns_of_others() -> bool:
    """Whether somebody has Inductor replace what he chose in joint graphs.

    Source: torch/_inductor/fx_passes/joint_graph.py and torch/_inductor/pattern_matcher.py, 2.11 to 2.15.
    """
    from torch._inductor.fx_passes import joint_graph

    for patterns in (joint_graph.early_patterns, *joint_graph.pass_patterns):
        for entry in itertools.chain.from_iterable(patterns.patterns.values()):
            if not _are_torchs(filter(callable, vars(entry).values())):
                return True
    return False


def _are_torchs(found: Iterable[Any]) -> bool:
    """Whether callables are torch's, and functions that they were made with."""
    waiting, seen = list(found), set[int]()
    while waiting:
        value = waiting.pop()
        value = value.func if isinstance(value, functools.partial) else value
        if id(value) in seen:
            continue
        seen.add(id(value))
        if str(getattr(value, "__module__", "")).partition(".")[0] != "torch":
            return False
        for cell in getattr(value, "__closure__", None) or ():
            with contextlib.suppress(ValueError):  # of a name that is not bound
                held = cell.cell_contents
                if isinstance(held, (types.FunctionType, functools.partial)):
                    waiting.append(held)
    return True


def is_plain_tensor(tensor: torch.Tensor) -> bool:
    """Whether a tensor, fake or real, is strided, no subclass's, and of known size."""
    from torch._subclasses.fake_tensor import FakeTensor

    kinds = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer, FakeTensor)
    if type(tensor) not in kinds or tensor.layout != torch.strided or tensor.is_quantized:
        return False
    return not has_symbolic_sizes(tensor)


def has_symbolic_sizes(tensor: torch.Tensor) -> bool:
    """Whether a size, stride or offset of a tensor is symbolic; of some that are not strided it is said, too."""
    return tensor._has_symbolic_sizes_strides


def attention_order() -> Any:
    """In which order kernels of attention are tried."""
    return torch._C._get_sdp_priority_order()


def pickled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> bytes:
    """A graph with all that is known of its nodes, and its fake inputs. Raises what pickle does."""
    from torch.fx._graph_pickler import Options

    options = Options(ops_filter=None, node_metadata_key_filter=None)
    return _pickler_type().dumps((gm, tuple(inputs)), options=options)


@functools.cache
def _pickler_type() -> Any:
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx._graph_pickler import GraphPickler

    class Pickler(GraphPickler):
        """Fake tensors that are views know the mode of what they are views of: torch pickles that from 2.15 on."""

        def reducer_override(self, obj: object) -> Any:
            if isinstance(obj, FakeTensorMode):
                return _mode_of, (self._unpickle_state,)
            return super().reducer_override(obj)

    return Pickler


def _mode_of(state: Any) -> Any:
    return state.fake_mode


def unpickled(data: bytes) -> tuple[torch.fx.GraphModule, tuple[Any, ...]]:
    """What `pickled` was given, in the fake mode of what is being compiled."""
    from torch._guards import TracingContext
    from torch.fx._graph_pickler import GraphPickler

    mode: Any = TracingContext.get().fake_mode
    found: Any = GraphPickler.loads(data, mode)
    gm, inputs = found
    return lazy_graph_module(gm, gm.graph), inputs


def forward_metadata() -> Any:
    """What AOTAutograd knows of the inputs and outputs of the graphs that it compiles now."""
    from torch._guards import TracingContext

    return TracingContext.get().fw_metadata


def set_forward_metadata(metadata: Any) -> None:
    """Have it known again where AOTAutograd did not trace."""
    from torch._guards import TracingContext

    TracingContext.get().fw_metadata = metadata


def cached_code(fn: Callable[[list[Any]], Any] | None, kept: Any) -> Any:
    """A compiled graph that AOTAutograd's cache keeps as `kept`, which has to be picklable; None to keep nothing.

    Source: torch/_inductor/output_code.py `OutputCode` and torch/_functorch/_aot_autograd/aot_autograd_result.py
    `BundledOutputCodeLoadable`, 2.11 to 2.15.
    """
    return _cached_code_type()(fn, kept)


@functools.cache
def _cached_code_type() -> Any:
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.output_code import OutputCode

    class CachedCode(OutputCode):
        def __init__(self, fn: Callable[[list[Any]], Any] | None, kept: Any) -> None:
            self.fn = fn
            self.kept = kept
            self._boxed_call = True  # who wraps it copies what it has of its own

        def __call__(self, inputs: Any) -> Any:
            assert self.fn is not None
            return self.fn(inputs)

        def __reduce__(self) -> tuple[Any, ...]:
            return cached_code, (None, self.kept)

        def __copy__(self) -> Any:  # the copy is what is saved, which this one need not be any more
            kept, self.kept = self.kept, None
            return cached_code(None, kept)

        def prepare_for_serialization(self) -> None:
            if self.kept is None:
                raise BypassAOTAutogradCache("cgpass can't keep this graph")

        def post_compile(self, example_inputs: Any, constants: Any, graph_kwargs: Any) -> None:
            restore = _restore.get()
            assert restore is not None
            self.fn, self.kept = restore(self.kept, graph_kwargs), None

    return CachedCode


@contextlib.contextmanager
def compiled_by_themselves() -> Iterator[None]:
    """Have Inductor use its own cache for graphs that AOTAutograd's keeps before they are compiled."""
    from torch._functorch import config

    with config.patch(bundled_autograd_cache=False):
        yield


def compile_with_aten(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    forward: Callable[..., Any],
    backward: Callable[..., Any],
    inference: Callable[..., Any],
    partition_fn: Callable[..., Any],
) -> Callable[..., Any]:
    """Run AOTAutograd without Inductor and without decompositions.

    Tokens that order effects are made in the graph, as for Inductor: as inputs of the graph they would shift what
    AOTAutograd says of inputs and outputs by their positions.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch import config as functorch_config

    backend = aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        inference_compiler=inference,
        partition_fn=partition_fn,
        keep_inference_input_mutations=True,
    )
    with functorch_config.patch(enable_autograd_cache=False, unlift_effect_tokens=True):
        return backend(gm, list(example_inputs))


def inductor_inner(
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], **kwargs: Any
) -> Callable[[list[Any]], Any]:
    """`compile_fx_inner` with Inductor's own CUDA graphs off; boxed.

    Our split is taken out of Inductor's configuration: it has done its work, and Inductor's code cache can't pickle it.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import BoxedBool

    kwargs["cudagraphs"] = BoxedBool(False)
    with config.patch(custom_partitioner_fn=None):
        return compile_fx_inner(gm, example_inputs, **kwargs)


@contextlib.contextmanager
def own_tracing_context(
    inputs: Sequence[Any], late: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """A fresh TracingContext with the ambient fake mode, for compiling one piece of a graph.

    A second piece in the same context trips Inductor's check that output strides are reported once, and a piece
    would read the whole backward graph's donated buffers by position.

    Args:
        inputs: Of the piece, fake: their mode is taken where there is no ambient one.
        late: Inductor's settings, if torch.compile is done and the piece is compiled in the middle of a call.
    """
    from torch._guards import TracingContext, tracing
    from torch._inductor import config

    outer = TracingContext.try_get()
    mode = None if outer is None else outer.fake_mode
    if mode is None:
        modes = (getattr(value, "fake_mode", None) for value in inputs)
        mode = next((found for found in modes if found is not None), None)
    with contextlib.ExitStack() as stack:
        if late is not None:
            stack.enter_context(config.patch(dict(late)))
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.no_grad())
            stack.enter_context(torch._C._DisableAutocast())
        stack.enter_context(tracing(TracingContext(mode)))
        yield


@contextlib.contextmanager
def sizes_assumed(values: Sequence[Any]) -> Iterator[list[Any]]:
    """Note what compiling assumes of symbolic sizes, and have torch forget it afterwards.

    Once Dynamo has written its guards, nobody checks what is assumed later. It is undone so that nothing else that
    is compiled relies on it: only who gets the notes knows of them.

    Args:
        values: A graph's inputs, fake.

    Returns:
        In a context, a list that is filled at its end: conditions on symbols, beyond those that Dynamo checks.

    Source: torch/fx/experimental/symbolic_shapes.py `ShapeEnv`, `_check_frozen`, `_lru_cache`, 2.11 to 2.15.
    """
    found = (_shape_env(value) for value in values)
    env = next((env for env in found if env is not None), None)
    assumed: list[Any] = []
    if env is None:
        yield assumed
        return
    before = {name: _copied_state(value) for name, value in vars(env).items()}
    num_known = len(env.guards)
    env.frozen = False
    _forget_evaluated(env)
    try:
        yield assumed
        assumed += [guard.expr for guard in env.guards[num_known:]]
    finally:
        # Caches go by these numbers, which must not come back.
        versions = {k: v + 1 for k, v in vars(env).items() if k.endswith("version_counter")}
        vars(env).clear()
        vars(env).update(before | versions)
        _forget_evaluated(env)


def _forget_evaluated(env: Any) -> None:
    """Empty the caches of a ShapeEnv's methods: an answer from there leaves no guard."""
    for method in vars(type(env)).values():
        clear = getattr(method, "cache_clear", None)
        if clear is not None:
            clear()


def _shape_env(value: Any) -> Any:
    if isinstance(value, torch.SymInt):
        return value.node.shape_env
    return getattr(getattr(value, "fake_mode", None), "shape_env", None)


def _copied_state(value: Any) -> Any:
    """A copy of a collection and, in a dict, of the collections in it; anything else as it is."""
    if not isinstance(value, (MutableMapping, MutableSequence, MutableSet)):
        return value
    collection: Any = value
    copied = collection.copy()
    if isinstance(value, MutableMapping):
        for key, inner in value.items():
            copied[key] = _copied_state(inner)
    return copied


def report_output_strides(strides: Sequence[tuple[Any, ...] | None]) -> None:
    """Tell AOTAutograd the strides of a forward graph's outputs, so that the backward is compiled for them."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.output_strides is not None and not context.output_strides:
        context.output_strides.extend(strides)


def static_input_indices(gm: torch.fx.GraphModule, *, inference: bool) -> tuple[int, ...]:
    """Positions of a forward or inference graph's inputs that AOTAutograd knows to keep their address."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata = None if context is None else context.fw_metadata
    if metadata is None:
        return ()
    shift = 0
    if inference and _counts_tokens_as_inputs():
        made = (str(node.target) for node in gm.graph.nodes)
        shift = sum(name == "prims._make_token.default" for name in made)
    return tuple(i - shift for i in metadata.static_input_indices or ())


@functools.cache
def _counts_tokens_as_inputs() -> bool:
    """Whether tokens that order effects still count as an inference graph's first inputs once they are none.

    Source: torch/_functorch/_aot_autograd/graph_capture_wrappers.py `handle_effect_tokens_fn`, which counts them from
    2.13 on, and graph_capture.py, which takes that back in 2.15.
    """
    from torch._functorch._aot_autograd import graph_capture, graph_capture_wrappers

    counts = "idx + num_tokens" in inspect.getsource(graph_capture_wrappers)
    return counts and "idx - num_tokens" not in inspect.getsource(graph_capture)


def donate_no_buffers() -> None:
    """Have AOTAutograd know that this backward takes no memory of its saved tensors.

    With donated buffers `retain_graph=True` raises, and pieces of a backward graph would donate the wrong inputs.
    To be called when the forward graph is compiled: its split has made the list by then, and nobody has read it.
    Turning the setting off instead leaves no list, which is not an empty one to whoever checks before a backward.

    Source: torch/_functorch/_aot_autograd/graph_compile.py `fw_metadata.bw_donated_idxs`, 2.11 to 2.15.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    donated = None if context is None else getattr(context.fw_metadata, "bw_donated_idxs", None)
    if donated is not None:
        donated.clear()  # the metadata of wrapped and of plain tensors share this list


def dynamo_source_name(node: torch.fx.Node) -> str | None:
    """What a placeholder of Dynamo's graph stands for in the user's words, `L['self'].fc.weight`."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def static_mark(node: torch.fx.Node) -> str | None:
    """How a placeholder of Dynamo's graph was said to keep its address, None if it was not.

    Source: torch/_dynamo/decorators.py `mark_static_address`, 2.11 to 2.15.
    """
    return node.meta.get("tensor_dict", {}).get("_dynamo_static_input_type")


def lazy_graph_module(
    root: torch.nn.Module | dict[str, Any], graph: torch.fx.Graph, name: str = "GraphModule"
) -> torch.fx.GraphModule:
    """A `GraphModule` whose Python is generated when it is asked for: Inductor reads the graph alone.

    Source: torch/fx/_lazy_graph_module.py, 2.11 to 2.15.
    """
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, name)


def boxed_graph_module(gm: torch.fx.GraphModule) -> Callable[[list[Any]], Any]:
    """`gm` as generated Python that takes one list, empties it, and drops values at their last use."""
    from torch.fx.graph import _BoxedCodeGen

    gm.graph.set_codegen(_BoxedCodeGen())
    gm.recompile()
    _ = gm.code  # a lazy GraphModule generates its forward only now
    forward = type(gm).forward

    def boxed(args: list[Any]) -> Any:
        return forward(gm, args)

    return mark_boxed(boxed)


def mark_boxed(fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """Tell AOTAutograd that `fn`, a plain function, takes one list. Dynamo's wrappers carry the mark along."""
    setattr(fn, "_boxed_call", True)  # noqa: B010  functions take attributes
    return fn


# ---- facts about operators, the joint graph


def is_cudagraph_unsafe(node: torch.fx.Node) -> bool:
    """Whether torch itself keeps a node out of CUDA graphs.

    Source: torch/_inductor/utils.py `is_cudagraph_unsafe_fx_node`, 2.11 to 2.15. Its list names some operators
    without the overload and so never finds them; those are looked for by their packet too.
    """
    from torch._inductor.utils import FORBIDDEN_CUDAGRAPH_OPS, is_cudagraph_unsafe_fx_node

    if is_cudagraph_unsafe_fx_node(node):
        return True
    packet = getattr(node.target, "overloadpacket", None)
    return packet is not None and str(packet) in FORBIDDEN_CUDAGRAPH_OPS


def min_cut_partition(
    joint: torch.fx.GraphModule,
    joint_inputs: Sequence[Any],
    *,
    compiler: str,
    num_fwd_outputs: int,
    static_lifetime_input_indices: list[int] | None = None,
    keep_random: bool = True,
    random: Sequence[torch.fx.Node] = (),
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    """AOTAutograd's min-cut split of a joint graph into forward and backward.

    Args:
        joint: The joint graph.
        joint_inputs: Its inputs.
        compiler: What makes the kernels.
        num_fwd_outputs: How many of its outputs are the forward's.
        static_lifetime_input_indices: Inputs that are free to save.
        keep_random: Whether to leave recomputed random operators as they are. Else they save their generator's state,
            which no graph holds, and run eagerly: never generators of AOTAutograd's, which a backward that compiled
            autograd traces once more loses (torch 2.11 to 2.15).
        random: What draws random numbers. Two of them with equal arguments are two draws, also where torch would take
            them for one: its list has no operators but some of aten's (2.11 to 2.13), and no higher-order ones (to 2.15).
    """
    from torch._functorch import compile_utils, config, partitioners
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    with contextlib.ExitStack() as stack:
        stack.enter_context(config.patch(graphsafe_rng_functionalization=False))
        kept_apart = [*compile_utils.rand_ops, *map(compile_utils.get_aten_target, random)]
        stack.enter_context(_replaced(compile_utils, "rand_ops", kept_apart))
        if keep_random:
            stack.enter_context(_replaced(partitioners, "functionalize_rng_ops", _leave_random_ops))
        return min_cut_rematerialization_partition(
            joint,
            joint_inputs,
            compiler=compiler,
            num_fwd_outputs=num_fwd_outputs,
            static_lifetime_input_indices=static_lifetime_input_indices,
        )


def is_nested_joint(joint_inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd asks for a split of the body of an `invoke_subgraph`: it gives no inputs then.

    Source: torch/_functorch/_aot_autograd/graph_compile.py `run_joint_graph_passes_on_hops`, 2.11 to 2.15.
    """
    return not joint_inputs


def _leave_random_ops(
    joint: torch.fx.GraphModule, fw: torch.fx.GraphModule, bw: torch.fx.GraphModule, num_sym: int
) -> tuple[torch.fx.GraphModule, torch.fx.GraphModule]:
    del joint, num_sym
    return fw, bw


@contextlib.contextmanager
def _replaced(module: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(module, name)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)


unwrap_if_dead: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.unwrap_if_dead
"""What is inside of a tensor that a functorch transform left behind when it ended; any other as it is.

Source: torch/csrc/functorch/init.cpp, 2.11 to 2.15.
"""


def direct_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """`function.apply` without a look at every argument, which costs 1 us each.

    Tensors among the arguments must have gone through `unwrap_if_dead`, unless they can't come from a functorch
    transform. Raises as `apply` does inside of one.

    Source: torch/autograd/function.py, `Function.apply`, 2.11 to 2.15.
    """
    base: Any = super(torch.autograd.Function, function)
    apply = base.apply
    in_transform = torch._C._are_functorch_transforms_active

    def call(*args: Any) -> Any:
        return function.apply(*args) if in_transform() else apply(*args)

    return call


def recomputes_unmarked(joint: torch.fx.GraphModule) -> bool:
    """Whether the split may recompute random operators that nothing marks, for a setting's or a region's memory budget.

    Source: torch/_functorch/partitioners.py, `_get_memory_budget_annotation` and its readers, 2.11 to 2.15.
    """
    from torch._functorch import config

    saves_all = config.activation_memory_budget >= 1.0 and config.ban_recompute_not_in_allowlist
    if config.aggressive_recomputation or not saves_all:
        return True
    metas = [node.meta for node in joint.graph.nodes]
    keys = (key for meta in metas for key in (*meta, *(meta.get("custom") or ())))
    return any("memory_budget" in str(key) for key in keys)


def uses_compiled_autograd() -> bool:
    """Whether compiled autograd is on here and now, or will be for what is compiled."""
    config: Any = sys.modules.get("torch._dynamo.config")  # else nobody turned it on
    return config is not None and (config.compiled_autograd or compiled_autograd_is_on())


def input_position(node: torch.fx.Node) -> int | None:
    """Position among Dynamo's inputs of what a placeholder of AOTAutograd's graph stands for, if it is one of them."""
    return getattr(node.meta.get("desc"), "idx", None)


# ---- random numbers


def default_generator(device: torch.device) -> torch.Generator:
    """The generator that random operators on a device draw from unless told otherwise."""
    if device.type == "cpu":
        return torch.default_generator
    module: Any = torch.get_device_module(device)
    index = module.current_device() if device.index is None else device.index
    return module.default_generators[index]


def replace_default_generator(generator: object) -> None:
    """Have `torch.get_rng_state`, `set_rng_state`, `manual_seed`, `seed` and `initial_seed` work on another object.

    Source: torch/random.py, whose functions look `default_generator` up as they are called, 2.11 to 2.15.
    """
    vars(torch.random)["default_generator"] = generator


def sample_generator(device: torch.device) -> torch.Generator:
    """A generator for a placeholder's fake value; any will do where the device isn't there."""
    if device.type == "cuda" and torch.cuda.is_available():
        return default_generator(device).clone_state()
    return torch.Generator()


def fake_like(fake: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A fake int64 tensor on the CPU, of the same fake mode as another."""
    mode = getattr(fake, "fake_mode", None)
    with contextlib.nullcontext() if mode is None else mode:
        return torch.empty(shape, dtype=torch.int64, device="cpu")


def run_with_rng_state() -> Any:
    """`graphsafe_run_with_rng_state(op, *args, rng_state, **kwargs)`."""
    from torch._prims.rng_prims import graphsafe_run_with_rng_state

    return graphsafe_run_with_rng_state


def install_rng_kernel(kernel: Callable[..., Any], refuse_saving: Callable[[], None]) -> None:
    """Have `graphsafe_run_with_rng_state` run `kernel` on CPU and CUDA; torch's own knows no CPU.

    Args:
        kernel: What runs.
        refuse_saving: Raises where a selective checkpoint would have to save what it draws.
    """
    from torch._C import DispatchKey

    op = run_with_rng_state()
    for key in (DispatchKey.CPU, DispatchKey.CUDA, DispatchKey.BackendSelect):
        if op.py_kernels.get(key) is not kernel:
            op.py_kernels.pop(key, None)
            op.py_impl(key)(kernel)
            op._dispatch_cache.clear()
    if not isinstance(op.python_key_table, _PastModes):
        op.python_key_table = _PastModes(op.python_key_table, op, refuse_saving)


class _PastModes(dict[Any, Any]):
    """Rules of a higher-order operator by dispatch mode: it runs past modes that have none and know no such operators.

    Source: torch/_ops.py `HigherOrderOperator.dispatch`, 2.11 to 2.15: those raise there.
    """

    def __init__(
        self, rules: Mapping[Any, Any], op: Callable[..., Any], refuse_saving: Callable[[], None]
    ) -> None:
        from torch.utils import checkpoint

        super().__init__(rules)
        self._op = op
        self._refuse_saving = refuse_saving
        self._saving = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

    def __contains__(self, mode: object) -> bool:
        known = super().__contains__(mode)
        plain = isinstance(mode, type) and issubclass(mode, TorchDispatchMode)
        return known or (plain and not getattr(mode, "supports_higher_order_operators", False))

    def __missing__(self, mode: type) -> Callable[..., Any]:
        return self._refused if issubclass(mode, self._saving) else self._past

    def _refused(self, *args: Any, **kwargs: Any) -> None:
        self._refuse_saving()

    def _past(self, mode: object, *args: Any, **kwargs: Any) -> Any:
        return self._op(*args, **kwargs)


def hide_output_stride(position: int) -> None:
    """Tell AOTAutograd that a forward graph has one more output than was reported, of no tensor it knows."""
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    if context is not None and context.output_strides:
        context.output_strides.insert(position, None)


# ---- custom operators


def has_autograd_formula(op: torch._ops.OpOverload) -> bool:
    """Whether `op` was made by `torch.library.custom_op` and given a Python autograd formula."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(op._schema.name)
    return (
        definition is not None
        and definition._opoverload is op
        and definition._backward_fn is not None
    )


def custom_op(qualname: str) -> torch._ops.OpOverload:
    """The operator that `torch.library.custom_op` made last under a name."""
    from torch._library.custom_ops import OPDEFS

    return OPDEFS[qualname]._opoverload


def autograd_formula(
    op: torch._ops.OpOverload,
) -> tuple[Callable[..., Any] | None, Callable[..., Any]]:
    """The `setup_context`, if there is one, and the `backward` that were registered for a custom operator.

    Source: torch/_library/custom_ops.py `CustomOpDef.register_autograd`, 2.11 to 2.15.
    """
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS[op._schema.name]
    return definition._setup_context_fn, definition._backward_fn


def cpu_implementation(op: object) -> Callable[..., Any] | None:
    """What runs a custom operator on CPU, past whatever intercepts the call; None for torch's own operators.

    Dispatch modes that are entered see what it calls. Operators that write an argument are called through a
    higher-order operator (`auto_functionalized`), which has a Python implementation.
    """
    keys = torch._C.DispatchKey
    if isinstance(op, torch._ops.OpOverload):
        if op.namespace in ("aten", "prims", "inductor_prims"):
            return None
        return functools.partial(op.redispatch, torch._C.DispatchKeySet(keys.CPU))
    if isinstance(op, torch._ops.HigherOrderOperator) and "auto_functionalized" in op.name():
        return op.py_kernels.get(keys.CompositeExplicitAutograd)
    return None


def has_effect(op: torch._ops.OpOverload) -> bool:
    """Whether an operator was registered as having an effect, which orders its calls."""
    from torch._higher_order_ops.effects import has_effects

    return has_effects(op)


def are_replaced(ops: Sequence[object]) -> bool:
    """Whether tracing leaves other operators in the place of all of `ops`, `out=` variants aside.

    Composite operators and ATen's writing ones. What Inductor decomposes is noted in `original_aten`.
    """
    known = [op for op in ops if isinstance(op, torch._ops.OpOverload)]
    real = [op for op in known if torch._C._dispatch_has_kernel(op.name())]  # not TorchScript's
    called = [op for op in real if not any(arg.is_out for arg in op._schema.arguments)]
    return bool(called) and all(
        torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
        or (op.namespace == "aten" and op._schema.is_mutable)
        for op in called
    )


def has_autocast_kernel(op: torch._ops.OpOverload) -> bool:
    """Whether autocast casts an operator's inputs."""
    keys = ("AutocastCPU", "AutocastCUDA")
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return any(has_kernel(op._schema.name, key) for key in keys)


@contextlib.contextmanager
def autograd_keys_on() -> Iterator[None]:
    """Let autograd record again inside an operator's implementation, which runs below it.

    Source: `c10::autograd_dispatch_keyset`, what `AutoDispatchBelowAutograd` excludes, 2.11 to 2.15.
    """
    keys = torch._C.DispatchKey
    exclude = torch._C._dispatch_tls_local_exclude_set()
    for key in (keys.AutogradFunctionality, keys.AutogradOther, keys.AutogradNestedTensor):
        exclude = exclude.remove(key)
    include = torch._C._dispatch_tls_local_include_set()
    with torch._C._ForceDispatchKeyGuard(include, exclude):
        yield


def is_exporting() -> bool:
    """Whether `torch.export` traces. For Dynamo, `torch.compiler.is_exporting()` is always true in torch 2.11."""
    return torch.compiler._is_exporting_flag


num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
"""How many dispatch modes see the operators that this thread calls."""

is_jit_traced: Callable[[], bool] = torch._C._is_tracing
"""Whether `torch.jit.trace`, or an export to ONNX by it, traces what this thread runs. Half of the cost of
`torch.jit.is_tracing`.

Source: torch/csrc/jit/python/python_tracer.cpp, 2.11 to 2.15.
"""


set_grad_enabled: Callable[[bool], None] = torch._C._set_grad_enabled
"""`torch.set_grad_enabled` as a function, at a tenth of the cost of the context manager."""


in_functorch: Callable[[], bool] = torch._C._are_functorch_transforms_active
"""Whether a transform of `torch.func` is running: vmap, grad, jvp and what is made of them."""


def in_vmap_or_functorch() -> bool:
    """Whether a transform is running, or the vmap that autograd batches gradients with.

    Source: aten/src/ATen/LegacyVmapMode.cpp and aten/src/ATen/functorch/DynamicLayer.cpp, 2.11 to 2.15.
    """
    return any(map(torch._C._dispatch_tls_is_dispatch_key_included, _transform_keys()))


@functools.cache
def _transform_keys() -> tuple[Any, ...]:
    parse = torch._C._parse_dispatch_key
    return parse("VmapMode"), parse("FuncTorchDynamicLayerFrontMode")


def in_forward_ad() -> bool:
    """Whether a level of forward-mode AD is open."""
    return torch.autograd.forward_ad._current_level >= 0


@contextlib.contextmanager
def no_parametrize_cache() -> Iterator[None]:
    """A block in which weights are computed whenever they are read, though `torch.nn.utils.parametrize.cached()` is on.

    Source: torch/nn/utils/parametrize.py, `_cache_enabled`, 2.11 to 2.15.
    """
    from torch.nn.utils import parametrize

    depth = parametrize._cache_enabled
    parametrize._cache_enabled -= depth
    try:
        yield
    finally:
        parametrize._cache_enabled += depth


# ---- fake tensors


def is_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor has no values, only metadata."""
    from torch._subclasses.fake_tensor import is_fake as torch_is_fake

    return torch_is_fake(tensor)


def no_fake_mode() -> contextlib.AbstractContextManager[Any]:
    """Compute with real tensors, though a graph is being traced."""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


def mode_of(tensor: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The fake mode of a fake tensor, to make another one like it; nothing for a real one."""
    mode = getattr(tensor, "fake_mode", None)
    return contextlib.nullcontext() if mode is None else mode


def is_plain_fake(tensor: torch.Tensor) -> bool:
    """Whether a tensor is fake itself, not a subclass or a transform's wrapper around a fake one."""
    from torch._subclasses.fake_tensor import FakeTensor

    return type(tensor) is FakeTensor


def sibling_fake_mode(tensor: torch.Tensor) -> Any:
    """A fake mode with the settings of a fake tensor's and symbols of its own: nothing done in it leaves a guard."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode: Any = mode_of(tensor)
    outer = mode.shape_env
    shape_env = None
    if outer is not None:
        shape_env = ShapeEnv(
            allow_scalar_outputs=outer.allow_scalar_outputs,
            allow_dynamic_output_shape_ops=outer.allow_dynamic_output_shape_ops,
        )
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=mode.allow_non_fake_inputs)


def operator_names() -> list[str]:
    """Every operator that is registered, `ns::op` and `ns::op.overload`, in order.

    Source: torch/csrc/utils/python_dispatch.cpp, `_dispatch_get_all_op_names`, 2.11 to 2.15.
    """
    names = torch._C._dispatch_get_all_op_names()
    return sorted({*names, *(name.partition(".")[0] for name in names)})


def inductor_option_names() -> list[str]:
    """Every name that Inductor's configuration knows, `triton.cudagraphs` and the like included.

    Source: torch/utils/_config_module.py, `ConfigModule._config`, 2.11 to 2.15.
    """
    from torch._inductor import config

    return list(getattr(config, "_config"))  # noqa: B009  in no stub


@dataclass(frozen=True)
class TrainingLayout:
    """What AOTAutograd's autograd function has to do with a training graph's inputs and outputs, where that is little."""

    num_inputs: int
    num_returned: int
    """Outputs that the caller gets; what is saved for the backward follows them."""
    requiring_grad: tuple[int, ...]
    """Inputs that did when the graph was traced, as Dynamo checks in each call."""
    differentiable: tuple[int, ...]
    """Outputs that require grad."""
    written: tuple[int, ...]
    """Inputs that the graph writes, which autograd is to know of."""
    checked: slice
    """Saved tensors that must not be written before the backward."""
    unchecked: slice
    rest: slice
    """Saved sizes."""
    tangents: tuple[Callable[[Any], Any], ...]
    """Brings each differentiable output's gradient into the layout that the backward was traced with."""
    dynamic: tuple[tuple[int, Any], ...]
    """Outputs with symbolic sizes, and their dimensions, for graphs traced after this one."""
    deterministic: bool | None
    """Whether deterministic algorithms were asked for when it was traced."""


def training_layout() -> TrainingLayout | None:
    """The layout of the training graph that AOTAutograd compiles now; None where its autograd function does more.

    That is for outputs that are (views of) inputs or share memory, tensor subclasses, effect tokens, inputs that change
    their metadata, writes that AOTAutograd makes after the graph, hooks on saved tensors that it has traced, and compiled
    autograd.

    Source: torch/_functorch/_aot_autograd/runtime_wrappers.py `AOTDispatchAutograd` and schemas.py
    `ViewAndMutationMeta`, 2.11 to 2.15.
    """
    from torch._guards import TracingContext

    context = TracingContext.try_get()
    metadata: Any = None if context is None else context.fw_metadata
    if metadata is None or uses_compiled_autograd() or _has_default_saved_tensors_hooks():
        return None
    if _knows_external_objects():
        return None
    try:
        return _layout_of(metadata) if _is_little(metadata) else None
    except AttributeError:  # a torch that keeps its books otherwise
        return None


def handles_subclasses(gm: torch.fx.GraphModule) -> bool:
    """Whether inputs or outputs of Dynamo's graph are tensors that AOTAutograd takes apart (DTensor)."""
    from torch.utils._python_dispatch import is_traceable_wrapper_subclass

    nodes = [*gm.graph.find_nodes(op="placeholder"), *gm.graph.output_node().all_input_nodes]
    return any(is_traceable_wrapper_subclass(node.meta.get("example_value")) for node in nodes)


def _has_default_saved_tensors_hooks() -> bool:
    from torch._functorch._aot_autograd.utils import top_saved_tensors_hooks

    return top_saved_tensors_hooks() is not None


def _knows_external_objects() -> bool:
    """Whether Dynamo has traced streams or events, which newer versions have the backward find again."""
    from torch._functorch._aot_autograd import runtime_wrappers

    known: Any = getattr(runtime_wrappers, "index_to_external_object_weakref", ())
    return any(ref() is not None for ref in known)


def _is_little(metadata: Any) -> bool:
    from torch._functorch._aot_autograd.schemas import OutputType, PlainTensorMeta

    more = (
        metadata.num_mutated_inp_runtime_indices,
        metadata.num_outputs_aliased,
        metadata.num_intermediate_bases,
        metadata.tokens,
        metadata.num_backward_tokens,
        metadata.is_rng_op_functionalized,
        metadata.num_graphsafe_rng_states,
        metadata.indices_of_inputs_that_requires_grad_with_mutations_in_bw,
        metadata.num_opaque_objects_saved_for_bw,
        metadata.grad_enabled_mutation is not None,
    )
    kinds = (
        *metadata.subclass_inp_meta,
        *metadata.subclass_fw_graph_out_meta,
        *metadata.subclass_tangent_meta,
    )
    fresh = (OutputType.non_alias, OutputType.unsafe_view_alias)
    return (
        not any(more)
        and all(type(kind) is PlainTensorMeta for kind in kinds)
        and all(info.output_type in fresh for info in metadata.output_info)
        and all(
            getattr(info, "requires_grad_for_backward", info.requires_grad) == info.requires_grad
            for info in metadata.output_info
        )
    )


def _layout_of(metadata: Any) -> TrainingLayout:
    from torch._functorch._aot_autograd.runtime_wrappers import AOTDispatchAutograd

    outputs = list(enumerate(metadata.output_info))
    differentiable = tuple(
        n for n, info in outputs if info.requires_grad and issubclass(info.raw_type, torch.Tensor)
    )
    metas = metadata.subclass_tangent_meta
    if len(metas) != len(differentiable):
        raise AttributeError("subclass_tangent_meta")

    def tangent(meta: Any) -> Callable[[Any], Any]:
        return lambda value: AOTDispatchAutograd.process_runtime_tangent(value, meta)[0]

    return TrainingLayout(
        num_inputs=len(metadata.input_info),
        num_returned=metadata.num_forward_returns,
        requiring_grad=tuple(n for n, i in enumerate(metadata.input_info) if i.requires_grad),
        differentiable=differentiable,
        written=tuple(metadata.mutated_graph_handled_indices_seen_by_autograd),
        checked=metadata.tensors_saved_for_backwards_with_vc_check_slice,
        unchecked=metadata.tensors_saved_for_backwards_no_vc_check_slice,
        rest=metadata.symints_saved_for_backwards_slice,
        tangents=tuple(map(tangent, metas)),
        dynamic=tuple((n, info.dynamic_dims) for n, info in outputs if info.dynamic_dims),
        deterministic=metadata.deterministic,
    )


def mark_dynamic(tensor: torch.Tensor, dimensions: Any) -> None:
    """Have Dynamo know which of an output's sizes were symbols."""
    from torch._functorch._aot_autograd import runtime_wrappers

    mark: Any = getattr(runtime_wrappers, "maybe_mark_dynamic_helper", None)
    mark = mark or getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices")  # noqa: B009
    mark(tensor, dimensions)


def autograd_is_plain() -> bool:
    """Whether autograd records operators as it does by default: no transform, mode, anomaly detection or the like."""
    return (
        torch.is_grad_enabled()
        and not torch.is_inference_mode_enabled()
        and not torch.is_anomaly_enabled()
        and torch._C._len_torch_dispatch_stack() == 0
        and not in_vmap_or_functorch()
        and torch.autograd.forward_ad._current_level < 0
        and not compiled_autograd_is_on()
    )


def compiled_autograd_is_on() -> bool:
    """Whether backwards are traced here."""
    module: Any = sys.modules.get("torch._dynamo.compiled_autograd")  # else nobody turned it on
    return module is not None and module.compiled_autograd_enabled
