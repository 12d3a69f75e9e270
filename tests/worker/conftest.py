"""Fixtures of the worker's tests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from rowcast.tests.worker.rank_pool import RankPool

# Triton decides when a kernel file is imported whether it compiles or interprets; this machine may have no GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", "triton"])
def kernel_backend(request: pytest.FixtureRequest) -> str:
    """Both sets of kernels, on the CPU: the Numba twins, and Triton's interpreted."""
    return request.param


@pytest.fixture(scope="session")
def rank_pool() -> Iterator[RankPool]:
    """Rank processes for every test that needs more than one."""
    from rowcast.tests.worker.rank_pool import RankPool

    with RankPool() as pool:
        yield pool
