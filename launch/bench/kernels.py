"""`bench_kernels`: each kernel's time beside what the machine's memory or arithmetic allows.

Every kernel is first compared with its torch reference on a few requests of the same shape; a kernel that is wrong is
not timed. The KV cache has many layers, visited in turn, so that no layer lies in the processor's own caches, as in a
model. The peaks are measured here, not taken from a data sheet: reading a large array, and a large matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...worker.backend import Backend, select_backend

_PEAK_BYTES = 256 * 1024 * 1024


def bench_kernels(
    *,
    device: str = "auto",
    kernel_backend: str = "auto",
    dtype: str = "float32",
    num_threads: int = 2,
    num_heads: int = 9,
    num_kv_heads: int = 3,
    head_dim: int = 64,
    block_size: int = 16,
    num_layers: int = 30,
    decode_reqs: int = 32,
    decode_len: int = 192,
    prefill_reqs: int = 8,
    prefill_len: int = 128,
    input_rows: int = 1024,
    repeats: int = 20,
) -> dict[str, Any]:
    """Measure decode and prefill attention, the KV write and the input kernels.

    Units: ms and us are medians of one call with the tenth and ninetieth percentile beside them; GB is 10**9 bytes;
        a call of attention or of the KV write is one layer.
    Example: the defaults are SmolLM2-135M: 32 decoding requests of 192 tokens, 8 prompts of 128.
    Raises: ValueError if a kernel differs from its reference, or if device and kernel_backend do not go together.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = select_backend(kernel_backend, device, num_threads=num_threads)
    torch.set_num_threads(num_threads)
    torch_dtype = getattr(torch, dtype)
    read_gb_s, tflop_s = _peaks(device, torch_dtype)
    figures: dict[str, Any] = {
        "device": device,
        "backend": backend.name,
        "dtype": dtype,
        "num_threads": num_threads,
        "heads": [num_heads, num_kv_heads, head_dim],
        "block_size": block_size,
        "peak_read_gb_s": round(read_gb_s, 1),
        "peak_tflop_s": round(tflop_s, 3),
    }

    def case(seq_lens: list[int], query_lens: list[int]) -> _Case:
        return _Case(
            seq_lens,
            query_lens,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            block_size=block_size,
            num_layers=num_layers,
            dtype=torch_dtype,
            device=device,
        )

    decode = case([decode_len] * decode_reqs, [1] * decode_reqs)
    decode.check(backend)
    spent = _time(lambda layer: decode.attend(backend, layer), num_layers, repeats, device)
    token_bytes = 2 * num_kv_heads * head_dim * torch_dtype.itemsize
    figures["decode_attention"] = {
        "requests": decode_reqs,
        "seq_len": decode_len,
        **_milliseconds(spent),
        **_share("gb_s", decode_reqs * decode_len * token_bytes / 1e9, spent, read_gb_s),
    }

    prefill = case([prefill_len] * prefill_reqs, [prefill_len] * prefill_reqs)
    prefill.check(backend)
    spent = _time(lambda layer: prefill.attend(backend, layer), num_layers, repeats, device)
    seen = (
        prefill_reqs * prefill_len * (prefill_len + 1) // 2
    )  # (query, key) pairs, each two products
    figures["prefill_attention"] = {
        "requests": prefill_reqs,
        "seq_len": prefill_len,
        **_milliseconds(spent),
        **_share("tflop_s", seen * num_heads * head_dim * 4 / 1e12, spent, tflop_s),
    }

    spent = _time(lambda layer: prefill.write(backend, layer), num_layers, repeats, device)
    moved = 2 * prefill_reqs * prefill_len * token_bytes / 1e9  # read, and written
    figures["kv_write"] = {
        "tokens": prefill_reqs * prefill_len,
        **_milliseconds(spent),
        **_share("gb_s", moved, spent, read_gb_s),
    }
    figures["inputs"] = {"rows": input_rows, **_inputs(backend, input_rows, repeats, device)}
    return figures


