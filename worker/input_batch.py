"""One step's inputs, gathered out of the tables into flat tensors.

Owns the input buffers and their reuse; every field of `InputBatch` says its shape. Decides nothing about who runs (the
plan does) and changes no table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from ..scheduler.agreement import Batch, StepPlan
from ..scheduler.kv_groups import blocks_needed
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


class _View(NamedTuple):
    """A part of a buffer: as a tensor, and the same memory as the backend's kernels take it.

    by_group: the tensor's parts by its first dimension, for a buffer that has one for the groups of a block size.
    """

    tensor: torch.Tensor
    kernel: Any
    by_group: tuple[torch.Tensor, ...]


class _Buffer:
    """A tensor, and the same memory as the backend's kernels take it."""

    def __init__(self, *shape: int, dtype: torch.dtype, device: torch.device, arrays: bool) -> None:
        tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._kernel: Any = tensor.numpy() if arrays else tensor
        self._arrays = arrays
        self._lengths: tuple[int, ...] | None = None
        self._view = _View(tensor, self._kernel, ())

    def first(self, *lengths: int) -> _View:
        """The first entries in each of the last dimensions. Asked for as many as last time, it has the view still."""
        if lengths != self._lengths:
            kernel = self._kernel[..., *map(slice, lengths)]
            # An array is cut and wrapped in a third of the time that a tensor takes to be cut.
            tensor = torch.from_numpy(kernel) if self._arrays else kernel
            by_group = tensor.unbind() if tensor.dim() > len(lengths) else ()
            self._view, self._lengths = _View(tensor, kernel, by_group), lengths
        return self._view


# Columns gathered beyond what the longest sequence of a lasting batch needs: when it has grown past them all rows are
# gathered anew.
_SPARE_COLUMNS = 8


