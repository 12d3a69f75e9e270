"""What a checkpoint in eight files costs each of three ranks: its part of every tensor, and little memory besides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from rowcast.tests.worker.load_figures import expected_of_rank, load_on_rank, stored_bytes
from rowcast.tests.worker.rank_pool import RankPool
from rowcast.tests.worker.tiny_models import heads, make_model

SIZES: dict[str, Any] = {
    **heads(3, 2, 64, hidden_size=384),
    "intermediate_size": 1024,
    "num_hidden_layers": 6,
    "vocab_size": 4001,
}
MODELS: dict[str, dict[str, Any]] = {
    "tied": {"architecture": "Llama", "tie_word_embeddings": True},
    "mostly vocabulary, 16 bits": {
        "architecture": "Gemma3",
        "dtype": "bfloat16",
        "vocab_size": 9001,
        "num_hidden_layers": 6,
        "intermediate_size": 500,
        "num_key_value_heads": 1,
    },
    "untied, uneven KV heads": {"architecture": "Qwen2", **heads(5, 2, 48, hidden_size=384)},
    "fused projections": {"architecture": "Phi3"},
    "experts": {
        "architecture": "Mixtral",
        "intermediate_size": 256,
        "num_local_experts": 4,
    },
}


@pytest.mark.parametrize("name", MODELS)
def test_eight_files_cost_three_ranks_their_share(
    rank_pool: RankPool, tmp_path: Path, name: str
) -> None:
    """A fused matrix cut after it was read, or a tied embedding held twice, shows in no token."""
    folder = make_model(tmp_path / "model", num_files=8, **{**SIZES, **MODELS[name]})
    widening = 2 if MODELS[name].get("dtype") == "bfloat16" else 1
    figures = rank_pool.run(3, load_on_rank, str(folder))
    expected = [expected_of_rank(folder, rank, 3) for rank in range(3)]
    for said, may in zip(figures, expected, strict=True):
        assert said.read <= may.share + may.replicated
        shard = widening * (may.share + may.replicated)
        assert 0.8 * shard < said.peak <= 1.2 * shard
    everything = sum(stored_bytes(folder).values())
    assert sum(said.read for said in figures) >= everything
