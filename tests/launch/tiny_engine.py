"""A small embedded engine for a tiny model, and what must hold of it when nobody asks it for anything."""

from __future__ import annotations

from pathlib import Path

from rowcast import LLM


def make_llm(model: Path, **options) -> LLM:
    """4 rows, 16 tokens a step, blocks of 8 tokens, 64 KiB of KV cache, unless options say otherwise."""
    sizes = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 8, "num_threads": 1}
    return LLM(model, **(sizes | {"kv_cache_memory": "64KiB"} | options))


def assert_idle(llm: LLM) -> None:
    """Every row and block is back."""
    counts = llm.snapshot()
    assert (counts["running"], counts["waiting"]) == (0, 0)
    assert counts["free_blocks"] == counts["usable_blocks"]
