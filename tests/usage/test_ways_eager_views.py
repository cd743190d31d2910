"""What operators between graphs make and hand out as views: gradients of weights that are used transposed."""

import torch


@torch.library.custom_op("eager_views::mm", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,))
def mm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return x @ weight


@torch.library.custom_op(
    "eager_views::mm_backward", mutates_args=(), tags=(torch.Tag.cudagraph_unsafe,)
)
def mm_backward(
    grad: torch.Tensor, x: torch.Tensor, weight: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    return grad @ weight.t(), x.t() @ grad


mm.register_fake(lambda x, weight: x @ weight)
mm_backward.register_fake(lambda grad, x, weight: (torch.empty_like(x), torch.empty_like(weight)))
mm.register_autograd(
    lambda ctx, grad: mm_backward(grad, *ctx.saved_tensors),
    setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
)
WIDTH = 64


class Transposed(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = torch.nn.ParameterList(torch.randn(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x):
        for weight in self.weights:
            x = mm(x.sin().cos().exp().tanh(), weight.t()).sin().cos().exp().tanh()
        return x.square().sum()


def train(session):
    module, call = session.compiled(Transposed)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2, momentum=0.9)
    values = []
    for number, x in enumerate(session.batches(2, WIDTH)):
        loss = call(x)
        loss.backward()
        values += [loss.detach(), *(weight.grad.clone() for weight in module.weights)]
        if number % 3:
            optimizer.step()
        if number % 2:
            optimizer.zero_grad()
    return values


def test_gradients_of_transposed_weights_are_copied_into_no_graph(way):
    counters = way.compare(train)
    assert counters["replays"] > 0
    assert (
        counters["copied_bytes"] / counters["replays"] < 2048
    )  # what lies between; a weight has 16384


def test_views_are_kept(way):
    def program(session):
        call = session.compile(
            lambda x, w: (
                made := mm(x.sin().cos().exp().tanh(), w),
                made.t(),
                made.view(-1)[3:],
                x.cos(),
            )
        )
        weight, held = session.randn(WIDTH, WIDTH), []
        with torch.no_grad():
            for x in session.batches(2, WIDTH):
                held.append(call(x, weight))
                held[-1][1].add_(1)  # of all that shares its memory
        return [value for values in held for value in values]

    assert way.compare(program)["replays"] > 0