@dataclass(kw_only=True, slots=True)
class _Views:
    """What the steps of one batch have in common.

    step_arrays: index_mapping, query_start_loc (padded), sample_batch_indices, logits_indices; step_tensors the same
    memory. slots: by block size [groups of this size, padded_tokens]; slot_tensors: by group.
    gathered: by block size [groups of this size, padded_reqs, columns], the rows gathered last and kept up to date
    since; None before. block_tables: their first widths[size] columns, by group, enough for sequences up to `longest`.
    """

    batch: Batch
    padded_reqs: int
    max_query_len: int
    step_arrays: tuple[np.ndarray, ...]
    step_tensors: tuple[torch.Tensor, ...]
    input_ids: _View
    positions: _View
    seq_lens: _View
    slots: tuple[Any, ...]
    slot_tensors: tuple[torch.Tensor, ...]
    gathered: list[_View | None]
    widths: list[int]
    longest: int
    block_tables: tuple[torch.Tensor, ...]


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
        rows = state.max_num_seqs
        self._sizes = state.block_tables.sizes
        # By group: its block size's place among the sizes, and its own among the groups of that size.
        self._homes = [
            (size, same.groups.index(group))
            for group in range(state.block_tables.num_groups)
            for size, same in enumerate(self._sizes)
            if group in same.groups
        ]
        # Of the latest step: its views, unless it was padded, and its seq_lens, which are what the next step has
        # computed.
        self._views: _Views | None = None
        self._last_seq_lens: np.ndarray | None = None
        self._input_ids = self._buffer(max_num_batched_tokens)
        self._positions = self._buffer(max_num_batched_tokens, dtype=torch.int64)
        self._seq_lens = self._buffer(rows)
        self._block_tables = [
            self._buffer(len(same.groups), rows, same.max_blocks) for same in self._sizes
        ]
        self._slots = [
            self._buffer(len(same.groups), max_num_batched_tokens, dtype=torch.int64)
            for same in self._sizes
        ]

    def _buffer(self, *shape: int, dtype: torch.dtype = torch.int32) -> _Buffer:
        arrays = not self._backend.uses_mirror
        return _Buffer(*shape, dtype=dtype, device=self._device, arrays=arrays)

    def build(self, plan: StepPlan, *, pad_to: tuple[int, int] | None = None) -> InputBatch:
        """Gather a step's inputs. Call it between `state.apply` and `state.commit`.

        Shapes: pad_to is (padded_reqs, padded_tokens). The width of a group's block tables is the blocks of the step's
            longest sequence, at least 1; rows lie max_blocks apart, so addresses do not depend on it.
        Example: DESIGN.md section 1 (`test_worked_example`).
        Raises: ValueError if the step, or pad_to, does not fit the buffers, or pad_to is smaller than the step.
        """
        batch = plan.batch
        views = self._views
        if views is None or views.batch is not batch or pad_to is not None:
            views = self._views_of(batch, *(pad_to or (batch.num_reqs, batch.num_tokens)))
            # steady steps share them, as they share the batch
            self._views = views if pad_to is None else None
        elif plan.num_computed_tokens is not self._last_seq_lens:
            views.gathered = [None] * len(self._sizes)  # a step in between was not built
        self._last_seq_lens = plan.seq_lens
        sent = self.tables.upload(*views.step_arrays)
        tensors = views.step_tensors if sent[0] is views.step_arrays[0] else sent
        self._choose_widths(plan, views)
        self._run_kernels(plan, views, *sent[:2])
        return InputBatch(
            num_reqs=batch.num_reqs,
            num_tokens=batch.num_tokens,
            max_query_len=views.max_query_len,
            max_seq_len=plan.max_seq_len,
            index_mapping=tensors[0],
            input_ids=views.input_ids.tensor,
            positions=views.positions.tensor,
            query_start_loc=tensors[1],
            seq_lens=views.seq_lens.tensor,
            input_block_tables=views.block_tables,
            slot_mappings=views.slot_tensors,
            logits_indices=tensors[3],
            sample_batch_indices=tensors[2],
        )

    def append_tokens(self, batch: InputBatch, tokens: torch.Tensor) -> None:
        """Let the next step find the tokens that this one sampled, where its kernels read a mirror.

        Shapes: tokens [num_sampling] int32 on the device. Call it before the next build.
        """
        if isinstance(self.tables, DeviceMirror):
            rows = batch.index_mapping.index_select(0, batch.sample_batch_indices)
            places = batch.seq_lens.index_select(0, batch.sample_batch_indices)
            self.tables.write_tokens(rows, places, tokens)

    def _views_of(self, batch: Batch, padded_reqs: int, padded_tokens: int) -> _Views:
        """Everything of a step that depends on its batch alone."""
        num_reqs, num_tokens = batch.num_reqs, batch.num_tokens
        self._check_sizes(num_reqs, num_tokens, padded_reqs, padded_tokens)
        starts = batch.query_start_loc
        if batch.all_sample:
            sampling, logits_indices = np.arange(num_reqs), starts[1:] - np.int64(1)
        else:
            sampling = np.flatnonzero(batch.samples)
            logits_indices = starts[sampling + 1] - np.int64(1)
        padded_starts = starts
        if padded_reqs > num_reqs:
            padded_starts = np.pad(starts, (0, padded_reqs - num_reqs), mode="edge")
        step_arrays = (batch.index_mapping, padded_starts, sampling, logits_indices)
        slots = [buffer.first(padded_tokens) for buffer in self._slots]
        return _Views(
            batch=batch,
            padded_reqs=padded_reqs,
            max_query_len=int(batch.num_scheduled_tokens[-1]) if num_reqs else 0,
            step_arrays=step_arrays,
            step_tensors=tuple(map(torch.from_numpy, step_arrays)),
            input_ids=self._input_ids.first(padded_tokens),
            positions=self._positions.first(padded_tokens),
            seq_lens=self._seq_lens.first(padded_reqs),
            slots=tuple(view.kernel for view in slots),
            slot_tensors=self._by_group(slots),
            gathered=[None] * len(self._sizes),
            widths=[],
            longest=0,
            block_tables=(),
        )

    def _choose_widths(self, plan: StepPlan, views: _Views) -> None:
        """Show of each block table as many columns as the longest sequence has blocks."""
        if views.widths and plan.max_seq_len <= views.longest:
            return
        widths = [max(1, blocks_needed(plan.max_seq_len, same.block_size)) for same in self._sizes]
        views.widths = widths
        views.longest = min(
            width * same.block_size for width, same in zip(widths, self._sizes, strict=True)
        )
        tables = zip(self._block_tables, widths, strict=True)
        views.block_tables = self._by_group(
            [buffer.first(views.padded_reqs, width) for buffer, width in tables]
        )

    def _run_kernels(
        self, plan: StepPlan, views: _Views, index_mapping: Any, query_start_loc: Any
    ) -> None:
        """Fill the buffers, one launch for the tokens and two a block size; none if there is nothing to fill.

        A batch that goes on leaves its rows where they are, and `slot_mapping` adds the blocks that this step begins.
        """
        positions = views.positions.kernel
        if not views.padded_reqs and not len(positions):
            return
        backend, tables = self._backend, self.tables
        query_start_loc = query_start_loc[: plan.num_reqs + 1]
        backend.token_inputs(
            index_mapping,
            query_start_loc,
            tables.num_computed_tokens,
            tables.token_ids,
            input_ids=views.input_ids.kernel,
            positions=positions,
            seq_lens=views.seq_lens.kernel,
        )
        for size, same in enumerate(self._sizes):
            table, width, gathered = (
                tables.block_table[size],
                views.widths[size],
                views.gathered[size],
            )
            if gathered is None or gathered.kernel.shape[2] < width:
                spare = _SPARE_COLUMNS if plan.age else 0  # a batch that is new may not last
                columns = min(width + spare, same.max_blocks)
                gathered = self._block_tables[size].first(views.padded_reqs, columns)
                views.gathered[size] = gathered
                backend.block_table_gather(
                    index_mapping, table, tables.num_blocks[size], out=gathered.kernel
                )
            backend.slot_mapping(
                index_mapping,
                query_start_loc,
                positions,
                table,
                block_size=same.block_size,
                out=views.slots[size],
                gathered=gathered.kernel,
            )

    def _by_group(self, of_sizes: Sequence[_View]) -> tuple[torch.Tensor, ...]:
        """Take what is stacked by block size apart, into the order of the groups."""
        return tuple([of_sizes[size].by_group[place] for size, place in self._homes])

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
