"""Memory of outputs for tests: made, handed out, held in several ways, overwritten."""

from array import array

import torch

from cgpass import torch_private
from cgpass.runtime import fast
from cgpass.runtime.outputs import OutputMemory

SHOWN, BOTH, INTERNAL = (True, False), (True, True), (False, True)


def seal(make, *uses):
    """The memory of the outputs that `make` returns; nobody else holds them."""
    outputs = make()
    count = len(outputs)
    memory = OutputMemory(outputs, uses or [SHOWN] * count)
    del outputs
    memory.seal()
    return memory


def ramps(count):
    """Outputs of four elements each, on blocks of their own."""
    return lambda: [torch.arange(4.0) + 10 * n for n in range(count)]


def hand_out(memory):
    return memory.aliases()


def replay(memory, value=-1):
    """Overwrite the blocks where they lie, as the graph does."""
    for address, tensor in zip(memory.addresses(), memory.tensors, strict=True):
        raw = torch_private.storage_at(address, tensor.untyped_storage().nbytes(), tensor.device)
        torch.empty(0).set_(raw).fill_(value)


def saved(tensor):
    """A backward that reads the tensor; nothing else holds it."""
    x = torch.ones(4, requires_grad=True)
    return (x * tensor).sum()


def gradient_of(tensor):
    parameter = torch.nn.Parameter(torch.zeros(4))
    parameter.grad = tensor
    return parameter


def found_by_backward(loss):
    (x,) = [f for f, _ in loss.grad_fn.next_functions[0][0].next_functions if f is not None]
    loss.backward()
    return x.variable.grad


def users(tensor):
    """References to a storage, without the one that counting takes."""
    return array("q", fast.watched((tensor.untyped_storage(),)))[2] - 1
