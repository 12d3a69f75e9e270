"""What `bench kernels` runs: a paged cache to attend to and to write, a step's inputs to gather, experts, and sampling.

Each case can check the kernels that it will run against their torch references; a kernel that is wrong must not be
timed. Measures nothing itself.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import numpy as np
import torch

from ...worker.backend import Backend


def _reference(name: str) -> Any:
    return getattr(import_module(f"...kernels.{name}", __package__), f"{name}_reference")


class AttentionCase:
    """Requests with random KV in shuffled blocks of a pool that all layers share.

    Units: seq_lens and query_lens are the tokens of each request; a window is tokens, 0 is none.
    """

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

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        def i32(values: Any) -> torch.Tensor:
            return torch.as_tensor(values, dtype=torch.int32).to(device)

        max_blocks = -(-max(seq_lens) // block_size)
        num_blocks = 1 + max_blocks * len(seq_lens)
        self._pool = normal(num_blocks, num_layers, 2, num_kv_heads, block_size, head_dim)
        blocks = 1 + torch.randperm(num_blocks - 1, generator=generator)
        starts = np.concatenate([[0], np.cumsum(query_lens)])
        num_tokens = int(starts[-1])
        self._block_table = i32(blocks.view(len(seq_lens), max_blocks))
        self._seq_lens, self._query_start_loc = i32(seq_lens), i32(starts)
        self._query = normal(num_tokens, num_heads, head_dim)
        self._out = torch.empty_like(self._query)
        self._scale = head_dim**-0.5
        self._keys, self._values = (normal(num_tokens, num_kv_heads, head_dim) for _ in range(2))
        positions = [
            np.arange(seq_len - query_len, seq_len)
            for seq_len, query_len in zip(seq_lens, query_lens, strict=True)
        ]
        slots = torch.empty(num_tokens, dtype=torch.int64)
        _reference("slot_mapping")(
            torch.arange(len(seq_lens), dtype=torch.int32),
            self._query_start_loc.cpu(),
            torch.as_tensor(np.concatenate(positions)),
            self._block_table.cpu(),
            block_size=block_size,
            out=slots,
        )
        self._slots = slots.to(device)

    def attend(self, backend: Backend, layer: int, *, window: int = 0) -> None:
        backend.paged_attention(
            *self._arguments(layer, len(self._seq_lens)),
            scale=self._scale,
            out=self._out,
            window=window,
        )

    def write(self, backend: Backend, layer: int) -> None:
        cache = self._pool[:, layer]
        backend.kv_write(self._keys, self._values, cache[:, 0], cache[:, 1], self._slots)

    def check_attention(self, backend: Backend, *, window: int = 0, num_reqs: int = 2) -> None:
        """Raises: ValueError if the first requests' attention is not what the reference says."""
        wanted = torch.zeros_like(self._query)
        _reference("paged_attention")(
            *self._arguments(0, num_reqs), scale=self._scale, out=wanted, window=window
        )
        self.attend(backend, 0, window=window)
        num_tokens = int(self._query_start_loc[num_reqs])
        error = (self._out[:num_tokens] - wanted[:num_tokens]).abs().max().item()
        allowed = 2e-6 if self._query.dtype == torch.float32 else 2e-2
        if not error <= allowed:  # NaN, too
            raise ValueError(
                f"paged_attention ({backend.name}): differs from its reference by {error:.2e}, "
                f"at most {allowed:.0e} is rounding; not timed"
            )

    def check_write(self, backend: Backend) -> None:
        """Raises: ValueError if a layer of the cache is not, bit by bit, what the reference makes of it."""
        wanted = self._pool[:, 0].clone()
        _reference("kv_write")(self._keys, self._values, wanted[:, 0], wanted[:, 1], self._slots)
        self.write(backend, 0)
        _refuse_unless(torch.equal(self._pool[:, 0], wanted), "kv_write", backend)

    def _arguments(self, layer: int, num_reqs: int) -> tuple[torch.Tensor, ...]:
        return (
            self._query,
            self._pool[:, layer, 0],
            self._pool[:, layer, 1],
            self._block_table[:num_reqs],
            self._seq_lens[:num_reqs],
            self._query_start_loc[: num_reqs + 1],
        )


