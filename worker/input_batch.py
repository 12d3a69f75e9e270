"""One step's inputs, gathered out of the tables into flat tensors.

Owns the input buffers and their reuse; every field of `InputBatch` says its shape. Decides nothing about who runs (the
plan does) and changes no table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..scheduler.agreement import StepPlan
from .backend import Backend
from .device_mirror import DeviceMirror, HostTables, Tables
from .state import WorkerState


@dataclass(frozen=True, kw_only=True, slots=True)
class InputBatch:
    """What the model and the sampler need of one step. All tensors lie on the builder's device.

    They are views of buffers that the builder uses again: valid until its next build. num_reqs and num_tokens are the
    real counts. In the shapes, a padded count is the real one unless `build` was given `pad_to`; padding is inert:
    no tokens, no length, no blocks, no slot.
    """

    num_reqs: int
    num_tokens: int
    max_query_len: int  # most tokens that one request runs in this step; 0 in an empty one
    max_seq_len: int  # longest sequence, this step's tokens included, of the real requests
    index_mapping: torch.Tensor  # [num_reqs] int32: batch_index -> row
    input_ids: torch.Tensor  # [padded_tokens] int32, in flat-token order; padding 0
    positions: torch.Tensor  # [padded_tokens] int64, in flat-token order; padding 0
    query_start_loc: (
        torch.Tensor
    )  # [padded_reqs + 1] int32: first flat token; padding repeats num_tokens
    seq_lens: (
        torch.Tensor
    )  # [padded_reqs] int32: tokens of the request, this step's included; padding 0
    input_block_tables: tuple[
        torch.Tensor, ...
    ]  # by group [padded_reqs, width] int32, see `build`; padding 0
    slot_mappings: tuple[torch.Tensor, ...]  # by group [padded_tokens] int64: slot_id; padding -1
    logits_indices: (
        torch.Tensor
    )  # [num_sampling] int64: flat token of the last token of each request that samples
    sample_batch_indices: (
        torch.Tensor
    )  # [num_sampling] int64: batch_index of each request that samples


class _Buffer:
    """A tensor, and the same memory as the backend's kernels take it."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device, arrays: bool) -> None:
        self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self.kernel: Any = self.tensor.numpy() if arrays else self.tensor


