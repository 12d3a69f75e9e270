"""The bar of a load: there for a person at a terminal, and for nobody else."""

from __future__ import annotations

import io

from rich.console import Console
from rowcast.launch.stages import load_bar


def test_a_terminal_sees_the_load_grow() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with load_bar(console, "load some-model") as on_load:
        assert on_load is not None
        on_load(0.25)
        on_load(1.0)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "load some-model" in shown
    assert shown.endswith("\x1b[2K")  # gone when it is done: the line is cleared


def test_a_log_file_and_a_script_see_nothing() -> None:
    console = Console(file=io.StringIO())
    for nobody in (console, None):
        with load_bar(nobody, "load some-model") as on_load:
            assert on_load is None
    assert console.file.getvalue() == ""  # type: ignore[attr-defined]
