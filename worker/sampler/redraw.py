"""Top-p and min-p without sorting: draw from all ids, and draw again while they would not have kept the one drawn.

With noise fixed, the kept id of highest score + noise is the first kept one in the order of score + noise. Whether
top-p keeps an id takes one pass: the mass of the ids before it must be below p; min-p looks at its score alone. So this
gives the very token that sorting gives, after about 1/p passes; on a row of 49,152 ids one pass costs a twentieth of a
sort.
"""

from __future__ import annotations

import torch

from . import min_p, noise, top_p

_MAX_DRAWS = 16


def choose(
    scores: torch.Tensor,
    stream: torch.Tensor,
    p: torch.Tensor,
    least: torch.Tensor,
    total: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """One token for each row without top-k.

    Shapes: scores [n, vocab_size] float32; stream [n] int64 as `noise.streams` gives; p and least (min-p) [n] float32;
        total [n] float64, the row's mass relative to its highest score, which holds where min-p is off. Returns tokens
        [n] int64 and settled [n] bool: a row of which little is kept may use up its draws, and its token then means
        nothing.
    """
    num_rows, vocab_size = scores.shape
    ids = torch.arange(vocab_size, device=scores.device)
    perturbed = scores + noise.gumbel(stream, ids)
    highest = scores.amax(dim=1)
    lowest = min_p.lowest_kept(highest, least)
    wanted = top_p.wanted(p, _total_after_min_p(scores, lowest, total))
    keeps_all = p >= 1.0
    tokens = torch.zeros(num_rows, dtype=torch.int64, device=scores.device)
    settled = torch.zeros(num_rows, dtype=torch.bool, device=scores.device)
    rows = torch.arange(num_rows, device=scores.device)
    for _ in range(_MAX_DRAWS):
        tokens[rows] = perturbed[rows].max(dim=1).indices
        for some in rows.split(8):  # a float64 copy of all rows at once would be large
            drawn, score = tokens[some].unsqueeze(1), scores[some]
            own = score.gather(1, drawn)
            before = (score > own) | ((score == own) & (ids < drawn))
            weight = (score.double() - highest[some].double().unsqueeze(1)).exp_()
            by_p = keeps_all[some] | (weight.mul_(before).sum(dim=1) < wanted[some])
            settled[some] = by_p & (own.squeeze(1) >= lowest[some])
        rows = rows[~settled[rows]]
        if not len(rows):
            break
        perturbed[rows, tokens[rows]] = float("-inf")
    return tokens, settled


def _total_after_min_p(
    scores: torch.Tensor, lowest: torch.Tensor, total: torch.Tensor
) -> torch.Tensor:
    """[n] float64: the mass of what min-p keeps. What is before a kept id has a higher score, and is kept too."""
    total = total.clone()
    rows = torch.nonzero(lowest > float("-inf")).squeeze(1)
    for some in rows.split(8):
        part = scores[some]
        dropped = part < lowest[some].unsqueeze(1)
        total[some] = top_p.mass(part.masked_fill(dropped, float("-inf")))
    return total
