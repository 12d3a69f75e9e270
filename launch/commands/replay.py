"""`rowcast replay` and `rowcast explain`: recorded steps checked and shown."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from . import options as o

if TYPE_CHECKING:
    from rich.console import Console

    from ...scheduler.agreement import StepPlan
    from ...scheduler.messages import SchedulerOutput
    from ...scheduler.recording import Life
    from ...worker.state import WorkerState
    from ..explain import StepPicture
    from ..replay import LifeSummary, OnStep


class _Wanted(Exception):
    """The step that was asked for has been drawn: nothing behind it is of interest."""


def replay(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="What `rowcast serve --record FILE` wrote")
    ],
    until: Annotated[
        int | None,
        typer.Option(metavar="STEP", help="Stop at this step", show_default=False),
    ] = None,
    life: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Which life of the engine --until means, from 1 [default: the first with that step]",
            show_default=False,
        ),
    ] = None,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain", help="Show the index spaces, block tables and slots of step --until"
        ),
    ] = False,
    as_json: o.AsJson = False,
) -> None:
    """Rebuild a worker's tables from a recording, without a model, and check every rank's digests."""
    from ..replay import open_recording
    from ..replay import replay as replay_lives

    if explain and until is None:
        raise ValueError("--explain shows one step; say which with --until STEP")
    if life is not None and until is None:
        raise ValueError("--life says which life --until means; give --until STEP too")
    for name, value in (("--until", until), ("--life", life)):
        if value is not None and value < 1:
            raise ValueError(f"{name} counts from 1, got {value}")
    recording = open_recording(file)
    lives: list[Life] = []
    pictures: list[StepPicture] = []

    def on_life(begun: Life) -> OnStep | None:
        lives.append(begun)
        if until is None or (life is not None and life != len(lives)):
            return None
        explainer = _Explainer(begun, until, explain or as_json)

        def on_step(
            state: WorkerState, sequence: int, step: SchedulerOutput, plan: StepPlan
        ) -> None:
            if sequence == until:
                pictures.extend(explainer.picture(state, sequence, step, plan))
                raise _Wanted

        return on_step

    summaries: list[LifeSummary] = []
    try:
        summaries.extend(replay_lives(recording, on_life))
    except _Wanted:
        _say_wanted(lives, until, pictures, explain=explain, as_json=as_json)
        return
    if until is not None:
        where = f"life {life} of {file}" if life is not None else file
        longest = max((summary.last_sequence for summary in summaries), default=0)
        raise ValueError(f"{where} has no step {until} to stop at; its last step is {longest}")
    _say_summaries(summaries, torn=recording.torn, as_json=as_json)


def explain() -> None:
    """Show how one step's control information becomes KV slots: the worked example of the design."""
    from ..explain import show, worked_example

    console = _console()
    console.print(
        "Row 7 (request B) has 31 tokens computed in blocks 37 and 12; row 6 (request A) has 16 computed in blocks 81 "
        "and 44. This step runs one token of B and eight of A; block_size is 16."
    )
    show(worked_example(), console)


class _Explainer:
    """Draws the wanted step of one life. Torch is loaded only if somebody wants to see it."""

    def __init__(self, life: Life, until: int, wanted: bool) -> None:
        self._life = life
        self._wanted = wanted

    def picture(
        self, state: WorkerState, sequence: int, step: SchedulerOutput, plan: StepPlan
    ) -> list[StepPicture]:
        if not self._wanted:
            return []
        from ..explain import StepExplainer

        explainer = StepExplainer(state, max_num_batched_tokens=self._life.max_num_batched_tokens)
        return [explainer.picture(sequence, step, plan)]


def _say_wanted(
    lives: list[Life],
    until: int | None,
    pictures: list[StepPicture],
    *,
    explain: bool,
    as_json: bool,
) -> None:
    print(f"replayed up to step {until} of life {len(lives)}: every digest before it holds")
    if explain:
        from ..explain import show

        show(pictures[0], _console())
    if as_json:
        print(json.dumps(pictures[0].to_json()))


def _say_summaries(summaries: list[LifeSummary], *, torn: bool, as_json: bool) -> None:
    for number, summary in enumerate(summaries, 1):
        ranks = summary.life.world_size
        print(
            f"life {number}: {summary.life.model} on {ranks} rank{'s' if ranks > 1 else ''}, "
            f"{summary.num_requests} admissions, {summary.num_steps} steps, {summary.num_tokens} tokens; "
            f"all {summary.num_digests} digests hold"
        )
        if summary.num_unsettled:
            count = summary.num_unsettled
            which = "last step has" if count == 1 else f"last {count} steps have"
            print(f"  the {which} no result: the engine ended there")
    if torn:
        print(
            "the file ends in the middle of a record: its engine was killed, or the disk was full"
        )
    if as_json:
        print(json.dumps({"lives": [_json_of(s) for s in summaries], "torn": torn}))


def _json_of(summary: LifeSummary) -> dict[str, Any]:
    return {
        "epoch": summary.life.epoch,
        "model": summary.life.model,
        "ranks": summary.life.world_size,
        "steps": summary.num_steps,
        "tokens": summary.num_tokens,
        "admissions": summary.num_requests,
        "digests": summary.num_digests,
        "unsettled": summary.num_unsettled,
    }


def _console() -> Console:
    """A terminal's own width; wide enough for the tables where the output goes elsewhere."""
    from rich.console import Console

    console = Console(highlight=False)
    return console if console.is_terminal else Console(highlight=False, width=140)
