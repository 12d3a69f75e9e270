"""How a launch finds which of several runs of rows a tile belongs to: a request's tokens, an expert's tokens."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def run_of_tile(start_loc, num_runs, tile, TILE: tl.constexpr):
    """The last run whose first tile is not behind `tile`.

    Run i holds rows [start_loc[i], start_loc[i + 1]); its first tile is start_loc[i] // TILE + i, which leaves every
    run room for its ceil(rows / TILE) tiles and depends on nothing that the host would have to fetch from the device.
    Tiles behind a run's last row are those of nobody.
    """
    low = 0
    high = num_runs
    while high - low > 1:
        middle = (low + high) // 2
        first_tile = tl.load(start_loc + middle) // TILE + middle
        if first_tile <= tile:
            low = middle
        else:
            high = middle
    return low
