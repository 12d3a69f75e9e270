"""What the launchers ask of their tensors before they launch: a kernel reads whatever memory it is pointed at."""

from __future__ import annotations

import torch


def check_int_tensors(kernel: str, **tensors: tuple[torch.Tensor, torch.dtype, int]) -> None:
    """Refuse a tensor of another dtype or rank, one not packed in its last dimension, and tensors on two devices.

    Each keyword is a parameter's name; its value is (tensor, dtype wanted, dimensions wanted).
    """
    device = None
    for name, (tensor, dtype, ndim) in tensors.items():
        if tensor.dtype != dtype or tensor.dim() != ndim:
            raise ValueError(
                f"{kernel}: {name} must be {dtype} with {ndim} dimensions, "
                f"got {tensor.dtype} of shape {tuple(tensor.shape)}"
            )
        if tensor.stride(-1) != 1 and tensor.shape[-1] > 1:
            raise ValueError(
                f"{kernel}: {name} must be packed in its last dimension, got strides {tensor.stride()}"
            )
        if device is None:
            device = tensor.device
        elif tensor.device != device:
            raise ValueError(f"{kernel}: {name} must be on {device}, got {tensor.device}")


def check_lengths(kernel: str, num_rows: int, **tensors: torch.Tensor) -> None:
    """Refuse a one-dimensional tensor that is not as long as `rows`."""
    for name, tensor in tensors.items():
        if len(tensor) != num_rows:
            raise ValueError(
                f"{kernel}: {name} must be as long as rows, {num_rows}, got {len(tensor)}"
            )


def is_packed(tensor: torch.Tensor) -> bool:
    """Whether everything behind the first dimension lies without gaps; a dimension of length 1 may have any stride."""
    items = 1
    for size, stride in zip(reversed(tensor.shape[1:]), reversed(tensor.stride()[1:]), strict=True):
        if size != 1 and stride != items:
            return False
        items *= size
    return True


def check_cache(kernel: str, key_cache: torch.Tensor, value_cache: torch.Tensor) -> None:
    """Refuse caches that are not [num_blocks, num_kv_heads, block_size, head_dim], packed behind dimension 0."""
    if key_cache.dim() != 4 or value_cache.shape != key_cache.shape:
        raise ValueError(
            f"{kernel}: key_cache and value_cache must both be [num_blocks, num_kv_heads, block_size, head_dim], "
            f"got {tuple(key_cache.shape)} and {tuple(value_cache.shape)}"
        )
    for name, cache in (("key_cache", key_cache), ("value_cache", value_cache)):
        if not is_packed(cache):
            raise ValueError(
                f"{kernel}: {name} must be packed behind its first dimension, got shape "
                f"{tuple(cache.shape)} with strides {cache.stride()}"
            )
    if value_cache.dtype != key_cache.dtype or value_cache.device != key_cache.device:
        raise ValueError(
            f"{kernel}: key_cache and value_cache must agree, got {key_cache.dtype} on {key_cache.device} "
            f"and {value_cache.dtype} on {value_cache.device}"
        )
