"""`GraphDriver`, the one seam between our rules and the device, and the driver for CUDA: captures, streams, pools, memory.

A driver knows how to record a callable, to replay what it recorded and where memory lies. It knows no signature, no
static input and no liveness: those are the wrapper's. `simulated.driver_for` makes the one that an option means.
"""

import contextlib
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from cgpass import torch_private
from cgpass.runtime.capturing import Capture, may_be_empty, when_no_capture_runs

BoxedCallable = Callable[[list[Any]], Sequence[Any]]
"""Takes one list of inputs, which it may empty, and returns a sequence of outputs."""


def is_capture_error(error: BaseException) -> bool:
    """Guess from an error's text whether a capture does not allow what was done."""
    text = str(error) if isinstance(error, RuntimeError) else ""
    return any(word in text for word in ("captur", "CUDA", "CUBLAS", "CUSOLVER", "CUDNN", "cuDNN"))


class CapturedGraph:
    """A graph that a driver recorded."""

    def replay(self) -> None:
        """Run the recorded work again on the current stream, reading and writing the same memory."""
        raise NotImplementedError

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let streams of earlier calls read tensors that the current stream just wrote, its outputs' new places."""

    def reset(self) -> None:
        """Free the graph. Memory that its outputs lie in is freed when they are."""


