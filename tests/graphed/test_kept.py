"""What is put back after recording, and what is left as it is."""

import torch

from cgpass.graphed.kept import KeptState


def test_values_and_versions_are_put_back():
    buffer, parameter = torch.ones(2), torch.nn.Parameter(torch.ones(2))
    kept = KeptState()
    kept.keep([parameter, buffer], 1)
    with torch.no_grad():
        parameter.mul_(2)
        buffer.mul_(2)
    kept.forget_unwritten()
    kept.put_back()
    assert parameter.tolist() == buffer.tolist() == [1, 1]
    assert parameter._version == buffer._version == 0


def test_what_is_written_after_it_was_given_up_keeps_its_version():
    """As hooks that put other weights in: a backward that is pending has to notice."""
    parameter = torch.nn.Parameter(torch.ones(2))
    kept = KeptState()
    kept.keep([parameter], 1)
    kept.forget_unwritten()
    with torch.no_grad():
        parameter.mul_(2)
    kept.put_back()
    assert parameter.tolist() == [2, 2]
    assert parameter._version == 1
