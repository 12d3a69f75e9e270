"""Who keeps a step from ending: told from how far each rank says it is.

Owns the sentence. Asks nobody: whoever has a second way to the ranks (`cluster/` has Ray) does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RankProgress:
    """How far a rank is: the sequence of the last frame it took, and of the last one it carried out."""

    taken: int
    done: int


def who_is_late(sequence: int, ranks: Sequence[RankProgress | None]) -> str:
    """Say which rank is silent or behind, while step `sequence` has no result.

    ranks: in rank order; None for one that did not answer.
    Example: step 41; rank 0 took 41 and carried out 40, rank 1 does not answer -> "rank 1 does not answer".
    """
    silent = [rank for rank, progress in enumerate(ranks) if progress is None]
    if silent:
        return f"{_names(silent)} {'does' if len(silent) == 1 else 'do'} not answer: stopped, hung or cut off"
    progress = [known for known in ranks if known is not None]
    for what, least in (
        ("took", min(known.taken for known in progress)),
        ("carried out", min(known.done for known in progress)),
    ):
        far = [known.taken if what == "took" else known.done for known in progress]
        behind = [rank for rank, reached in enumerate(far) if reached == least]
        if len(behind) < len(far):
            return f"{_names(behind)} {what} step {least} last, the others step {max(far)}"
    taken, done = progress[0].taken, progress[0].done
    everyone = "rank 0" if len(ranks) == 1 else "every rank"
    if done >= sequence:
        return f"{everyone} carried it out: rank 0's result was lost"
    if taken >= sequence:
        return f"{everyone} took step {taken} and has not finished it"
    return f"{everyone} took step {taken} last: the frames since were lost"


def _names(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return f"ranks {', '.join(map(str, ranks[:-1]))} and {ranks[-1]}"
