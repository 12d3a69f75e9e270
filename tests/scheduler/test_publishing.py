"""Every block that settled full has the name that a plain chain of hashes gives it, however its tokens came."""

from __future__ import annotations

import numpy as np
import pytest
from rowcast.tests.scheduler.fakes import Bench, group


def names_and_expected(bench: Bench) -> list[tuple[object, object]]:
    """Of every row's blocks that hold settled tokens alone: the name that it has, and the one that it should have.

    Needs depth 1: all that was computed has settled.
    """
    scheduler, pairs = bench.scheduler, []
    table, cache = scheduler.table, scheduler.cache
    for row in np.flatnonzero(table.live).tolist():
        computed = int(table.num_computed_tokens[row])
        hashes: list[bytes] = []
        root = cache.root(table.occupant(row).cache_salt)
        cache.extend(hashes, root, table.token_ids[row, :computed])
        for index, spec in enumerate(scheduler.groups):
            ids = scheduler.blocks.block_ids[index][row, : computed // spec.block_size]
            for column, name in enumerate(cache.names_of(ids)):
                if ids[column]:  # 0 was returned
                    last = (column + 1) * spec.block_size // cache.base - 1
                    pairs.append((name, (index, hashes[last])))
    return pairs


@pytest.mark.parametrize("equal_prompts", [False, True])
@pytest.mark.parametrize(
    "groups",
    [
        (group(4),),
        (group(4), group(6)),
        (group(8), group(4, window=8), group(2, chunk=12)),
    ],
)
def test_names_are_those_of_a_plain_chain(groups, equal_prompts):
    """Chunks beside decodes, salts, preempted ones: a wrong name is a hit that never comes, and nobody would notice.

    Of equal prompts the first has the names, and the others' blocks may have none.
    """
    bench = Bench(
        groups=groups, usable=20 + 17 * len(groups), prefix_caching=True, max_num_batched_tokens=15, max_num_seqs=6,
        max_model_len=90, long_prefill_token_threshold=7, eos_token_ids=(3,),
    )  # fmt: skip
    random = np.random.default_rng(3)
    num_checked = 0
    for step in range(120):
        if step % 3 == 0:
            first = step % 2 if equal_prompts else step % 89
            prompt = [(first + 7 * place) % 101 for place in range(int(random.integers(1, 40)))]
            salt = "a" if step % 4 == 0 else None
            bench.add(prompt, max_tokens=30, seed=step % 5, submit={"cache_salt": salt})
        bench.step()
        for name, expected in names_and_expected(bench):
            assert name == expected or (name is None and equal_prompts)
            num_checked += name is not None
    assert num_checked > 500
    assert bench.scheduler.num_preemptions > 0
    bench.run()
    bench.check_all_ended()