class InputsCase:
    """A decode step of `rows` requests of 100 to 1,000 tokens, in `num_groups` KV groups of one block size."""

    _BLOCK_SIZE = 16
    _MAX_MODEL_LEN = 1024

    def __init__(self, rows: int, *, num_groups: int, device: str) -> None:
        generator = np.random.default_rng(0)
        width = self._MAX_MODEL_LEN // self._BLOCK_SIZE
        computed = generator.integers(100, self._MAX_MODEL_LEN - 24, rows)
        block_table = generator.integers(1, 2**20, (num_groups, rows, width))
        token_ids = generator.integers(0, 2**16, (rows, self._MAX_MODEL_LEN))

        def i32(values: Any) -> torch.Tensor:
            return torch.as_tensor(values).to(device, torch.int32)

        def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
            return torch.full(shape, -7, dtype=dtype, device=device)

        self._index_mapping, self._starts = i32(np.arange(rows)), i32(np.arange(rows + 1))
        self._computed, self._token_ids = i32(computed), i32(token_ids)
        self._block_table, self._num_blocks = i32(block_table), i32(computed // 16 + 1)
        self._input_ids, self._seq_lens = empty(rows), empty(rows)
        self._positions = empty(rows, dtype=torch.int64)
        self._slots = empty(num_groups, rows, dtype=torch.int64)
        self._gathered = empty(num_groups, rows, width)

    def token_inputs(self, kernel: Any) -> None:
        kernel(
            self._index_mapping,
            self._starts,
            self._computed,
            self._token_ids,
            input_ids=self._input_ids,
            positions=self._positions,
            seq_lens=self._seq_lens,
        )

    def block_table_gather(self, kernel: Any) -> None:
        kernel(self._index_mapping, self._block_table, self._num_blocks, out=self._gathered)

    def slot_mapping(self, kernel: Any) -> None:
        """With what keeps the gathered rows up to date, as in a step whose batch goes on."""
        kernel(
            self._index_mapping,
            self._starts,
            self._positions,
            self._block_table,
            block_size=self._BLOCK_SIZE,
            out=self._slots,
            gathered=self._gathered,
        )

    def check(self, backend: Backend) -> None:
        """Raises: ValueError if one of the three kernels does not write what its reference writes."""
        outputs = {
            "token_inputs": ("_input_ids", "_positions", "_seq_lens"),
            "block_table_gather": ("_gathered",),
            "slot_mapping": ("_slots", "_gathered"),
        }
        for name, written in outputs.items():
            getattr(self, name)(getattr(backend, name))
            got = [getattr(self, field).clone() for field in written]
            getattr(self, name)(_reference(name))
            right = all(map(torch.equal, got, (getattr(self, field) for field in written)))
            _refuse_unless(right, name, backend)


class ExpertsCase:
    """Tokens that each take `experts_per_token` experts at random, and one weight [num_experts, n, k] a layer."""

    def __init__(
        self,
        num_tokens: int,
        *,
        experts_per_token: int,
        num_experts: int,
        n: int,
        k: int,
        num_layers: int,
        dtype: torch.dtype,
        device: str,
    ) -> None:
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(device, dtype)

        chosen = torch.rand(num_tokens, num_experts, generator=generator).topk(experts_per_token)[1]
        counts = torch.bincount(chosen.flatten(), minlength=num_experts)
        starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        self.experts_with_rows = int((counts > 0).sum())
        self.num_rows = num_tokens * experts_per_token
        self._starts = starts.to(device, torch.int32)
        self._x = normal(self.num_rows, k)
        self._weight = normal(num_layers, num_experts, n, k)
        self._out = torch.empty(self.num_rows, n, dtype=dtype, device=device)

    def multiply(self, backend: Backend, layer: int) -> None:
        backend.grouped_gemm(self._x, self._weight[layer], self._starts, out=self._out)

    def check(self, backend: Backend) -> None:
        """Raises: ValueError if rows of the first, a middle and the last expert are not what the reference says."""
        starts = self._starts.tolist()
        wanted = torch.zeros_like(self._out)
        rows: list[int] = []
        for expert in {0, len(starts) // 2 - 1, len(starts) - 2}:
            first, end = starts[expert], min(starts[expert + 1], starts[expert] + 8)
            alone = torch.tensor([0, end - first], dtype=torch.int32)
            _reference("grouped_gemm")(
                self._x[first:end],
                self._weight[0, expert : expert + 1],
                alone,
                out=wanted[first:end],
            )
            rows += range(first, end)
        self.multiply(backend, 0)
        error = (self._out[rows] - wanted[rows]).abs().max().item()
        # Sums of k products of normal numbers have a standard deviation of sqrt(k).
        allowed = (2e-6 if self._x.dtype == torch.float32 else 2e-2) * self._x.shape[1] ** 0.5
        if not error <= allowed:  # NaN, too
            raise ValueError(
                f"grouped_gemm ({backend.name}): differs from its reference by {error:.2e}, "
                f"at most {allowed:.0e} is rounding; not timed"
            )


class SamplingCase:
    """Rows of normal logits, spread as a model's are, to choose from with noise; and the mass of each row.

    Shapes: logits [num_copies, rows, ids] float32.
    """

    def __init__(self, rows: int, ids: int, *, num_copies: int, device: str) -> None:
        generator = torch.Generator().manual_seed(0)
        logits = torch.randn((num_copies, rows, ids), generator=generator).mul_(3.0)
        self._logits = logits.to(device)
        self._rows = torch.arange(rows, dtype=torch.int32, device=device)
        self._temperature = torch.full((rows,), 0.8, device=device)
        streams = torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator)
        self._streams = streams.to(device)
        self._highest = self._logits.amax(dim=2)
        self._above = torch.full_like(self._streams, -(2**63))  # all ids
        self._best = torch.empty_like(self._streams)
        self._mass = torch.empty(rows, dtype=torch.float64, device=device)

    def choose(self, kernel: Any, copy: int, *, num_rows: int | None = None) -> torch.Tensor:
        some = slice(num_rows)
        kernel(
            self._logits[copy],
            self._rows[some],
            self._temperature[some],
            self._streams[some],
            out=self._best[some],
        )
        return self._best[some]

    def mass(self, kernel: Any, copy: int, *, num_rows: int | None = None) -> torch.Tensor:
        some = slice(num_rows)
        kernel(
            self._logits[copy],
            self._rows[some],
            self._highest[copy, some],
            self._above[some],
            out=self._mass[some],
        )
        return self._mass[some]

    def check(self, backend: Backend) -> None:
        """Raises: ValueError if the first row's best key is not the reference's, bit by bit, or its mass is not."""
        got = self.choose(backend.gumbel_argmax, 0, num_rows=1).clone()
        right = torch.equal(got, self._of_reference("gumbel_argmax"))
        _refuse_unless(right, "gumbel_argmax", backend)
        got = self.mass(backend.softmax_mass, 0, num_rows=1).clone()
        right = torch.allclose(got, self._of_reference("softmax_mass"), rtol=1e-12, atol=0)
        _refuse_unless(right, "softmax_mass", backend)

    def _of_reference(self, name: str) -> torch.Tensor:
        call = self.choose if name == "gumbel_argmax" else self.mass
        return call(_reference(name), 0, num_rows=1)


def _refuse_unless(right: bool, kernel: str, backend: Backend) -> None:
    if not right:
        raise ValueError(f"{kernel} ({backend.name}): differs from its reference; not timed")