class _Case:
    """Requests with random KV in shuffled blocks of a pool that all layers share."""

    def __init__(
        self,
        seq_lens: list[int],
        query_lens: list[int],
        *,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        block_size: int,
        num_layers: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        max_blocks = -(-max(seq_lens) // block_size)
        num_blocks = 1 + max_blocks * len(seq_lens)
        shape = (num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        self._pool = torch.randn(shape, generator=generator).to(device, dtype)
        blocks = 1 + torch.randperm(num_blocks - 1, generator=generator)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        num_tokens = int(starts[-1])

        def i32(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(device)

        self._block_table = i32(blocks.view(len(seq_lens), max_blocks))
        self._seq_lens, self._query_start_loc = i32(seq_lens), i32(starts)
        self._query = torch.randn(num_tokens, num_heads, head_dim, generator=generator).to(
            device, dtype
        )
        self._out = torch.empty_like(self._query)
        self._scale = head_dim**-0.5
        self._keys = torch.randn(num_tokens, num_kv_heads, head_dim, generator=generator).to(
            device, dtype
        )
        self._slots = torch.empty(num_tokens, dtype=torch.int64, device=device)
        positions = [
            np.arange(seq_len - query_len, seq_len)
            for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
        ]
        import_module("...kernels.slot_mapping", __package__).slot_mapping_reference(
            i32(range(len(seq_lens))).cpu(),
            self._query_start_loc.cpu(),
            torch.as_tensor(np.concatenate(positions)),
            self._block_table.cpu(),
            block_size=block_size,
            out=(slots := torch.empty(num_tokens, dtype=torch.int64)),
        )
        self._slots.copy_(slots)

    def _arguments(self, layer: int, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return (
            self._query,
            self._pool[:, layer, 0],
            self._pool[:, layer, 1],
            self._block_table[:num_reqs],
            self._seq_lens[:num_reqs],
            self._query_start_loc[: num_reqs + 1],
        )

    def attend(self, backend: Backend, layer: int) -> None:
        backend.paged_attention(
            *self._arguments(layer, self._seq_lens.shape[0]), scale=self._scale, out=self._out
        )

    def write(self, backend: Backend, layer: int) -> None:
        cache = self._pool[:, layer]
        backend.kv_write(self._keys, self._keys, cache[:, 0], cache[:, 1], self._slots)

    def check(self, backend: Backend, *, num_reqs: int = 2) -> None:
        reference = import_module("...kernels.paged_attention", __package__)
        wanted = torch.zeros_like(self._query)
        reference.paged_attention_reference(
            *self._arguments(0, num_reqs), scale=self._scale, out=wanted
        )
        self.attend(backend, 0)
        num_tokens = int(self._query_start_loc[num_reqs])
        error = (self._out[:num_tokens] - wanted[:num_tokens]).abs().max().item()
        allowed = 2e-6 if self._query.dtype == torch.float32 else 2e-2
        if not error <= allowed:  # NaN, too
            raise ValueError(
                f"paged_attention ({backend.name}): differs from its reference by {error:.2e}, "
                f"at most {allowed:.0e} is rounding; not timed"
            )


def _inputs(backend: Backend, rows: int, repeats: int, device: str) -> dict[str, Any]:
    """Microseconds of the three input kernels on a steady decode step of `rows` requests."""
    generator = np.random.default_rng(0)
    computed = generator.integers(100, 1000, rows)

    def tensor(values: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(values).to(device, dtype)

    index_mapping = tensor(generator.permutation(rows))
    starts = tensor(np.arange(rows + 1))
    token_ids = tensor(np.zeros((rows, 1024)))
    block_table = tensor(generator.integers(1, 2**20, (rows, 64)))
    num_computed, num_blocks = tensor(computed), tensor(computed // 16 + 1)
    input_ids, seq_lens = (torch.empty(rows, dtype=torch.int32, device=device) for _ in range(2))
    positions, slots = (torch.empty(rows, dtype=torch.int64, device=device) for _ in range(2))
    gathered = torch.empty_like(block_table)
    calls: dict[str, Callable[[int], object]] = {
        "token_inputs": lambda _: backend.token_inputs(
            index_mapping,
            starts,
            num_computed,
            token_ids,
            input_ids=input_ids,
            positions=positions,
            seq_lens=seq_lens,
        ),
        "block_table_gather": lambda _: backend.block_table_gather(
            index_mapping, block_table, num_blocks, out=gathered
        ),
        "slot_mapping": lambda _: backend.slot_mapping(
            index_mapping, starts, positions, block_table, block_size=16, out=slots
        ),
    }
    return {
        f"{name}_us": round(float(np.median(_time(call, 20, repeats, device))) * 1e6, 2)
        for name, call in calls.items()
    }


def _time(call: Callable[[int], object], rounds: int, repeats: int, device: str) -> np.ndarray:
    """Seconds of one call: for each repeat the mean over `rounds` calls in a row."""
    spent = np.empty(repeats)
    for repeat in range(-2, repeats):  # two to warm up
        _synchronize(device)
        start = time.perf_counter()
        for layer in range(rounds):
            call(layer)
        _synchronize(device)
        spent[repeat] = (time.perf_counter() - start) / rounds
    return spent


def _peaks(device: str, dtype: torch.dtype) -> tuple[float, float]:
    """(GB/s of reading, TFLOP/s of a matrix product), the best of several tries."""
    array = torch.ones(_PEAK_BYTES // dtype.itemsize, dtype=dtype, device=device)
    read = float(_time(lambda _: array.sum(), 1, 5, device).min())
    size = 1024 if device == "cpu" else 8192
    matrix = torch.randn(size, size, device=device).to(dtype)
    product = float(_time(lambda _: torch.mm(matrix, matrix), 1, 5, device).min())
    return _PEAK_BYTES / read / 1e9, 2 * size**3 / product / 1e12


def _milliseconds(spent: np.ndarray) -> dict[str, float]:
    low, median, high = (float(value) * 1e3 for value in np.percentile(spent, (10, 50, 90)))
    return {"ms": round(median, 4), "ms_p10": round(low, 4), "ms_p90": round(high, 4)}


def _share(name: str, work: float, spent: np.ndarray, peak: float) -> dict[str, float]:
    rate = work / float(np.median(spent))
    return {name: round(rate, 4), "share_of_peak": round(rate / peak, 3)}


def _synchronize(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()
