"""Tensor-parallel ranks as threads of one process: the same collectives over a shared list."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch

T = TypeVar("T")


class FakeGroup:
    """What the sampler needs of a TensorParallelGroup."""

    def __init__(self, rank: int, world_size: int, board: list, barrier: threading.Barrier) -> None:
        self.rank = rank
        self.world_size = world_size
        self._board = board
        self._barrier = barrier

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        self._board[self.rank] = tensor
        self._barrier.wait(60)
        gathered = torch.stack(list(self._board))
        self._barrier.wait(60)
        return gathered


def on_ranks(world_size: int, work: Callable[[FakeGroup], T]) -> list[T]:
    """Run `work` on every rank at once; its results in rank order."""
    board: list = [None] * world_size
    barrier = threading.Barrier(world_size)

    def run(rank: int) -> T:
        try:
            return work(FakeGroup(rank, world_size, board, barrier))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(world_size) as pool:
        return list(pool.map(run, range(world_size)))
