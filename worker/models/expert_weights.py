"""Read a layer's experts, this rank's columns of each, under either of the two names that checkpoints have for them.

Apart: two-dimensional gate, up and down for every expert, under the architecture's own names. Fused: one
`mlp.experts.gate_up_proj` [num_experts, 2 * width, hidden_size] with the gate's rows above the up's, and one
`mlp.experts.down_proj` [num_experts, hidden_size, width]. transformers 5 computes with the latter and saves the former
unless told otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from ..expert_config import ExpertConfig
from .weights import Checkpoint


class ExpertWeights(NamedTuple):
    """Shapes: router [num_experts, hidden_size]; gate_up [num_experts, 2 * columns, hidden_size]; down [num_experts,
    hidden_size, columns].
    """

    router: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


def read_experts(
    checkpoint: Checkpoint,
    layer: str,
    config: ExpertConfig,
    *,
    hidden_size: int,
    columns: range,
    empty: Callable[..., torch.Tensor],
) -> ExpertWeights:
    """The router, and all experts' `columns`; `empty` makes a tensor of the model's dtype on its device.

    Raises: ValueError naming file and tensor for what is missing or has another shape.
    """
    num_experts, width, rules = config.num_experts, config.width, config.rules
    weights = ExpertWeights(
        router=empty(num_experts, hidden_size),
        gate_up=empty(num_experts, 2 * len(columns), hidden_size),
        down=empty(num_experts, hidden_size, len(columns)),
    )
    gate, up = weights.gate_up.chunk(2, dim=1)
    fused = f"{layer}.mlp.experts"
    is_fused = f"{fused}.gate_up_proj" in checkpoint
    if is_fused:
        shape = (num_experts, 2 * width, hidden_size)
        below = range(width + columns.start, width + columns.stop)
        for rows, out in ((columns, gate), (below, up)):
            checkpoint.read(f"{fused}.gate_up_proj", shape, rows=rows, out=out)
        shape = (num_experts, hidden_size, width)
        checkpoint.read(f"{fused}.down_proj", shape, columns=columns, out=weights.down)
    else:
        for expert in range(num_experts):
            name = f"{layer}.{rules.block}.experts.{expert}"
            for matrix, out in ((rules.gate, gate), (rules.up, up)):
                checkpoint.read(
                    f"{name}.{matrix}.weight", (width, hidden_size), rows=columns, out=out[expert]
                )
            checkpoint.read(
                f"{name}.{rules.down}.weight",
                (hidden_size, width),
                columns=columns,
                out=weights.down[expert],
            )
    router = f"{layer}.{'mlp' if is_fused else rules.block}.gate.weight"
    checkpoint.read(router, (num_experts, hidden_size), out=weights.router)
    return weights
