"""A CUDA device that does nothing and notes what is asked of it."""

import torch

from cgpass import torch_private
from cgpass.runtime.capturing import Pause
from cgpass.runtime.driver import CUDADriver

DEVICE = torch.device("cuda", 0)


class Log(list):
    """Calls in their order; fakes note themselves here."""


class FakeStream:
    def __init__(self, log, name):
        self.log, self.name = log, name

    def wait_stream(self, other):
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event):
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self):
        return f"event of {self.name}"

    def query(self):
        return self.name in self.log.idle

    def __enter__(self):
        self.log.append(f"enter {self.name}")

    def __exit__(self, *exc):
        self.log.append(f"leave {self.name}")


class FakeGraph:
    log = None
    end_raises = False
    draws = None
    """A generator's state and how far a replay moves it."""

    def register_generator_state(self, generator):
        self.log.append(f"register {generator}")

    def replay(self):
        self.log.append("replay")
        if self.draws is not None:
            state, steps = self.draws
            state[1] += steps

    def reset(self):
        self.log.append("reset")

    def capture_begin(self, *, pool="own pool", capture_error_mode):
        self.log.append(f"begin {pool} {capture_error_mode}")
        self.log.capturing = True

    def capture_end(self):
        self.log.append("end")
        self.log.capturing = False
        if self.end_raises:
            raise RuntimeError("capture_end")


class FakeGenerator(torch.Generator):
    def __init__(self, log, name):
        super().__init__()
        self.log, self.name = log, name
        self.state = [0, 0]
        """Seed and offset; handles share it."""

    def __new__(cls, *args):
        return super().__new__(cls)

    def __repr__(self):
        return self.name

    def clone_state(self):
        return f"state of {self.name}"

    def graphsafe_get_state(self):
        handle = FakeGenerator(self.log, f"handle of {self.name}")
        handle.state = self.state
        return handle

    def graphsafe_set_state(self, state):
        self.log.append(f"restore {state}")

    def initial_seed(self):
        return self.state[0]

    def get_offset(self):
        return self.state[1]

    def manual_seed(self, seed):
        self.state[:] = [seed, 0]

    def set_offset(self, offset):
        self.state[1] = offset


def fake_driver(monkeypatch):
    """A driver whose device notes what is asked of it, and the notes."""
    log = Log()
    log.streams = [11]
    log.idle = []
    log.capturing = False
    graph = type("Graph", (FakeGraph,), {"log": log})
    log.graph = graph
    cuda = torch.cuda
    monkeypatch.setattr(cuda, "graph_pool_handle", lambda: (0, 1))
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *size, device: zeros(*size))
    monkeypatch.setattr(cuda, "Stream", lambda device: FakeStream(log, "side"))
    monkeypatch.setattr(
        cuda, "current_stream", lambda device: FakeStream(log, f"stream {log.streams[-1]}")
    )
    monkeypatch.setattr(cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(cuda, "device", lambda device: Pause())
    monkeypatch.setattr(cuda, "CUDAGraph", graph)
    monkeypatch.setattr(cuda, "default_generators", [FakeGenerator(log, "default")])
    monkeypatch.setattr(
        torch_private, "clear_cublas_workspaces", lambda: log.append("clear workspaces")
    )
    monkeypatch.setattr(
        torch_private,
        "abandon_failed_capture",
        lambda index, pool: log.append(f"abandon {index} {pool}"),
    )
    monkeypatch.setattr(torch_private, "current_raw_stream", lambda index: log.streams[-1])
    monkeypatch.setattr(torch_private, "is_capturing", lambda: log.capturing)
    return CUDADriver(DEVICE), log
