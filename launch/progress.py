"""Progress bars for the long parts of fetching a model: one bar a stage, in bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from rich.console import Console


class Stage(Protocol):
    """Report how far a stage is: bytes done, bytes in all."""

    def __call__(self, done: int, total: int, /) -> None: ...


@contextmanager
def progress_bars(console: Console | None) -> Iterator[Callable[[str], Stage]]:
    """Give a function that opens one bar after the other; without a console they show nothing.

    Where the console is no terminal, rich prints each bar once, when all is done.
    """
    if console is None:
        yield lambda title: lambda done, total: None
        return
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bars:

        def stage(title: str) -> Stage:
            task = bars.add_task(title, total=None)
            return lambda done, total: bars.update(task, completed=done, total=total)

        yield stage
