"""Which blocks become known to the prefix cache, and under which names: those that a settled step filled.

Owns the moment and the chain of hashes that a request keeps; the names are `prefix_cache.py`'s. A request's hashes may
run ahead of what is computed (its prompt's are made when it asks for a hit) and are kept when it is preempted, so that
it finds its own blocks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np

from .kv_groups import KVGroupSpec
from .prefix_cache import PrefixCache
from .request import Request, RequestTable
from .row_blocks import RowBlocks


def publish_rows(
    cache: PrefixCache,
    blocks: RowBlocks,
    table: RequestTable,
    rows: np.ndarray,
    starts: np.ndarray,
    ends: np.ndarray,
) -> None:
    """Name the blocks that rows filled with their tokens starts .. ends, which have just settled.

    Shapes: rows, starts, ends [n]. Publish before a window returns any of them.
    """
    base = cache.base
    lasts = ends // base
    filled = np.flatnonzero(lasts > starts // base)
    if not len(filled):
        return
    rows, lasts, firsts = rows[filled], lasts[filled], starts[filled] // base
    requests = [table.occupant(row) for row in rows.tolist()]
    _extend_chains(cache, table, requests, rows, lasts)
    counts = lasts - firsts
    if int(counts.max()) == 1:
        hashes = [r.hashes[last - 1] for r, last in zip(requests, lasts.tolist(), strict=True)]
        cache.publish(hashes, blocks.cells(rows, lasts * base))
        return
    spans = zip(requests, firsts.tolist(), lasts.tolist(), strict=True)
    hashes = list(chain.from_iterable(r.hashes[first:last] for r, first, last in spans))
    starts_of_run = np.cumsum(counts) - counts
    links = np.arange(len(hashes)) - np.repeat(starts_of_run - firsts, counts)
    cache.publish(hashes, blocks.cells(np.repeat(rows, counts), (links + 1) * base))


def _extend_chains(
    cache: PrefixCache,
    table: RequestTable,
    requests: Sequence[Request],
    rows: np.ndarray,
    lasts: np.ndarray,
) -> None:
    """Let each request have at least lasts[i] hashes. A decode that fills a block makes one: those go together."""
    short, ends = [], []
    for i, (request, last) in enumerate(zip(requests, lasts.tolist(), strict=True)):
        missing = last - len(request.hashes)
        if missing == 1:
            short.append(i)
            ends.append(last)
        elif missing > 1:
            tokens = table.token_ids[rows[i], : last * cache.base]
            cache.extend(request.hashes, request.chain_root, tokens)
    if not short:
        return
    columns = (np.array(ends)[:, None] - 1) * cache.base + np.arange(cache.base)
    tokens = table.token_ids[rows[short][:, None], columns]
    chains = [requests[i] for i in short]
    parents = [r.hashes[-1] if r.hashes else r.chain_root for r in chains]
    for request, link in zip(chains, cache.extend_rows(parents, tokens), strict=True):
        request.hashes.append(link)


def publish_held(
    cache: PrefixCache, groups: Sequence[KVGroupSpec], request: Request, start: int, end: int
) -> None:
    """The same for one request that holds its blocks without a row."""
    base = cache.base
    first, last = start // base, end // base
    if last == first:
        return
    cache.extend(request.hashes, request.chain_root, request.tokens[: last * base])
    ends = np.arange(first + 1, last + 1) * base
    named = np.zeros((len(groups), len(ends)), np.int32)
    for group, (spec, ids) in enumerate(zip(groups, request.held_blocks, strict=True)):
        columns, rest = np.divmod(ends, spec.block_size)
        named[group] = np.where(rest == 0, ids[columns - 1], 0)
    cache.publish(request.hashes[first:last], named)
