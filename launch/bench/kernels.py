"""`bench_kernels`: each kernel's time beside what the machine's memory or arithmetic allows.

Every kernel is first compared with its torch reference (`kernel_cases.py`); a kernel that is wrong is not timed. The KV
cache has many layers, visited in turn, so that no layer lies in the processor's own caches, as in a model. The peaks
are measured here, not taken from a data sheet: reading a large array, and a large matrix product.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ...worker.backend import Backend, select_backend
from .kernel_cases import AttentionCase, ExpertsCase, InputsCase, SamplingCase

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
    sliding_reqs: int = 32,
    sliding_len: int = 2048,
    window: int = 512,
    experts: tuple[int, int, int, int] = (32, 8, 1024, 1024),
    expert_layers: int = 2,
    expert_tokens: tuple[int, int] = (32, 512),
    input_rows: int = 1024,
    sampling: tuple[tuple[int, int], ...] = ((64, 49_152), (256, 128_256)),
    repeats: int = 20,
) -> dict[str, Any]:
    """Measure attention in decode, prefill and a sliding window, KV write, the experts' product, inputs and sampling.

    Units: ms and us are medians of one call with the tenth and ninetieth percentile beside them; GB is 10**9 bytes;
        a call of attention or of the KV write is one layer.
    Example: the defaults are SmolLM2-135M: 32 decoding requests of 192 tokens, 8 prompts of 128; the window is that of
        Gemma 3 270M on 2,048 tokens, with the same requests' full attention beside it; experts (how many, how many a
        token takes, n, k) are gate and up of Granite 3 1B-A400M, for a decode step and a prefill of expert_tokens;
        sampling is rows and vocabulary ids, those of SmolLM2 and of Llama 3.
    Raises: ValueError if a kernel differs from its reference, or if device and kernel_backend do not go together.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    backend = select_backend(kernel_backend, device, num_threads=num_threads)
    torch.set_num_threads(num_threads)
    torch_dtype = getattr(torch, dtype)
    read_gb_s, tflop_s = peaks = _peaks(device, torch_dtype)
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

    model = _Heads(num_heads, num_kv_heads, head_dim)

    def case(
        seq_lens: list[int], query_lens: list[int], heads: _Heads, layers: int
    ) -> AttentionCase:
        return AttentionCase(
            seq_lens,
            query_lens,
            **heads._asdict(),
            block_size=block_size,
            num_layers=layers,
            dtype=torch_dtype,
            device=device,
        )

    decode = case([decode_len] * decode_reqs, [1] * decode_reqs, model, num_layers)
    decode.check_attention(backend)
    spent = _time(lambda layer: decode.attend(backend, layer), num_layers, repeats, device)
    token_bytes = 2 * num_kv_heads * head_dim * torch_dtype.itemsize
    figures["decode_attention"] = {
        "requests": decode_reqs,
        "seq_len": decode_len,
        **_milliseconds(spent),
        **_share("gb_s", decode_reqs * decode_len * token_bytes / 1e9, spent, read_gb_s),
    }

    prefill = case([prefill_len] * prefill_reqs, [prefill_len] * prefill_reqs, model, num_layers)
    prefill.check_attention(backend)
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

    prefill.check_write(backend)
    spent = _time(lambda layer: prefill.write(backend, layer), num_layers, repeats, device)
    moved = 2 * prefill_reqs * prefill_len * token_bytes / 1e9  # read, and written
    figures["kv_write"] = {
        "tokens": prefill_reqs * prefill_len,
        **_milliseconds(spent),
        **_share("gb_s", moved, spent, read_gb_s),
    }

    sliding = case([sliding_len] * sliding_reqs, [1] * sliding_reqs, _GEMMA_3_270M, _SLIDING_LAYERS)
    token_bytes = 2 * _GEMMA_3_270M.num_kv_heads * _GEMMA_3_270M.head_dim * torch_dtype.itemsize
    for name, visible in (("full", 0), ("sliding", window)):
        sliding.check_attention(backend, window=visible)
        spent = _time(
            partial(sliding.attend, backend, window=visible), _SLIDING_LAYERS, repeats, device
        )
        seen = min(visible or sliding_len, sliding_len)
        figures[f"{name}_decode_attention"] = {
            "requests": sliding_reqs,
            "seq_len": sliding_len,
            "window": visible,
            "heads": list(_GEMMA_3_270M),
            **_milliseconds(spent),
            **_share("gb_s", sliding_reqs * seen * token_bytes / 1e9, spent, read_gb_s),
        }

    for name, num_tokens in zip(("decode", "prefill"), expert_tokens, strict=True):
        figures[f"{name}_experts"] = _experts(
            backend, num_tokens, experts, expert_layers, torch_dtype, device, repeats, peaks
        )

    for num_groups in (1, 6):
        figures[f"inputs_of_{num_groups}_groups"] = {
            "rows": input_rows,
            **_inputs(backend, input_rows, num_groups, repeats, device),
        }

    for rows, ids in sampling:
        figures[f"sampling_{rows}_x_{ids}"] = _sampling(
            backend, rows, ids, repeats, device, read_gb_s
        )
    return figures


