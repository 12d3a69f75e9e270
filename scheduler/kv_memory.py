"""Who holds which KV blocks: what an admission may take, growth, what a window lets go, what is held without a row.

Joins the pool, the rows' block tables and the prefix cache. Decides nobody's turn (`scheduler.py`) and names no block
(`publishing.py`).

A prompt whose first chunk fits is not let in while the rest would not: what partly computed prompts still need is
promised to them, and an admission asks for the blocks of its whole prompt beyond that. Decodes may take promised blocks
all the same, so this is no reservation; preemption stands behind it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .block_pool import BlockPool
from .budget import Share
from .config import SchedulerConfig
from .kv_groups import AttentionKind, KVGroupSpec, blocks_needed, most_blocks
from .prefix_cache import Hit, PrefixCache
from .request import Request, RequestTable
from .row_blocks import Growth, RowBlocks, deepest_first


class Offer(NamedTuple):
    """What a request would find if it were admitted now, and how many free blocks it would take to its prompt's end."""

    hit: Hit
    num_blocks: int


class KVMemory:
    """The blocks of all groups and rows. num_blocks counts the null block.

    caching: whether prefixes are looked up and published; off, a freed block is forgotten at once.
    """

    def __init__(
        self, config: SchedulerConfig, groups: Sequence[KVGroupSpec], num_blocks: int
    ) -> None:
        self.groups = tuple(groups)
        self.caching = config.prefix_caching
        self.pool = BlockPool(num_blocks)
        self.cache = PrefixCache(self.groups, self.pool)
        self.blocks = RowBlocks(
            self.groups, max_num_seqs=config.max_num_seqs, max_model_len=config.max_model_len
        )
        self._max_in_flight = config.max_tokens_in_flight
        self._saltless_root = self.cache.root(None)
        alike: dict[tuple[AttentionKind, int, int], list[int]] = {}
        for group, spec in enumerate(self.groups):
            alike.setdefault((spec.kind, spec.window, spec.block_size), []).append(group)
        self._alike = [(self.groups[groups[0]], groups) for groups in alike.values()]
        self._no_hit = Hit(num_tokens=0, block_ids=tuple(np.empty(0, np.int32) for _ in groups))
        self._holders: dict[int, Request] = {}  # by generation: without a row, but with blocks

    # ------------------------------------------------------------ admission

    def prepare(self, request: Request) -> None:
        """Hash the tokens of a request that comes: here, not in the step that admits it, where others wait for it."""
        if self.caching:
            salt = request.cache_salt
            request.chain_root = self.cache.root(salt) if salt else self._saltless_root
            self.cache.extend(request.hashes, request.chain_root, request.tokens)

    def offer(self, request: Request) -> Offer:
        """Look a waiting request's tokens up, and count what its admission takes. Changes no block."""
        length, hit = len(request.tokens), self._no_hit
        if self.caching:
            if request.num_preemptions:  # with outputs that are not hashed yet
                self.cache.extend(request.hashes, request.chain_root, request.tokens)
            if not request.owes_prompt_rows:
                hit = self.cache.lookup(request.hashes, length)
        return Offer(hit=hit, num_blocks=self._blocks_to_take(length, hit))

    def _blocks_to_take(self, length: int, hit: Hit) -> int:
        """Count the free blocks that a request takes at most on the way to `length` tokens, idle hits among them.

        A hit that others hold costs nothing, and returning it frees nothing either. So a window group counts what it
        takes itself: new blocks and idle hits, and of them never more at once than a row can hold.
        """
        total = 0
        for spec, groups in self._alike:
            own = blocks_needed(length, spec.block_size) - hit.num_tokens // spec.block_size
            most = most_blocks(spec, length, self._max_in_flight)
            if not hit.num_tokens:
                total += min(own, most) * len(groups)
                continue
            for group in groups:
                ids = hit.block_ids[group]
                idle = np.count_nonzero((self.pool.ref_counts[ids] == 0) & (ids > 0))
                total += min(own + int(idle), most)
        return total

    def promised(self, table: RequestTable, share: Share) -> int:
        """Count the blocks that running, partly computed prompts still need once this step's are taken."""
        rows = share.prompts
        if not len(rows):
            return 0
        computed = table.num_computed_tokens.copy()
        computed[share.run_rows] += share.run_counts
        lengths, computed, total = table.num_tokens[rows], computed[rows], 0
        for same in self.blocks.sizes:
            held = np.maximum(same.num_blocks[rows], blocks_needed(computed, same.block_size))
            missing = blocks_needed(lengths, same.block_size) - held
            for group in same.groups.tolist():
                spec = self.groups[group]
                if spec.kind is AttentionKind.FULL:
                    total += int(missing.sum())
                    continue
                not_own = np.maximum(
                    self.blocks.num_returned[group][rows],
                    table.num_cached_tokens[rows] // same.block_size,
                )
                most = most_blocks(spec, lengths, self._max_in_flight)
                total += int(np.minimum(missing, most - (held - not_own)).clip(0).sum())
        return total

    def seat(self, row: int, offer: Offer) -> None:
        """Pin the hit of an admitted request and enter it in its row. Before any new block is taken."""
        hit = offer.hit
        if hit.num_tokens:
            self.pool.touch(hit.ids)
            self.blocks.seat(row, hit.block_ids)

    # ------------------------------------------------------------ a step

    def grow(self, growth: Growth) -> tuple[np.ndarray, ...]:
        """Take a step's new blocks; returns them by group, as the workers read them."""
        return self.blocks.grow(growth, self.pool.allocate(growth.num_blocks))

    def return_unseen(self, rows: np.ndarray, num_computed: np.ndarray) -> None:
        """Free what lies left of the windows of rows, of which num_computed tokens have settled."""
        ids = self.blocks.return_unseen(rows, num_computed)
        if ids is not None:
            self.pool.free(ids)

    def release(self, rows: Sequence[int]) -> None:
        """Free all that rows hold."""
        self.pool.free(self.blocks.release(rows))

    # ------------------------------------------------------------ blocks without a row

    @property
    def num_holders(self) -> int:
        """Count the requests that hold blocks without a row."""
        return len(self._holders)

    def held_ids(self) -> np.ndarray:
        """Name every block that is held without a row, once a holder: [n] int32."""
        held = [deepest_first(r.held_blocks, self.groups) for r in self._holders.values()]
        return np.concatenate(held) if held else np.empty(0, np.int32)

    def hold(self, rows: Sequence[int], requests: Sequence[Request]) -> None:
        """Let requests keep their blocks while they lose their rows, until their last steps have settled."""
        for row, request in zip(rows, requests, strict=True):
            request.held_blocks = self.blocks.row_tables(row)
            self._holders[request.generation] = request
        self.blocks.clear(np.array(rows))

    def let_go(self, requests: Sequence[Request]) -> None:
        """Free what requests hold without a row, as far as they do."""
        ids = []
        for request in requests:
            if self._holders.pop(request.generation, None) is not None:
                ids.append(deepest_first(request.held_blocks, self.groups))
                request.held_blocks = ()
        if ids:
            self.pool.free(np.concatenate(ids))

    def reclaim(self) -> bool:
        """Free the blocks of the one that has held them longest without a row, unpublished. False if there is none."""
        for request in self._holders.values():
            self.let_go([request])
            return True
        return False
