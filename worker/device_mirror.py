"""The tables as the input kernels read them: the host's own arrays on a CPU, a mirror of them on a device.

The truth is NumPy on the host. The mirror is one flat int32 tensor with all tables behind each other. A step sends
only the cells that it changed, in one packed copy together with the step's own small arrays, and one scatter puts them
into place. Owns the device's copies, never decides a value.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from . import table_changes
from .state import WorkerState
from .table_changes import TableChanges

_ALIGN = 16  # bytes; Triton specialises a kernel for pointers aligned so, and would compile another one without


class Tables(Protocol):
    """What `InputBuilder` hands to the kernels: arrays or tensors, as the backend takes them.

    Shapes: token_ids [max_num_seqs, max_model_len]; num_computed_tokens [max_num_seqs]; one for each of
        `BlockTables.sizes` block_table [groups of this size, max_num_seqs, max_blocks] and num_blocks [max_num_seqs];
        all int32.
    """

    token_ids: Any
    num_computed_tokens: Any
    block_table: tuple[Any, ...]
    num_blocks: tuple[Any, ...]

    def upload(self, *arrays: np.ndarray) -> tuple[Any, ...]:
        """Bring the tables up to date and hand over a step's own arrays beside them, valid until the next upload."""
        ...


class HostTables:
    """A CPU's kernels read the state's arrays where they are."""

    def __init__(self, state: WorkerState) -> None:
        self.token_ids = state.requests.token_ids
        self.num_computed_tokens = state.requests.num_computed_tokens
        self.block_table = tuple(same.table for same in state.block_tables.sizes)
        self.num_blocks = tuple(same.num_blocks for same in state.block_tables.sizes)

    def upload(self, *arrays: np.ndarray) -> tuple[np.ndarray, ...]:
        return arrays


class DeviceMirror:
    """A device's copy of the tables, kept up to date cell by cell.

    From its making on, `state.changes` notes every changed cell and `upload` takes them; a state has one mirror.
    Cells that no kernel reads may be stale: tokens and blocks behind a row's lengths, and rows that are free.
    """

    def __init__(self, state: WorkerState, device: torch.device | str) -> None:
        assert state.changes is None, "this state has a mirror already"
        state.changes = self._changes = TableChanges()
        requests, block_tables = state.requests, state.block_tables
        self._arrays: dict[tuple[str, int], np.ndarray] = {
            table_changes.TOKEN_IDS: requests.token_ids,
            table_changes.NUM_COMPUTED_TOKENS: requests.num_computed_tokens,
        }
        for size, same in enumerate(block_tables.sizes):
            self._arrays[table_changes.block_table(size)] = same.table
            self._arrays[table_changes.num_blocks(size)] = same.num_blocks
        self._first: dict[tuple[str, int], int] = {}  # where an array begins in the flat tensor
        num_cells = 0
        for name, array in self._arrays.items():
            self._first[name] = num_cells
            num_cells += -(-array.size // (_ALIGN // 4)) * (_ALIGN // 4)
        self._flat = torch.zeros(num_cells, dtype=torch.int32, device=device)
        views = {
            name: self._flat[first : first + array.size].view(array.shape)
            for (name, first), array in zip(self._first.items(), self._arrays.values(), strict=True)
        }
        for name, array in self._arrays.items():  # a state that is in use already
            views[name].copy_(torch.from_numpy(array))
        self.token_ids = views[table_changes.TOKEN_IDS]
        self.num_computed_tokens = views[table_changes.NUM_COMPUTED_TOKENS]
        sizes = range(len(block_tables.sizes))
        self.block_table = tuple(views[table_changes.block_table(size)] for size in sizes)
        self.num_blocks = tuple(views[table_changes.num_blocks(size)] for size in sizes)
        self._staging = _Staging(self._flat.device)
        self.cells_sent = 0  # by the latest upload

    def upload(self, *arrays: np.ndarray) -> tuple[torch.Tensor, ...]:
        """Send the changed cells and `arrays` in one copy; see `Tables.upload`."""
        offsets, values = self._changed_cells()
        self.cells_sent = len(offsets)
        device_offsets, device_values, *sent = self._staging.send(offsets, values, *arrays)
        if len(offsets):
            self._flat.index_put_((device_offsets,), device_values)
        return tuple(sent)

    def write_tokens(self, rows: torch.Tensor, places: torch.Tensor, tokens: torch.Tensor) -> None:
        """Append sampled tokens on the device, where the next step reads them: the host may see them later.

        Shapes: all [n] on the device: rows and places (positions) integer, tokens int32.
        """
        self.token_ids.index_put_((rows.long(), places.long()), tokens)

    def _changed_cells(self) -> tuple[np.ndarray, np.ndarray]:
        """Offsets [n] int64 into the flat tensor and the newest values [n] int32 of every cell noted since last time.

        A cell may occur twice, then with the same value both times: the order of writing does not matter.
        """
        offsets: list[np.ndarray] = []
        values: list[np.ndarray] = []
        for name, runs in self._changes.take().items():
            array, first = self._arrays[name], self._first[name]
            width = array.shape[-1] if array.ndim > 1 else 1
            for rows, columns in runs:
                place = rows.astype(np.int64) * width + columns  # int64: many long rows pass 2**31
                if array.ndim == 3:  # the same cell of every group of this block size
                    place = (np.arange(len(array))[:, None] * array[0].size + place).reshape(-1)
                offsets.append(place + first)
                values.append(array.reshape(-1)[place])
        if not offsets:
            return np.empty(0, np.int64), np.empty(0, np.int32)
        return np.concatenate(offsets), np.concatenate(values)


class _Staging:
    """Packs arrays into one buffer, copies it once, and shows the parts of the copy as tensors."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._on_gpu = device.type == "cuda"
        self._copied = torch.cuda.Event() if self._on_gpu else None
        self._reserve(64 * 1024)

    def _reserve(self, num_bytes: int) -> None:
        self._host = torch.zeros(num_bytes, dtype=torch.uint8, pin_memory=self._on_gpu)
        self._host_bytes = self._host.numpy()
        self._sent = torch.zeros(num_bytes, dtype=torch.uint8, device=self._device)

    def send(self, *arrays: np.ndarray) -> list[torch.Tensor]:
        """Shapes and dtypes stay; the tensors are valid until the next call."""
        if self._copied is not None:
            self._copied.synchronize()  # the copy before has left the host's buffer
        starts, used = [], 0
        for array in arrays:
            starts.append(used)
            used += -(-array.nbytes // _ALIGN) * _ALIGN
        if used > len(self._host_bytes):
            self._reserve(2 * used)
        for start, array in zip(starts, arrays, strict=True):
            target = self._host_bytes[start : start + array.nbytes].view(array.dtype)
            target[:] = array
        self._sent[:used].copy_(self._host[:used], non_blocking=True)
        if self._copied is not None:
            self._copied.record(torch.cuda.current_stream(self._device))
        return [
            self._sent[start : start + array.nbytes].view(_TORCH_DTYPE[array.dtype.str])
            for start, array in zip(starts, arrays, strict=True)
        ]


_TORCH_DTYPE = {"<i4": torch.int32, "<i8": torch.int64}
