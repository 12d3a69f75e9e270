"""Which heads, MLP columns and vocabulary rows each tensor-parallel rank owns. Pure arithmetic; DESIGN.md section 5.

Every range is contiguous and half-open, in the whole model's numbering. Heads come first, as they cannot be cut; MLP
columns then level what the heads leave uneven in a layer, and vocabulary rows what is still uneven in the sum, so that
each rank holds the same bytes to within one vocabulary row.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .expert_config import ExpertConfig
from .model_config import ModelConfig

# MLP columns are dealt in bundles of this many where the model is wide enough: matrix units want 16-byte rows.
_COLUMN_BUNDLE = 8


@dataclass(frozen=True, kw_only=True, slots=True)
class HeadShard:
    """One rank's heads. Query head q reads KV head q // (num_heads // num_kv_heads).

    q_heads: the query heads. kv_heads: the KV heads that they read; several ranks may hold the same one.
    """

    q_heads: range
    kv_heads: range

    @property
    def group(self) -> int:
        """Query heads per KV head on this rank."""
        return len(self.q_heads) // len(self.kv_heads)

    def counts_kv(self, group: int) -> bool:
        """Of the ranks that hold these KV heads, whether this is the first; group is the whole model's."""
        return self.q_heads.start == self.kv_heads.start * group


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """Everything one rank owns of a model. expert_columns: of each expert, where it has experts."""

    heads: HeadShard
    mlp_columns: range
    vocab_rows: range
    expert_columns: range = range(0)


def check_tensor_parallel_size(config: ModelConfig, tensor_parallel_size: int) -> None:
    """Refuse a rank count that leaves a rank without a query head, an MLP's or an expert's column or a vocabulary row.

    Raises: ValueError saying the largest count that works.
    """
    counts = {
        "query heads": config.num_heads,
        "MLP columns": config.intermediate_size,
        "vocabulary rows": config.vocab_size,
    }
    if config.experts is not None:
        counts["columns of an expert"] = config.experts.width
    scarcest = min(counts, key=counts.__getitem__)
    most = counts[scarcest]
    if not 1 <= tensor_parallel_size <= most:
        raise ValueError(
            f"tensor_parallel_size must be in [1, {most}], got {tensor_parallel_size}: each rank needs at least one "
            f"of the model's {most} {scarcest}"
        )


