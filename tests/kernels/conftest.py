"""What the kernels' tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(params=[1, 2])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """Run with one thread, then with two."""
    # The kernels of GPUs are tested without the CPU's compiler as well.
    from chatd_kernels import runtime

    before = runtime.num_threads()
    runtime.set_num_threads(request.param)
    yield request.param
    runtime.set_num_threads(before)


@pytest.fixture(autouse=True)
def seed() -> None:
    """Every test draws the same numbers in every run."""
    torch.manual_seed(0)
