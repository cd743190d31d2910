"""A backward that runs without a graph since no recording fits is told of, once."""

import logging

import torch


def test_a_backward_past_max_rerecords_is_told_of_once(setting, caplog):
    module = torch.nn.Linear(4, 4).to(setting.device)
    graphed = setting.graphed(module, (setting.randn(2, 4, grad=True),), max_rerecords=0)
    pack, unpack = (lambda tensor: tensor.clone()), (lambda tensor: tensor)
    with caplog.at_level(logging.WARNING, "cgpass"):
        for _ in range(4):
            x = setting.randn(2, 4, grad=True)
            with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
                out = graphed(x)
            out.sum().backward()
            torch.testing.assert_close(x.grad, module.weight.sum(0).expand(2, 4))
    said = [
        r.getMessage()
        for r in caplog.records
        if "runs a backward without a graph" in r.getMessage()
    ]
    assert len(said) == 1, caplog.text
    assert said[0].endswith("it reads other memory than max_rerecords recordings of it do.")
