"""What `cgpass.explain` puts back of modules beside values: sparse tensors, names and their order."""

import pytest
import torch
from torch import nn

import cgpass
from tests.report.test_explain import X

pytestmark = pytest.mark.usefixtures("simulated")


@pytest.mark.filterwarnings("ignore:Sparse CSR:UserWarning")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_tensors_are_put_back(layout):
    class Decaying(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("edges", torch.eye(8).to_sparse(layout=layout))

        @torch.compiler.disable
        def gather(self, x):
            self.edges.mul_(0.5)
            return torch.sparse.mm(self.edges, x)

        def forward(self, x):
            return self.gather(x).sin().cos().exp()

    model = Decaying()
    edges = model.edges
    cgpass.explain(model, torch.randn(8, 8), training=False)
    assert model.edges is edges
    assert torch.equal(edges.to_dense(), torch.eye(8))


class Renaming(nn.Module):
    """Assigns under other names, in another order."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(8)), nn.Parameter(torch.ones(8))
        self.register_buffer("kept", torch.ones(8))
        self.register_buffer("dropped", torch.ones(8), persistent=False)

    @torch.compiler.disable
    def rename(self):
        first = self.a if hasattr(self, "a") else self.c
        if hasattr(self, "a"):
            del self.a
        self.c = first
        for name, persistent in (("kept", False), ("dropped", True)):
            self.register_buffer(name, self._buffers.pop(name), persistent=persistent)
        return first

    def forward(self, x):
        return (x * self.rename() * self.b).sin().cos().exp()


def test_names_are_put_back_in_their_order():
    model = Renaming()
    names = list(dict(model.named_parameters())), list(model.state_dict())
    parameters = list(model.parameters())
    cgpass.explain(model, X)
    assert (list(dict(model.named_parameters())), list(model.state_dict())) == names
    assert all(a is b for a, b in zip(model.parameters(), parameters, strict=True))
