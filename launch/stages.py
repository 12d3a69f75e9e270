"""What a person sees while an engine comes up: one line a stage with its seconds, and a bar for the load."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


class StageLines:
    """Print a line when a stage is done: `load 2 workers ........ 3.1 s`. Without a console, nothing."""

    def __init__(self, console: Console | None):
        self._console = console

    def __call__(self, stage: str, seconds: float) -> None:
        if self._console is not None:
            self.say(f"{stage} {'.' * max(3, 44 - len(stage))} {seconds:.1f} s")

    def say(self, line: str) -> None:
        if self._console is not None:
            self._console.out(line, highlight=False)  # as it is: no markup, no wrapping


@contextmanager
def load_bar(console: Console | None, title: str) -> Iterator[Callable[[float], None] | None]:
    """A bar that the loader moves from 0 to 1; it is gone when the load is done. Only where there is a terminal."""
    if console is None or not console.is_terminal:
        yield None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bars:
        task = bars.add_task(title, total=1.0)
        yield lambda share: bars.update(task, completed=share)
