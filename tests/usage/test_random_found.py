"""What random programs and reviews found."""

import torch

from tests.usage.random_programs import Graph, check
from tests.usage.random_steps import Backward, Call, Edit, Program
from tests.usage.random_strategies import MODELS


def test_mutation_of_an_input_that_a_partition_before_also_reads_reaches_the_user(setting):
    lines = (
        "self.n.add_(y.detach().mean(0))",
        "v2 = y.sin()",
        "v3 = v2.sin()",
        "v4 = v3.sin()",
        "v5 = v4 * torch.nonzero(v4.detach().sum(-1) > 0).shape[0]",
        "y.add_(y.detach())",
        "v6 = (v5 @ self.w).tanh()",
    )
    check(setting, Graph(lines, ("v6",), "y"), [Program(steps=(Call(), Call()))])


def test_mutated_input_that_wants_a_gradient_and_pending_forwards(setting):
    lines = (
        "x.mul_(0.5)",
        "v2 = x * torch.nonzero(y.detach().sum(-1) > 0).shape[0]",
        "v3 = (v2 * self.b).sigmoid()",
    )
    check(setting, Graph(lines, ("v3",), "x"), [Program(steps=(Call(grad=True),) * 3)])


def test_output_that_is_a_view_of_a_saved_tensor_edited_before_its_backward(setting):
    steps = (Call(), Backward(), Call(), Edit(part=1))
    check(setting, MODELS[1], [Program(steps=steps)])


def test_outputs_made_in_inference_mode_are_inference_tensors(setting):
    lines = ("v2 = y.sin()", "v3 = v2 + torch.nonzero(v2.detach() > 0).sum()")
    steps = (*(Call(),) * 4, *(Call(mode="inference"),) * 4)
    check(setting, Graph(lines, ("v3", "v2[:, 1:]")), [Program(steps=steps)])


def test_backward_refused_after_a_held_output_was_edited(setting):
    """Without graphs autograd refuses; with graphs the gradients of the unedited values come (right, but other)."""
    program = Program(steps=(*(Call(),) * 6, Call(keep="last"), Edit()))
    check(setting, MODELS[2], [program], refused_too=True)


def test_a_call_whose_own_input_is_moved_to_make_room_is_not_recorded_at_its_old_place(setting):
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.a = torch.nn.Parameter(torch.linspace(0.5, 1.5, 6))
            self.b = torch.nn.Parameter(torch.linspace(1.0, 2.0, 6))

        def forward(self, x):
            q = (x * self.a).sin().exp()
            k = torch.nonzero(q > 1.0).sum()
            return ((q + k).sin() * self.b).cos(), q

    def program(session):
        module, call = session.compiled(Model, dynamic=False)
        values = []
        first, other = module.a.data, module.a.data * 0.5

        def calls(count):
            for _ in range(count):
                values.extend(t.clone() for t in call(session.randn(3, 6)))

        with torch.no_grad():
            calls(3)
            module.a.data = other
            calls(3)
            module.a.data = first
            kept = module.b.data
            module.b.data = kept.clone()
            calls(4)
        return values

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        setting.compare(program, min_partition_ops=1, on_skip="silent")


def test_what_is_held_of_a_dropped_recording_is_not_where_older_ones_write(setting):
    def program(session):
        call = session.wrap(lambda x: x.sin().exp().cos().tanh() * 2)
        small, large, third, new = (session.randn(*s) for s in ((2, 12), (12, 2), (4, 6), (3, 8)))
        with torch.no_grad():
            call(small), call(large), call(large)
            out = call(small)
            for _ in range(40):
                call(third)
            call(new), call(new)  # the idle recording of `small` makes room
            call(large)
        return [out]

    setting.compare(program, max_recordings=3)


def test_outputs_that_share_memory_share_the_count_of_writes(setting):
    def program(session):
        def fn(x):
            y = x.exp()
            return y, y.t()

        call = session.compile(fn)
        refused = 0
        for _ in range(5):
            x = session.randn(3, 3).requires_grad_()
            first, second = call(x)
            with torch.no_grad():
                first.add_(1)
            try:
                (first.sum() + second.sum()).backward()
            except RuntimeError:
                refused += 1
            del first, second
        return [refused]

    setting.compare(program, min_partition_ops=1)
