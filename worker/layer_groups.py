"""Which layers share a KV group, so that one pool serves layers that see differently far.

Pure arithmetic on the whole model: every rank comes to the same groups. Needs no torch.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..scheduler.kv_groups import AttentionKind, KVGroupSpec
from .layer_kinds import LayerKind
from .model_config import ModelConfig

# Beyond these, a step's cost in tables and broadcast outweighs the memory that a finer split saves.
_MAX_GROUPS = 8


def group_specs(config: ModelConfig, block_size: int) -> tuple[KVGroupSpec, ...]:
    """The KV groups of a model. Units: block_size is tokens."""
    return split_layers(
        config.layers,
        num_kv_heads=[config.num_kv_heads] * config.num_layers,
        head_dims=[config.head_dim] * config.num_layers,
        block_size=block_size,
    )


def split_layers(
    layers: Sequence[LayerKind],
    *,
    num_kv_heads: Sequence[int],
    head_dims: Sequence[int],
    block_size: int,
) -> tuple[KVGroupSpec, ...]:
    """Split layers into groups that need equally many bytes a block, as nearly as possible.

    Layers of one kind see the same and have the same KV heads and head_dim. A group holds layers of one kind, at most
    `layers_in_group` of them; a kind's layers are dealt to its groups in turn. A kind that needs a whole fraction of
    the bytes of the widest takes that many times larger blocks. Full attention comes first, then kinds in the order of
    their first layers.

    Shapes: num_kv_heads and head_dims by layer.
    Example: layers 0 and 1 full, 2 to 5 of one window -> (0, 1), (2, 4), (3, 5).
    Example: block_size 16, a full layer of head_dim 512 and a window of 256 -> block_size 16 and 32.
    """
    of_kind: dict[tuple[AttentionKind, int, int, int], list[int]] = {}
    for layer, (kind, heads, head_dim) in enumerate(
        zip(layers, num_kv_heads, head_dims, strict=True)
    ):
        of_kind.setdefault((kind.attention, kind.window, heads, head_dim), []).append(layer)
    kinds = sorted(of_kind.items(), key=lambda item: item[0][0] is not AttentionKind.FULL)
    widest = max(heads * head_dim for (_, _, heads, head_dim), _ in kinds)
    most = layers_in_group([len(members) for _, members in kinds])
    groups = []
    for (attention, window, heads, head_dim), members in kinds:
        times, left = divmod(widest, heads * head_dim)
        num_groups = -(-len(members) // most)
        groups += [
            KVGroupSpec(
                block_size=block_size if left else block_size * times,
                num_kv_heads=heads,
                head_dim=head_dim,
                layers=tuple(members[first::num_groups]),
                kind=attention,
                window=window,
            )
            for first in range(num_groups)
        ]
    return tuple(groups)


def layers_in_group(counts: Sequence[int]) -> int:
    """How many layers a group has room for, when `counts` of each kind are to be split.

    The count of the rarest kind, or more if that would make too many groups; that of the commonest if this leaves less
    room unused, as where the counts differ by little.

    Example: [2, 4] -> 2, three full groups. [3, 7] -> 3 (3 | 3, 2, 2). [6, 5] -> 6, as 5 would leave a group of 1.
    """

    def num_groups(room: int) -> int:
        return sum(-(-count // room) for count in counts)

    fewest, most = min(counts), max(counts)
    while num_groups(fewest) > _MAX_GROUPS and fewest < most:
        fewest += 1
    return most if most * num_groups(most) < fewest * num_groups(fewest) else fewest
