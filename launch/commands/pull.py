"""`rowcast pull`: fetch a model ahead of time."""

from __future__ import annotations

from typing import Annotated

import typer


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME", help="A model that rowcast knows, or org/name[@revision] of a hub"
        ),
    ],
):
    """Fetch a model; the last line printed is its folder."""
    from rich.console import Console

    from ..config import Environment
    from ..hub import fetch, is_hub_name
    from ..pull import pull as pull_model

    environment, console = Environment.read(), Console(stderr=True)
    if is_hub_name(name):
        folder = fetch(name, console=console)
    else:
        folder = pull_model(name, cache_home=environment.cache_home, console=console)
    print(folder)
