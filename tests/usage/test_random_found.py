"""What random programs found."""

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
