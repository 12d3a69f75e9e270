"""Fixtures of the worker's tests."""

from __future__ import annotations

import os

import pytest

# Triton decides when a kernel file is imported whether it compiles or interprets; this machine may have no GPU.
os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(params=["cpu", "triton"])
def kernel_backend(request: pytest.FixtureRequest) -> str:
    """Both sets of kernels, on the CPU: the Numba twins, and Triton's interpreted."""
    return request.param
