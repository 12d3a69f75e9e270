"""How much memory the KV cache may take; a GPU's numbers are made up, as this needs none."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from rowcast.tests.worker.test_sharding import SMOLLM2, mixture
from rowcast.worker.architectures import QKNorm
from rowcast.worker.config import WorkerConfig
from rowcast.worker.memory import activation_bytes, kv_cache_bytes
from rowcast.worker.sharding import shard_of_rank

GIB = 1024**3
SHARD = shard_of_rank(SMOLLM2, 0, 1)


def config(**options) -> WorkerConfig:
    return WorkerConfig(model_dir="unread", max_model_len=1024, **options)


def kv_bytes(device: str, **options) -> int:
    return kv_cache_bytes(config(**options), SMOLLM2, SHARD, torch.bfloat16, torch.device(device))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """80 GiB, 50 free; torch holds 5 GiB of the rest, 2 of them unused."""
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (50 * GIB, 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GIB)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 3 * GIB)


def test_a_cpu_takes_half_a_gib_unless_told_otherwise():
    assert kv_bytes("cpu") == 512 * 1024**2
    assert kv_bytes("cpu", kv_cache_memory=12_345) == 12_345


@pytest.mark.usefixtures("gpu")
def test_a_gpu_takes_its_share_of_the_whole_less_what_is_in_use_and_what_a_step_needs():
    """Other processes' memory counts as used: a share of what is free would grow with their absence."""
    step = activation_bytes(config(), SMOLLM2, SHARD, itemsize=2)
    assert 0 < step < GIB
    in_use = 80 - (50 + 2)
    assert kv_bytes("cuda", gpu_memory_utilization=0.75) == (60 - in_use) * GIB - step
    assert kv_bytes("cuda", kv_cache_memory=GIB) == GIB


@pytest.mark.usefixtures("gpu")
def test_a_gpu_with_nothing_left_is_a_sentence():
    with pytest.raises(
        ValueError, match=r"gpu_memory_utilization 0\.3 of \d+ bytes leaves nothing"
    ):
        kv_bytes("cuda", gpu_memory_utilization=0.3)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("device", "where"), [("cpu", "this machine has"), ("cuda", f"the GPU has free {52 * GIB};")]
)
def test_more_memory_than_there_is_is_refused_before_it_is_taken(device, where):
    """Linux hands out what it does not have and kills the process later, without a word."""
    with pytest.raises(ValueError, match=rf"kv_cache_memory asks for {1024 * GIB} bytes, {where}"):
        kv_bytes(device, kv_cache_memory=1024 * GIB)


def test_normalized_heads_count_while_they_are_wide():
    """q and k once more in the model's dtype and three times in float32, for each of a step's tokens."""
    normed = replace(SMOLLM2, qk_norm=QKNorm.HEAD, intermediate_size=8)
    plain = replace(normed, qk_norm=QKNorm.NONE)
    more = (9 + 3) * 64 * (3 * 4 + 2)
    step = config(max_num_batched_tokens=100)
    shard = shard_of_rank(normed, 0, 1)
    difference = activation_bytes(step, normed, shard, 2) - activation_bytes(step, plain, shard, 2)
    assert difference == 100 * more


def test_each_expert_that_a_token_takes_counts():
    """Its input, its answer twice, 4 times its 520 columns, and its place in the order."""
    model = mixture(experts_per_token=30)
    shard = shard_of_rank(model, 0, 1)
    step = config(max_num_batched_tokens=100, max_num_seqs=1)
    few = activation_bytes(step, mixture(experts_per_token=29), shard, 2)
    of_pair = (3 * 576 + 4 * 520) * 2 + 5 * 8
    assert activation_bytes(step, model, shard, 2) - few == 100 * of_pair
    assert activation_bytes(step, SMOLLM2, shard, 2) < few
