"""`CallStreams`: the CUDA streams on which one compiled function is called."""

from collections.abc import Sequence

import torch

from cgpass import _torch


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
        """Args: device: with its index."""
        self._device = device
        self._last: int | None = None
        self._seen: dict[int, torch.cuda.Stream] = {}
        self.others: tuple[torch.cuda.Stream, ...] = ()
        """All but the calling one."""

    def enter(self) -> None:
        """Make the current stream wait for the stream of the previous call, if that was another one."""
        raw = _torch.current_raw_stream(self._device.index)
        if raw == self._last or _torch.is_capturing():
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
