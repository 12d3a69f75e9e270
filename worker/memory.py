"""How many bytes of this rank's device the KV cache may take."""

from __future__ import annotations

import os

import torch

from .architectures import QKNorm
from .config import WorkerConfig
from .expert_config import ExpertConfig
from .kv_cache import DEFAULT_CPU_BYTES
from .model_config import ModelConfig
from .sharding import Shard


def kv_cache_bytes(
    config: WorkerConfig,
    model: ModelConfig,
    shard: Shard,
    dtype: torch.dtype,
    device: torch.device,
) -> int:
    """What the user set; else 512 MiB on a CPU, and what gpu_memory_utilization leaves on a GPU after loading.

    Raises: ValueError saying what is missing if that is more than there is, or a GPU has nothing left.
    """
    if device.type == "cpu":
        # Linux hands out more than it has, and kills the process later, when the pages are used.
        free = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return _asked(config, free, "this machine has") or DEFAULT_CPU_BYTES
    free, total = torch.cuda.mem_get_info(device)
    # What torch holds in its own cache and does not use counts as free: the pool will take it.
    free += torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    asked = _asked(config, free, "the GPU has free")
    if asked is not None:
        return asked
    allowed = int(total * config.gpu_memory_utilization) - (total - free)
    left = allowed - activation_bytes(config, model, shard, dtype.itemsize)
    if left <= 0:
        raise ValueError(
            f"rank {config.rank}: gpu_memory_utilization {config.gpu_memory_utilization} of {total} bytes leaves "
            f"nothing for the KV cache ({total - free} bytes are in use); raise it, or use more ranks"
        )
    return left


def _asked(config: WorkerConfig, there: int, where: str) -> int | None:
    asked = config.kv_cache_memory
    if asked is not None and asked > there:
        raise ValueError(
            f"rank {config.rank}: kv_cache_memory asks for {asked} bytes, {where} {there}; lower --kv-cache-memory"
        )
    return asked


def activation_bytes(config: WorkerConfig, model: ModelConfig, shard: Shard, itemsize: int) -> int:
    """An upper bound on what a step holds beside weights and cache, from the sizes of its tensors.

    The widest moment of a layer: the residual, a normalized copy in float32 and its square; and either qkv, its rotated
    copy and the attended heads (before that, the same three of q and k, where heads are normalized), or gate, up and
    their product, or what `_expert_bytes` says; and the partial sums of every rank. Later, logits of every row with
    float32 copies and int64 keys.
    """
    heads = shard.heads
    num_q, num_kv = len(heads.q_heads), len(heads.kv_heads)
    attention = (3 * num_q + 5 * num_kv) * model.head_dim * itemsize
    if model.qk_norm is not QKNorm.NONE:
        attention += (num_q + num_kv) * model.head_dim * (3 * 4 + itemsize)
    a_token = model.hidden_size * (2 * itemsize + 3 * 4 + (1 + config.world_size) * itemsize) + max(
        attention,
        4 * len(shard.mlp_columns) * itemsize,
        0 if model.experts is None else _expert_bytes(model, model.experts, shard, itemsize),
    )
    a_row = len(shard.vocab_rows) * (itemsize + 3 * 4 + 3 * 8)
    return config.max_num_batched_tokens * a_token + config.max_num_seqs * a_row


def _expert_bytes(model: ModelConfig, experts: ExpertConfig, shard: Shard, itemsize: int) -> int:
    """A token's: its logits and shares of the experts; and for each that it takes its place in the order (in int64,
    five times), its input, gate, up and their product, the answer in the experts' order and once more in the tokens'.
    """
    of_pair = 3 * model.hidden_size + 4 * len(shard.expert_columns)
    return experts.num_experts * (itemsize + 2 * 4) + experts.experts_per_token * (
        of_pair * itemsize + 5 * 8
    )
