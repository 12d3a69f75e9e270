"""`rowcast pull`: fetch a model ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(name: Annotated[str, typer.Argument(metavar="NAME", help="A model that rowcast knows")]):
    """Fetch a model and convert it once; the last line printed is its folder."""
    from rich.console import Console

    from ..config import Environment
    from ..pull import pull as pull_model

    environment = Environment.read()
    folder = pull_model(name, cache_home=environment.cache_home, console=Console(stderr=True))
    print(folder)
