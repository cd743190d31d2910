"""States of random numbers, and a generator of CUDA's for machines without one."""

from dataclasses import dataclass

import torch


def rng_state(device):
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


@dataclass
class State:
    seed: int
    offset: int = 0


class FakeGenerator:
    """Seed and offset, as a CUDA generator has them, in a state that can be exchanged for another one's."""

    device = torch.device("cuda", 0)

    def __init__(self, state):
        self._state = state

    @property
    def state(self):
        return self._state

    def manual_seed(self, seed):
        self.state.seed, self.state.offset = seed, 0
        return self

    def initial_seed(self):
        return self.state.seed

    def get_offset(self):
        return self.state.offset

    def set_offset(self, offset):
        self.state.offset = offset

    def get_state(self):
        return (self.state.seed, self.state.offset)

    def set_state(self, state):
        self.state.seed, self.state.offset = state

    def clone_state(self):
        return type(self)(State(self.state.seed, self.state.offset))

    def graphsafe_get_state(self):
        return type(self)(self._state)

    def graphsafe_set_state(self, other):
        self._state = other._state
