"""A pytest fixture for users' tests. It lies beside the package so that other runs of pytest don't import torch."""

from collections.abc import Callable
from typing import Any

import pytest


@pytest.fixture
def cgpass_expect() -> Callable[..., Any]:
    """What `cgpass.expect` is, for tests that count events."""
    import cgpass  # noqa: PLC0415

    return cgpass.expect
