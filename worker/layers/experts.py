"""Mixture of experts on this rank's columns of every expert: sum of weight_e * expert_e(x) over a token's experts.

    weight = softmax(router(x)), the largest experts_per_token of it, divided by their sum where `normalize`
    expert_e(x) = down_e(activation(gate_e(x)) * up_e(x))

Every rank has the whole router and the same x, to the last bit, so ranks on processors of one kind choose the same
experts (another kind may round otherwise); each computes its columns of them, and one sum over the ranks makes the
layer's output, as in the dense MLP. Nothing here waits for the device, which alone knows how many tokens an expert has.
"""

from __future__ import annotations

import torch

from ..parallel import TensorParallelGroup
from .linear import Linear
from .mlp import ACTIVATION_FUNCTIONS
from .step_context import StepContext


class Experts:
    """Shapes: router maps hidden_size -> num_experts; gate_up [num_experts, 2 * columns, hidden_size], an expert's gate
    columns of this rank, then its up columns; down [num_experts, hidden_size, columns].

    activation: one of model_config's ACTIVATIONS.
    """

    def __init__(
        self,
        *,
        activation: str,
        experts_per_token: int,
        normalize: bool,
        router: Linear,
        gate_up: torch.Tensor,
        down: torch.Tensor,
        parallel: TensorParallelGroup,
    ) -> None:
        self._activation = ACTIVATION_FUNCTIONS[activation]
        self._experts_per_token = experts_per_token
        self._normalize = normalize
        self._router = router
        self._gate_up = gate_up
        self._down = down
        self._parallel = parallel

    def __call__(self, x: torch.Tensor, step: StepContext) -> torch.Tensor:
        """Shapes: x [num_tokens, hidden_size]; returns the same."""
        num_tokens, hidden_size = x.shape
        grouped_gemm = step.backend.grouped_gemm
        weights, experts = self._route(x)
        # A row is a (token, expert) pair; the products take rows sorted by expert.
        sorted_experts, row_of_sorted = experts.view(-1).sort(stable=True)
        num_rows, num_experts = len(sorted_experts), len(self._gate_up)
        expert_start_loc = torch.searchsorted(
            sorted_experts,
            torch.arange(num_experts + 1, dtype=sorted_experts.dtype, device=x.device),
            out_int32=True,
        )
        rows = x.index_select(0, row_of_sorted // self._experts_per_token)
        gate_up = x.new_empty(num_rows, self._gate_up.shape[1])
        grouped_gemm(rows, self._gate_up, expert_start_loc, out=gate_up)
        gate, up = gate_up.chunk(2, dim=-1)
        answers = x.new_empty(num_rows, hidden_size)
        grouped_gemm(self._activation(gate).mul_(up), self._down, expert_start_loc, out=answers)
        # Gathered and not scattered: sums by atomic adds would come out in another order each time.
        answers_of_rows = torch.empty_like(answers).index_copy_(0, row_of_sorted, answers)
        of_tokens = answers_of_rows.view(num_tokens, self._experts_per_token, hidden_size)
        return self._parallel.sum_(torch.bmm(weights.unsqueeze(1), of_tokens).squeeze(1))

    def _route(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Shapes: returns weights in x's dtype and experts, both [num_tokens, experts_per_token]."""
        shares = torch.softmax(self._router(x), dim=-1, dtype=torch.float32)
        weights, experts = shares.topk(self._experts_per_token, dim=-1)
        if self._normalize:
            weights.div_(weights.sum(dim=-1, keepdim=True))
        return weights.to(x.dtype), experts
