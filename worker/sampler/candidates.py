"""The best few scores of a rank, and the merged best few of all ranks."""

from __future__ import annotations

import torch

from . import keys

NO_CANDIDATE = -(2**63)  # below every key


def best_candidates(scores: torch.Tensor, width: int, first_id: int) -> torch.Tensor:
    """The keys of each row's `width` best ids, in no order; exact also where scores tie (lowest ids first).

    Shapes: scores [n, num_ids] float32, of the ids from first_id on; returns [n, width] int64, filled up with
        NO_CANDIDATE if there are fewer ids.
    """
    num_ids = scores.shape[1]
    taken = min(width, num_ids)
    values, places = scores.topk(min(taken + 1, num_ids), dim=1)
    found = keys.pack(values[:, :taken], places[:, :taken] + first_id)
    if taken < num_ids:
        # topk takes any of equal scores; that matters only where the last taken equals the first left out, and may be
        # chosen at all.
        last = values[:, taken - 1]
        tied = (last == values[:, taken]) & (last > float("-inf"))
        if bool(tied.any()):
            ids = torch.arange(first_id, first_id + num_ids, device=scores.device)
            found[tied] = keys.pack(scores[tied], ids).topk(taken, dim=1).values
    if taken < width:
        return torch.nn.functional.pad(found, (0, width - taken), value=NO_CANDIDATE)
    return found


def merge(found: torch.Tensor, num_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sort the candidates of all ranks, and say how many of them are certainly the best of the whole vocabulary.

    A rank that left ids out is certain only down to its own worst candidate: one it left out may come right below.
    Shapes: found [world_size, n, width] int64 keys; num_ids [world_size], the ids that each rank owns. Returns sorted
        keys [n, world_size * width], best first, and certain [n] int64.
    """
    world_size, num_rows, width = found.shape
    worst = found.amin(dim=2)
    worst[num_ids <= width] = NO_CANDIDATE
    floor = worst.amax(dim=0)
    together = found.transpose(0, 1).reshape(num_rows, world_size * width)
    ordered = together.sort(dim=1, descending=True).values
    real = (ordered >= floor.unsqueeze(1)) & (ordered != NO_CANDIDATE)
    return ordered, real.sum(dim=1)
