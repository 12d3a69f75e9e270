"""Top-p and min-p without sorting: draw from all ids, and draw again while they would not have kept the one drawn.

With noise fixed, the kept id of highest score + noise is the first kept one in the order of score + noise. Whether
top-p keeps an id takes one pass: the mass of the ids before it must be below p; min-p looks at its score alone. So this
gives the very token that sorting gives, after about 1/p passes; on a row of 49,152 ids one pass costs a twentieth of a
sort.
"""

from __future__ import annotations

import torch

from ..backend import Backend
from . import keys, min_p, top_p

_MAX_DRAWS = 16
_LAST_ID = 2**32 - 1  # behind every id: what ties with its key is above it


def choose(
    scores: torch.Tensor,
    stream: torch.Tensor,
    p: torch.Tensor,
    least: torch.Tensor,
    total: torch.Tensor,
    backend: Backend,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row without top-k.

    Shapes: scores [n, vocab_size] float32; stream [n] int64 as `noise.streams` gives; p and least (min-p) [n] float32;
        total [n] float64, the row's mass relative to its highest score, which holds where min-p is off. Returns tokens
        [n] int64 and settled [n] bool: a row of which little is kept may use up its draws, and its token then means
        nothing.
    """
    num_rows = len(scores)
    highest = scores.amax(dim=1)
    lowest = min_p.lowest_kept(highest, least)

    def mass_above(rows: torch.Tensor, above: torch.Tensor) -> torch.Tensor:
        out = torch.empty(len(rows), dtype=torch.float64, device=scores.device)
        backend.softmax_mass(scores, rows.to(torch.int32), highest[rows], above, out=out)
        return out

    total = total.clone()
    cut = torch.nonzero(lowest > float("-inf")).squeeze(1)
    # What is before a kept id has a higher score, and is kept too.
    total[cut] = mass_above(cut, keys.pack(lowest[cut], _LAST_ID))
    wanted = top_p.wanted(p, total)
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
    settled = torch.zeros(num_rows, dtype=torch.bool, device=scores.device)
    rows = torch.arange(num_rows, device=scores.device)
    best = None
    for _ in range(_MAX_DRAWS):
        drawn = torch.empty(len(rows), dtype=torch.int64, device=scores.device)
        backend.gumbel_argmax(
            scores,
            rows.to(torch.int32),
            torch.ones(len(rows), device=scores.device),
            stream[rows],
            out=drawn,
            below=best,  # what was drawn before is passed over
        )
        ids = keys.ids_of(drawn)
        own = scores[rows, ids]
        by_p = (p[rows] >= 1.0) | (mass_above(rows, keys.pack(own, ids)) < wanted[rows])
        tokens[rows], settled[rows] = ids, by_p & (own >= lowest[rows])
        is_open = ~settled[rows]
        rows, best = rows[is_open], drawn[is_open]
        if not len(rows):
            break
    return tokens, settled