class _Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


_GEMMA_3_270M = _Heads(4, 1, 256)
_SLIDING_LAYERS = 4  # of 134 MB in float32; what a window of 512 reads of them is still more than a processor keeps


def _experts(
    backend: Backend,
    num_tokens: int,
    experts: tuple[int, int, int, int],
    num_layers: int,
    dtype: torch.dtype,
    device: str,
    repeats: int,
    peaks: tuple[float, float],
) -> dict[str, Any]:
    """One product beside what reading its weights, and beside what its arithmetic would take at the peak."""
    num_experts, experts_per_token, n, k = experts
    case = ExpertsCase(
        num_tokens,
        experts_per_token=experts_per_token,
        num_experts=num_experts,
        n=n,
        k=k,
        num_layers=num_layers,
        dtype=dtype,
        device=device,
    )
    case.check(backend)
    spent = _time(lambda layer: case.multiply(backend, layer), num_layers, repeats, device)
    moved = (case.experts_with_rows * n * k + case.num_rows * (n + k)) * dtype.itemsize / 1e9
    work = 2 * case.num_rows * n * k / 1e12
    median = float(np.median(spent))
    return {
        "experts": list(experts),
        "tokens": num_tokens,
        **_milliseconds(spent),
        "gb_s": round(moved / median, 2),
        "tflop_s": round(work / median, 4),
        "share_of_roofline": round(max(moved / peaks[0], work / peaks[1]) / median, 3),
    }


def _inputs(
    backend: Backend, rows: int, num_groups: int, repeats: int, device: str
) -> dict[str, Any]:
    """Microseconds of the three input kernels on a steady decode step of `rows` requests."""
    case = InputsCase(rows, num_groups=num_groups, device=device)
    case.check(backend)
    calls: dict[str, Callable[[int], object]] = {
        "token_inputs": lambda _: case.token_inputs(backend.token_inputs),
        "block_table_gather": lambda _: case.block_table_gather(backend.block_table_gather),
        "slot_mapping": lambda _: case.slot_mapping(backend.slot_mapping),
    }
    return {
        f"{name}_us": round(float(np.median(_time(call, 20, repeats, device))) * 1e6, 2)
        for name, call in calls.items()
    }


def _sampling(
    backend: Backend, rows: int, ids: int, repeats: int, device: str, read_gb_s: float
) -> dict[str, Any]:
    """The two kernels over whole rows of logits, beside what reading them once would take at the peak."""
    num_copies = min(max(2, _PEAK_BYTES // (8 * rows * ids)), 8)  # more than a processor keeps
    case = SamplingCase(rows, ids, num_copies=num_copies, device=device)
    case.check(backend)
    calls: dict[str, Callable[[int], object]] = {
        "gumbel_argmax": partial(case.choose, backend.gumbel_argmax),
        "softmax_mass": partial(case.mass, backend.softmax_mass),
    }
    figures = {}
    for name, call in calls.items():
        spent = _time(call, num_copies, repeats, device)
        moved = rows * ids * 4 / 1e9
        figures[name] = {**_milliseconds(spent), **_share("gb_s", moved, spent, read_gb_s)}
    return figures


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
