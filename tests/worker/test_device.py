"""In which numbers a rank computes."""

from __future__ import annotations

import pytest
import torch
from rowcast.worker.device import resolve_dtype

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_auto_follows_the_checkpoint_on_a_gpu_and_is_float32_on_a_cpu(stored: str):
    assert resolve_dtype("auto", stored, GPU, kernel_backend="triton") is getattr(torch, stored)
    assert resolve_dtype("auto", stored, CPU, kernel_backend="cpu") is torch.float32
    assert resolve_dtype("auto", stored, CPU, kernel_backend="triton") is torch.float32


@pytest.mark.parametrize("name", ["bfloat16", "float16"])
def test_what_was_asked_for_is_what_is_computed_or_refused(name: str):
    for device in (CPU, GPU):  # interpreted Triton computes in 16 bits on a CPU too
        dtype = resolve_dtype(name, "float32", device, kernel_backend="triton")
        assert dtype is getattr(torch, name)
    with pytest.raises(ValueError, match=f"dtype {name} needs a GPU"):
        resolve_dtype(name, name, CPU, kernel_backend="cpu")