class GraphDriver:
    """Records callables on one device, all of them into one memory pool. What it has nothing to do for does nothing."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        """The device on which tensors must lie."""

    def record(
        self, fn: BoxedCallable, args: list[Any], *, opaque: bool, pool_index: int = 0
    ) -> tuple[CapturedGraph, list[Any]]:
        """Record `fn(args)` into one of the driver's pools, without running it for its effects.

        Tensors among `args` are read where they lie now, generators are registered. `opaque` is set if `fn`'s kernels
        bypass aten (Inductor's do), so that only the whole of it can be recorded. Recordings in different pools share no
        memory.

        Returns:
            The graph and `fn`'s outputs. Output tensors hold nothing of meaning before the first replay.
            **Lifetime:** they own their memory in the pool; each replay writes it again.
        """
        raise NotImplementedError

    def warm_up(self, fn: BoxedCallable, args: list[Any]) -> Sequence[Any]:
        """Run `fn(args)` with memory of the first pool, in which nothing was recorded yet.

        Otherwise what outlives the first calls (optimizer states) would come to lie among memory that only they need.
        """
        return fn(args)

    def end_warm_ups(self) -> None:
        """Have pools belong to their graphs alone."""

    def prepare_thread(self) -> None:
        """Before this thread records what it never warmed up: make what libraries keep for each thread."""

    def live_blocks(self, pool_index: int) -> set[int]:
        """Addresses of a pool's memory that is in use now. Captures that are over count with what outlived them."""
        raise NotImplementedError

    def pool_bytes(self) -> int | None:
        """Memory that its pools take from the device; None if no device is asked for any."""
        return None

    def give_back(self) -> None:
        """Return memory that nobody uses: after the last graph of a pool, the pool's."""

    def is_capturing(self) -> bool:
        """Tell whether somebody else records on the current stream."""
        raise NotImplementedError

    def enter_call(self) -> None:
        """Order this call after the previous one if it came on another stream."""


class Pool:
    """A memory pool and the graphs that keep it in use; who replays them keeps them alive.

    Note [Warm-ups have a pool of their own]
        What a warm-up takes and gives back stays the pool's for good, cut up as the warm-up needed it: a capture in the
        same pool finds most of it of the wrong sizes and takes as much again (ViT-S, training: 458 MiB against 350).
        In the ordinary pool a warm-up would leave as much behind, and what outlives it would lie in between. So
        warm-ups have a pool, and the first capture gets a new one. What is free of the old one goes back to the device
        then, and once more when the second capture begins: by then gradients of a warm-up are gone, too.
    """

    def __init__(self, device: int, handle: Any = None) -> None:
        self.is_given = handle is not None
        """True if it is the user's own, which other graphs may use too."""
        self.handle: Any = handle or torch.cuda.graph_pool_handle()
        self.graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        self._device = device
        self._users = 0
        """Warm-ups that keep it in use until a graph does."""
        self._failed = False

    @property
    def is_used(self) -> bool:
        """True if the allocators take captures into it: not once its last user is gone, or one of them failed."""
        return not self._failed and (bool(self.graphs) or self._users > 0)

    @property
    def is_for_warm_ups(self) -> bool:
        """True if no graph lies in it, but memory of warm-ups does."""
        return not self.graphs and self._users > 0 and not self.is_given

    @contextlib.contextmanager
    def allocating(self) -> Iterator[None]:
        """Have this thread's allocations come from this pool, until its end or an exception's."""
        try:
            torch_private.begin_allocating_to_pool(self._device, self.handle)
            self._users += 1
            yield
            torch_private.end_allocating_to_pool(self._device, self.handle)
        except BaseException:
            with contextlib.suppress(
                RuntimeError
            ):  # a signal's may come before it began, or after its end
                torch_private.end_allocating_to_pool(self._device, self.handle)
            raise

    def end_of_warm_ups(self) -> None:
        """Leave the pool to its graphs."""
        while self._users:
            self._users -= 1
            torch_private.release_pool(self._device, self.handle)

    def leave(self) -> None:
        """Use it no more: a failed capture leaves it open in the allocator of host memory, or closes it for good."""
        self._failed = True
        self.end_of_warm_ups()

    def __del__(self) -> None:
        if not sys.is_finalizing():
            self.end_of_warm_ups()


class CallStreams:
    """Streams that calls came on, and what they wait for.

    Note [Calls on several streams]
        An output that was dropped may still be read by work that its stream has yet to do. torch's allocator gives its
        memory to nobody else on other streams; a recording writes it again whoever calls. So, once calls came on
        several streams, a replay waits for what all of them have been given so far. That is asked for after outputs
        were found to be dropped: what is launched later can't read them. Likewise what a rescue copies on the calling
        stream is read on the holder's, which waits for the copy, and whose use of it the allocator is told of.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._last: int | None = None
        self._seen: dict[int, torch.cuda.Stream] = {}
        self.others: tuple[torch.cuda.Stream, ...] = ()
        """All but the calling one."""

    def enter(self) -> None:
        """Make the current stream wait for the stream of the previous call, if that was another one."""
        raw = torch_private.current_raw_stream(self._device.index)
        if raw == self._last or torch_private.is_capturing():
            return
        current = torch.cuda.current_stream(self._device)
        if self._last is not None:
            current.wait_stream(self._seen[self._last])
        self._last = raw
        self._seen[raw] = current
        self.others = tuple(stream for number, stream in self._seen.items() if number != raw)

    def wait(self) -> None:
        """Make the calling stream wait for what the others have been given so far."""
        busy = [stream for stream in self.others if not stream.query()]
        if busy:
            current = torch.cuda.current_stream(self._device)
            for stream in busy:
                current.wait_stream(stream)

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Have the other streams read tensors that the calling one just wrote."""
        if not self.others:
            return
        written = torch.cuda.current_stream(self._device).record_event()
        for stream in self.others:
            stream.wait_event(written)
            for tensor in tensors:
                tensor.record_stream(stream)


class _CUDAGraph(CapturedGraph):
    """A recorded graph among those that use its pool.

    Note [Which state a replay draws from]
        A graph draws from the state object that the default generator had while it was recorded. Who forks by giving
        the generator another one (`graphsafe_set_state`) means that one. So around the replay of a graph that draws
        the two stand where the user's does, and afterwards the recorded one is back where it was. Nothing tells
        whether they are one object but that they move together.
    """

    def __init__(
        self,
        graph: torch.cuda.CUDAGraph,
        pool: Pool,
        generator: torch.Generator,
        streams: CallStreams,
    ) -> None:
        self._replay = graph.replay
        self._streams = streams
        self.share = streams.share
        self._generator = generator
        self._recorded = generator.graphsafe_get_state()
        self._draws: bool | None = None
        """True if it draws from the default generator; None until the first replay tells."""
        pool.graphs.add(graph)
        self._end = weakref.finalize(self, _destroy, graph, pool)
        setattr(self._end, "atexit", False)  # noqa: B010  in no stub

    def replay(self) -> None:
        if self._streams.others:
            self._streams.wait()
        if self._draws is False:
            self._replay()
            return
        user, recorded = self._generator, self._recorded
        seed, offset = user.initial_seed(), user.get_offset()
        before = recorded.initial_seed(), recorded.get_offset()
        if before != (seed, offset):
            recorded.manual_seed(seed)
            recorded.set_offset(offset)
        self._replay()
        after = recorded.get_offset()
        if self._draws is None:
            self._draws = after != offset
        if user.get_offset() != after:  # so they are two
            user.set_offset(after)
        elif before == (seed, offset):
            return
        recorded.manual_seed(before[0])
        recorded.set_offset(before[1])

    def reset(self) -> None:
        self._end()


def _destroy(graph: torch.cuda.CUDAGraph, pool: Pool) -> None:
    """Free a graph that nobody replays any longer. See Note [Destruction during a capture]."""
    pool.graphs.discard(graph)
    when_no_capture_runs(graph.reset)


class CUDADriver(GraphDriver):
    """Records into CUDA graphs: one pool (more where results of several calls are held) and one side stream.

    Source: capture rules in the CUDA C++ Programming Guide, "CUDA Graphs"; torch/cuda/graphs.py, 2.11.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        pool: Any = None,
        stream: torch.cuda.Stream | None = None,
    ) -> None:
        super().__init__(device)
        self._index = device.index
        self._pools: dict[int, Pool] = {}
        self._given_pool = pool
        self._returns_due = 0
        """Captures before which memory of warm-ups is to be returned. See Note [Warm-ups have a pool of their own]."""
        self._stream = stream or torch.cuda.Stream(device)
        self._streams = CallStreams(device)
        self._token = torch.zeros(1, device=device)

    def record(
        self, fn: BoxedCallable, args: list[Any], *, opaque: bool, pool_index: int = 0
    ) -> tuple[CapturedGraph, list[Any]]:
        """See `GraphDriver.record`; `opaque` makes no difference to CUDA.

        The graph is not uploaded by itself: the replay that follows at once does that, and is done earlier than after an upload.
        """
        del opaque
        pool = self._pool_to_record_in(pool_index)
        graph = torch.cuda.CUDAGraph()
        generators = [torch.cuda.default_generators[self._index]]
        generators += [a for a in args if isinstance(a, torch.Generator)]
        for generator in generators[1:]:
            graph.register_generator_state(generator)
        states = [generator.clone_state() for generator in generators]
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with (
            Capture(),
            torch.cuda.device(self.device),
            torch.cuda.stream(self._stream),
        ):
            torch_private.clear_cublas_workspaces()
            try:
                outputs = self._capture(graph, pool, fn, args)
            except BaseException:
                pool.leave()
                self._repair(generators, states)
                raise
            finally:
                torch_private.clear_cublas_workspaces()
        current.wait_stream(self._stream)
        recorded = _CUDAGraph(graph, pool, generators[0], self._streams)
        pool.end_of_warm_ups()
        return recorded, outputs

    def _pool(self, pool_index: int) -> Pool:
        pool = self._pools.get(pool_index)
        if pool is None or not pool.is_used:
            given = self._given_pool if pool_index == 0 and pool is None else None
            pool = self._pools[pool_index] = Pool(self._index, given)
        return pool

    def _pool_to_record_in(self, pool_index: int) -> Pool:
        """See Note [Warm-ups have a pool of their own]."""
        pool = self._pools.get(pool_index)
        if pool is not None and pool.is_for_warm_ups:
            pool.end_of_warm_ups()
            del self._pools[pool_index]
            self._returns_due = 2
        if self._returns_due:
            self._returns_due -= 1
            when_no_capture_runs(torch.cuda.empty_cache)
        return self._pool(pool_index)

    def warm_up(self, fn: BoxedCallable, args: list[Any]) -> Sequence[Any]:
        """See `GraphDriver.warm_up`. On the stream of captures: blocks serve the stream that they were made for."""
        current = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(current)
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            torch_private.clear_cublas_workspaces()
            pool = self._pool(0)
            if not pool.is_used:  # while it takes allocations, no other pool's free memory serves
                when_no_capture_runs(torch.cuda.empty_cache)
            try:
                with pool.allocating():
                    return fn(args)
            finally:
                current.wait_stream(self._stream)  # what raises had launched work, too
                torch_private.clear_cublas_workspaces()

    def end_warm_ups(self) -> None:
        """See `GraphDriver.end_warm_ups`."""
        for pool in self._pools.values():
            pool.end_of_warm_ups()

    def prepare_thread(self) -> None:
        """See `GraphDriver.prepare_thread`. No handle can be made while the thread captures."""
        with torch.cuda.device(self.device), torch.cuda.stream(self._stream):
            torch_private.make_library_handles(self.device)

    def live_blocks(self, pool_index: int) -> set[int]:
        """See `GraphDriver.live_blocks`. From the allocator's own records; on the host, no synchronisation."""
        pool = self._pools.get(pool_index)
        if pool is None or not pool.is_used:
            return set()
        return {
            block["address"]
            for segment in torch_private.pool_segments(pool.handle)
            for block in segment["blocks"]
            if block["state"] == "active_allocated"
        }

    def pool_bytes(self) -> int | None:
        """See `GraphDriver.pool_bytes`. From the allocator's own records."""
        used = [pool for pool in self._pools.values() if pool.is_used]
        return sum(
            s["total_size"] for pool in used for s in torch_private.pool_segments(pool.handle)
        )

    def give_back(self) -> None:
        """See `GraphDriver.give_back`."""
        self.end_warm_ups()
        when_no_capture_runs(torch.cuda.empty_cache)

    def _repair(self, generators: list[torch.Generator], states: list[torch.Generator]) -> None:
        """Take generators out of capture mode after a failed capture.

        Drawn from inside one, they refuse to draw outside (torch 2.11). A capture that succeeds puts them right and
        leaves their position alone. Giving them another state object would do so too, but would cut off every
        graph recorded before: those keep drawing from the old one.
        """
        graph = torch.cuda.CUDAGraph()
        for generator in generators[1:]:
            graph.register_generator_state(generator)
        try:
            graph.capture_begin(capture_error_mode="thread_local")
            self._token.zero_()
            with may_be_empty():
                graph.capture_end()
        except BaseException as error:
            with contextlib.suppress(RuntimeError), may_be_empty():
                if torch_private.is_capturing():
                    graph.capture_end()
            for generator, state in zip(generators, states, strict=True):
                generator.graphsafe_set_state(state)
            if not isinstance(error, RuntimeError):
                raise

    def _capture(
        self, graph: torch.cuda.CUDAGraph, pool: Pool, fn: BoxedCallable, args: list[Any]
    ) -> list[Any]:
        has_begun = False
        try:
            graph.capture_begin(pool=pool.handle, capture_error_mode="thread_local")
            has_begun = True
            outputs = list(fn(args))
            with may_be_empty():
                graph.capture_end()
        except BaseException:
            self._end_failed(graph, pool, has_begun=has_begun)
            raise
        return outputs

    def _end_failed(self, graph: torch.cuda.CUDAGraph, pool: Pool, *, has_begun: bool) -> None:
        """End a capture that an exception left, a signal's between any two steps too, unless it has ended."""
        try:
            if torch_private.is_capturing():
                with may_be_empty():
                    graph.capture_end()
                return
        except RuntimeError:
            has_begun = True
        if has_begun:
            torch_private.abandon_failed_capture(self._index, pool.handle)

    def is_capturing(self) -> bool:
        """Tell whether the current stream is being captured."""
        return torch_private.is_capturing()

    def enter_call(self) -> None:
        """See Note [Calls on several streams]."""
        self._streams.enter()