def heads_of_rank(num_heads: int, num_kv_heads: int, rank: int, world_size: int) -> HeadShard:
    """The heads of one rank.

    With at least as many KV heads as ranks, KV heads are dealt contiguously and the first num_kv_heads % world_size
    ranks take one more. With fewer, rank r serves KV head r * num_kv_heads // world_size, and that head's query heads
    are dealt among its ranks in the same way.

    Example: 9 query and 3 KV heads on 2 ranks -> KV heads [0, 2) and [2, 3), query heads [0, 6) and [6, 9).
    Example: 16 query and 2 KV heads on 4 ranks -> rank r has query heads [4r, 4r + 4) and KV head r // 2.
    """
    group = num_heads // num_kv_heads
    if num_kv_heads >= world_size:
        kv_heads = _dealt(num_kv_heads, world_size, rank)
        return HeadShard(
            q_heads=range(kv_heads.start * group, kv_heads.stop * group), kv_heads=kv_heads
        )
    kv_head = rank * num_kv_heads // world_size
    sharers = [r for r in range(world_size) if r * num_kv_heads // world_size == kv_head]
    share = _dealt(group, len(sharers), rank - sharers[0])
    first = kv_head * group
    return HeadShard(
        q_heads=range(first + share.start, first + share.stop),
        kv_heads=range(kv_head, kv_head + 1),
    )


def shard_of_rank(config: ModelConfig, rank: int, world_size: int) -> Shard:
    """One rank's part of a model. Every rank computes the same split; nothing is agreed by message."""
    check_tensor_parallel_size(config, world_size)
    heads = [
        heads_of_rank(config.num_heads, config.num_kv_heads, r, world_size)
        for r in range(world_size)
    ]
    attention = [attention_parameters(config, h) for h in heads]
    column, experts = column_parameters(config), config.experts
    columns = _columns(attention, column, config.intermediate_size)
    num_dense, expert_column, expert_columns = config.num_layers, 0, [0] * world_size
    if experts is not None:
        num_dense -= sum(experts.layers)
        expert_column = expert_column_parameters(config, experts)
        expert_columns = _columns(attention, expert_column, experts.width)
    held = [
        config.num_layers * attention[r]
        + num_dense * column * columns[r]
        + (config.num_layers - num_dense) * expert_column * expert_columns[r]
        for r in range(world_size)
    ]
    rows = level(held, row_parameters(config), config.vocab_size)
    return Shard(
        heads=heads[rank],
        mlp_columns=_range_of(columns, rank),
        vocab_rows=_range_of(rows, rank),
        expert_columns=_range_of(expert_columns, rank),
    )


def _columns(attention: Sequence[int], column: int, count: int) -> list[int]:
    """Deal an MLP's columns, of so many numbers each, so that a layer's attention and MLP together come out equal."""
    bundle = _COLUMN_BUNDLE
    if count % bundle or count < 8 * bundle * len(attention):
        bundle = 1
    return [bundle * given for given in level(attention, bundle * column, count // bundle)]


def vocab_rows_of_ranks(config: ModelConfig, world_size: int) -> tuple[range, ...]:
    """The vocabulary ids that each rank owns, in rank order: together [0, vocab_size)."""
    return tuple(shard_of_rank(config, rank, world_size).vocab_rows for rank in range(world_size))


def attention_parameters(config: ModelConfig, heads: HeadShard) -> int:
    """The numbers one layer's attention holds on a rank: q, k, v and output projections, and q, k, v biases."""
    q, kv = len(heads.q_heads), 2 * len(heads.kv_heads)
    bias = (q + kv) * config.head_dim if config.qkv_bias else 0
    return (2 * q + kv) * config.head_dim * config.hidden_size + bias


def column_parameters(config: ModelConfig) -> int:
    """The numbers one MLP column holds: a row of gate and of up, a column of down, and two biases."""
    return 3 * config.hidden_size + (2 if config.mlp_bias else 0)


def expert_column_parameters(config: ModelConfig, experts: ExpertConfig) -> int:
    """The numbers that one column of every expert of a layer holds; each rank has the router besides."""
    return experts.num_experts * 3 * config.hidden_size


def row_parameters(config: ModelConfig) -> int:
    """The numbers one vocabulary row holds: the embedding's, and the head's where it is not the same."""
    return config.hidden_size * (1 if config.tie_word_embeddings else 2)


def level(held: Sequence[int], unit: int, count: int) -> list[int]:
    """Deal `count` units of size `unit`, at least one to each rank, so that what the ranks hold comes out equal.

    Returns: units a rank. What cannot be level to the unit goes one each to the ranks that hold least, lowest first.
    Example: held [10, 4], unit 2, count 5 -> [1, 4]: both 12.
    """

    def given_at(line: int) -> list[int]:
        return [max(1, (line - size) // unit) for size in held]

    low, high = min(held), max(held) + unit * (count + 1)
    while high - low > 1:  # the highest line that does not ask for more than there is
        middle = (low + high) // 2
        if sum(given_at(middle)) <= count:
            low = middle
        else:
            high = middle
    given = given_at(low)
    least_first = sorted(range(len(held)), key=lambda r: (held[r] + given[r] * unit, r))
    for rank in least_first[: count - sum(given)]:
        given[rank] += 1
    assert sum(given) == count, (given, count)
    return given


def _dealt(count: int, shares: int, share: int) -> range:
    """Contiguous shares, the first count % shares of them one larger."""
    least, more = divmod(count, shares)
    start = share * least + min(share, more)
    return range(start, start + least + (share < more))


def _range_of(counts: Sequence[int], rank: int) -> range:
    start = sum(counts[:rank])
    return range(start, start + counts[rank])
