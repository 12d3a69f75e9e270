"""Long-lived rank processes: real ranks over real collectives, without importing torch anew for every test.

A task is a function of this package's test modules called as `task(group, *args)` in every rank's process, with a group
made for that call alone: each call is a new life of the group.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

from rowcast.worker.parallel import TensorParallelGroup

_TIMEOUT_S = 120


class RankPool:
    """Starts processes as they are needed and keeps them. Use as a context manager."""

    def __init__(self) -> None:
        self._context = multiprocessing.get_context(
            "spawn"
        )  # never fork: Numba and torch have threads
        self._ranks: list[tuple[Any, Connection]] = []

    def __enter__(self) -> RankPool:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def run(
        self, world_size: int, task: Callable[..., Any], *args: Any, **group_options: Any
    ) -> list[Any]:
        """What each rank returned, in rank order; group_options are `TensorParallelGroup.create`'s.

        Raises: RuntimeError with the traceback of every rank that failed.
        """
        while len(self._ranks) < world_size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        address = f"127.0.0.1:{TensorParallelGroup.pick_port('127.0.0.1')}"
        for rank, (_, connection) in enumerate(self._ranks[:world_size]):
            connection.send((task, rank, world_size, address, args, group_options))
        answers = []
        for rank, (_, connection) in enumerate(self._ranks[:world_size]):
            if not connection.poll(_TIMEOUT_S):
                self._end()
                raise RuntimeError(f"rank {rank} gave no answer within {_TIMEOUT_S} s")
            answers.append(connection.recv())
        errors = [f"rank {rank}: {text}" for rank, (ok, text) in enumerate(answers) if not ok]
        if errors:
            self._end()  # a rank that failed alone leaves the others out of step
            raise RuntimeError("\n".join(errors))
        return [value for _, value in answers]

    def _end(self) -> None:
        for process, connection in self._ranks:
            connection.close()
            process.terminate()
            process.join(10)
        self._ranks.clear()


def _serve(connection: Connection) -> None:
    while True:
        try:
            task, rank, world_size, address, args, group_options = connection.recv()
        except EOFError:
            return
        try:
            group = TensorParallelGroup.create(
                rank,
                world_size,
                address=address,
                **{"interface": "lo", "timeout_s": 60, **group_options},
            )
            try:
                answer = (True, task(group, *args))
            finally:
                group.close()
        except BaseException:
            answer = (False, traceback.format_exc())
        connection.send(answer)


def generate_on_rank(
    group: TensorParallelGroup,
    folder: str,
    cases: Sequence[tuple[dict[str, Any], list, Any]],
) -> list[list[list[int]]]:
    """For each (worker options, prompts, sampling params): load the model on this rank, and generate."""
    from rowcast.tests.worker.generation import generate, make_runner

    tokens = []
    for options, prompts, params in cases:
        runner = make_runner(folder, parallel=group, **options)
        tokens.append(generate(runner, prompts, params))
    return tokens