class InputBuilder:
    """Builds each step's `InputBatch` out of one rank's state, into buffers made once.

    Units: max_num_batched_tokens is the most tokens of a step, padding included.
    """

    def __init__(
        self,
        state: WorkerState,
        backend: Backend,
        *,
        max_num_batched_tokens: int,
        device: torch.device | str,
    ) -> None:
        self._state = state
        self._backend = backend
        self._max_tokens = max_num_batched_tokens
        self._device = torch.device(device)
        self.tables: Tables = (
            DeviceMirror(state, self._device) if backend.uses_mirror else HostTables(state)
        )
        rows, groups = state.max_num_seqs, state.block_tables
        self._input_ids = self._buffer(max_num_batched_tokens)
        self._positions = self._buffer(max_num_batched_tokens, dtype=torch.int64)
        self._seq_lens = self._buffer(rows)
        self._block_tables = [self._buffer(rows, width) for width in groups.max_blocks]
        self._slots = [
            self._buffer(max_num_batched_tokens, dtype=torch.int64) for _ in groups.max_blocks
        ]

    def _buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> _Buffer:
        arrays = not self._backend.uses_mirror
        return _Buffer(*shape, dtype=dtype, device=self._device, arrays=arrays)

    def build(self, plan: StepPlan, *, pad_to: tuple[int, int] | None = None) -> InputBatch:
        """Gather a step's inputs. Call it between `state.apply` and `state.commit`.

        Shapes: pad_to is (padded_reqs, padded_tokens). The width of a group's block tables is the most blocks that a
            request of this step holds, at least 1; rows lie max_blocks apart, so addresses do not depend on it.
        Example: DESIGN.md section 1 (`test_worked_example`).
        Raises: ValueError if the step, or pad_to, does not fit the buffers, or pad_to is smaller than the step.
        """
        num_reqs = plan.num_reqs
        num_tokens = int(plan.num_scheduled_tokens.sum())
        padded_reqs, padded_tokens = pad_to or (num_reqs, num_tokens)
        self._check_sizes(num_reqs, num_tokens, padded_reqs, padded_tokens)
        starts = np.full(padded_reqs + 1, num_tokens, np.int32)
        starts[0] = 0
        np.cumsum(plan.num_scheduled_tokens, out=starts[1 : num_reqs + 1])
        if plan.samples.all():
            sampling, logits_indices = np.arange(num_reqs), starts[1 : num_reqs + 1] - np.int64(1)
        else:
            sampling = np.flatnonzero(plan.samples)
            logits_indices = starts[sampling + 1] - np.int64(1)

        index_mapping, query_start_loc, sampling, logits_indices = self.tables.upload(
            plan.index_mapping, starts, sampling, logits_indices
        )
        input_ids = self._input_ids.kernel[:padded_tokens]
        positions = self._positions.kernel[:padded_tokens]
        widths = self._run_kernels(
            plan, index_mapping, query_start_loc[: num_reqs + 1], input_ids, positions, padded_reqs
        )
        ends = plan.num_computed_tokens + plan.num_scheduled_tokens
        return InputBatch(
            num_reqs=num_reqs,
            num_tokens=num_tokens,
            max_query_len=int(plan.num_scheduled_tokens[-1]) if num_reqs else 0,
            max_seq_len=int(ends.max()) if num_reqs else 0,
            index_mapping=_tensor(index_mapping),
            input_ids=self._input_ids.tensor[:padded_tokens],
            positions=self._positions.tensor[:padded_tokens],
            query_start_loc=_tensor(query_start_loc),
            seq_lens=self._seq_lens.tensor[:padded_reqs],
            input_block_tables=tuple(
                table.tensor[:padded_reqs, :width]
                for table, width in zip(self._block_tables, widths, strict=True)
            ),
            slot_mappings=tuple(slots.tensor[:padded_tokens] for slots in self._slots),
            logits_indices=_tensor(logits_indices),
            sample_batch_indices=_tensor(sampling),
        )

    def _run_kernels(
        self,
        plan: StepPlan,
        index_mapping: Any,
        query_start_loc: Any,
        input_ids: Any,
        positions: Any,
        padded_reqs: int,
    ) -> list[int]:
        """Fill the buffers, one launch for the tokens and two a KV group; none if there is nothing to fill.

        Returns: the width of each group's block tables.
        """
        held = self._state.block_tables.num_blocks
        rows = plan.index_mapping
        widths = [max(1, int(counts[rows].max())) if len(rows) else 1 for counts in held]
        if not padded_reqs and not len(input_ids):
            return widths
        backend, tables = self._backend, self.tables
        backend.token_inputs(
            index_mapping,
            query_start_loc,
            tables.num_computed_tokens,
            tables.token_ids,
            input_ids=input_ids,
            positions=positions,
            seq_lens=self._seq_lens.kernel[:padded_reqs],
        )
        for group, width in enumerate(widths):
            table = tables.block_table[group]
            backend.block_table_gather(
                index_mapping,
                table,
                tables.num_blocks[group],
                out=self._block_tables[group].kernel[:padded_reqs, :width],
            )
            backend.slot_mapping(
                index_mapping,
                query_start_loc,
                positions,
                table,
                block_size=self._state.groups[group].block_size,
                out=self._slots[group].kernel[: len(positions)],
            )
        return widths

    def _check_sizes(
        self, num_reqs: int, num_tokens: int, padded_reqs: int, padded_tokens: int
    ) -> None:
        if padded_reqs < num_reqs or padded_tokens < num_tokens:
            raise ValueError(
                f"pad_to must be at least the step's {num_reqs} requests and {num_tokens} tokens, "
                f"got {padded_reqs} and {padded_tokens}"
            )
        if padded_tokens > self._max_tokens or padded_reqs > self._state.max_num_seqs:
            raise ValueError(
                f"a step of {padded_reqs} requests and {padded_tokens} tokens exceeds the input buffers of "
                f"{self._state.max_num_seqs} requests and {self._max_tokens} tokens; raise "
                "max_num_seqs or max_num_batched_tokens on the worker to what the scheduler has"
            )


def _tensor(value: np.ndarray | torch.Tensor) -> torch.Tensor:
    return value if isinstance(value, torch.Tensor) else torch.from_numpy(value)
