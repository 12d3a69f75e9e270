"""Reads this rank's part of every layer: which tensor of a checkpoint goes where.

The arithmetic is in `layers/`, the split in `sharding.py`, what a mixture of experts reads in `expert_weights.py`.
"""

from __future__ import annotations

import mmap

import torch

from ..architectures import QKNorm
from ..layers.attention import Attention
from ..layers.decoder_layer import DecoderLayer
from ..layers.experts import Experts
from ..layers.linear import Linear, packs
from ..layers.mlp import GatedMLP
from ..layers.norm import AllHeadsRMSNorm, LayerNorm, Norm, RMSNorm
from ..model_config import ModelConfig
from ..parallel import TensorParallelGroup
from ..sharding import Shard
from .expert_weights import read_experts
from .weights import Checkpoint


class LayerLoader:
    """Fills this rank's fused matrices from the checkpoint's separate ones.

    A matrix that a `Linear` packs is read into memory that is used again for the next one: what malloc is given back
    between packed ones it keeps as holes, up to as many bytes again as the weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        checkpoint: Checkpoint,
        shard: Shard,
        parallel: TensorParallelGroup,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._config = config
        self._checkpoint = checkpoint
        self._shard = shard
        self._parallel = parallel
        self._dtype = dtype
        self._device = device
        self._packs = packs(dtype, device)
        self._scratch = torch.empty(0)

    def _matrix(self, rows: int, columns: int) -> torch.Tensor:
        """Room for a `Linear`'s weight."""
        if not self._packs:
            return self._empty(rows, columns)
        if self._scratch.numel() < rows * columns:
            self._scratch = torch.empty(0)  # the old one goes before the new one comes
            self._scratch = _borrowed(rows * columns, self._dtype)
        return self._scratch[: rows * columns].view(rows, columns)

    def _empty(self, *shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=self._dtype, device=self._device)

    def _vector(self, name: str, size: int) -> torch.Tensor:
        out = self._empty(size)
        self._checkpoint.read(name, (size,), out=out)
        return out

    def norm(self, name: str) -> Norm:
        config = self._config
        weight = self._norm_weight(f"{name}.weight", config.hidden_size)
        if config.layer_norms:
            bias = self._vector(f"{name}.bias", config.hidden_size)
            return LayerNorm(weight, bias, config.norm_eps)
        return RMSNorm(weight, config.norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        """Offsets are rounded to the model's dtype and then added to 1 in float32, as transformers does."""
        weight = self._vector(name, size)
        if self._config.wide_norms:
            weight = weight.float()
        return weight.add_(1.0) if self._config.offset_norms else weight

    def _qk_norm(self, attention: str) -> Norm | None:
        """For q and k together: a single pass over both."""
        config, heads = self._config, self._shard.heads
        if config.qk_norm is QKNorm.NONE:
            return None
        if config.qk_norm is QKNorm.EACH_HEAD:
            return self._each_head_norm(attention)
        if config.qk_norm is QKNorm.HEAD:
            query, key = (
                self._norm_weight(f"{attention}.{name}.weight", config.head_dim)
                for name in ("q_norm", "k_norm")
            )
            weights = [query] * len(heads.q_heads) + [key] * len(heads.kv_heads)
            return RMSNorm(torch.stack(weights), config.norm_eps)
        weights = []
        for name, num_heads, mine in (
            ("q_norm", config.num_heads, heads.q_heads),
            ("k_norm", config.num_kv_heads, heads.kv_heads),
        ):
            whole = self._norm_weight(f"{attention}.{name}.weight", num_heads * config.head_dim)
            weights.append(whole.view(num_heads, -1)[mine.start : mine.stop])
        return AllHeadsRMSNorm(
            torch.cat(weights),
            config.norm_eps,
            num_local_q=len(heads.q_heads),
            num_q=config.num_heads,
            num_kv=config.num_kv_heads,
            counts_kv=heads.counts_kv(config.num_heads // config.num_kv_heads),
            parallel=self._parallel,
        )

    def _each_head_norm(self, attention: str) -> LayerNorm:
        """Every head's weight is a tensor of its own; reading those of other ranks too shows that none is left over."""
        config, heads = self._config, self._shard.heads
        mine = []
        for name, num_heads, own in (
            ("q_layernorm", config.num_heads, heads.q_heads),
            ("k_layernorm", config.num_kv_heads, heads.kv_heads),
        ):
            weights = [
                self._norm_weight(f"{attention}.{name}.norms.{head}.weight", config.head_dim)
                for head in range(num_heads)
            ]
            mine += weights[own.start : own.stop]
        return LayerNorm(torch.stack(mine), None, config.norm_eps)

    def vocabulary(self, embedding: str, head: str) -> tuple[torch.Tensor, Linear]:
        """This rank's rows of the embedding, to look up, and its rows of the head; if they are tied, in one memory.

        A packed head has them in a form that no row can be taken of: then the embedding stays in the mapped file, from
        which the rows that texts ask for come through the page cache. Called before all else is read: for a moment the
        head may be there twice.
        """
        rows = self._stored_rows(embedding)
        stored, tied = rows, self._config.tie_word_embeddings
        if not tied or head in self._checkpoint:
            # Beside a config that ties it a head that differs is one of its own, as in transformers.
            stored = self._stored_rows(head)
            tied = tied and stored.dtype == rows.dtype and torch.equal(stored, rows)
        if not self._packs:
            linear = Linear(self._copied(stored))
        elif stored.dtype == self._dtype:
            linear = Linear(stored)
        else:
            widened = _borrowed(stored.numel(), self._dtype).view(stored.shape)
            linear = Linear(widened.copy_(stored))
        if not tied:
            return self._copied(rows), linear
        return rows if linear.weight is None else linear.weight, linear

    def _copied(self, stored: torch.Tensor) -> torch.Tensor:
        return self._empty(*stored.shape).copy_(stored)

    def _stored_rows(self, name: str) -> torch.Tensor:
        config, rows = self._config, self._shard.vocab_rows
        return self._checkpoint.view(name, (config.vocab_size, config.hidden_size), rows=rows)

    def _column_parallel(
        self, parts: list[tuple[str, int, range]], *, fused: str, bias: bool
    ) -> Linear:
        """Stack row ranges of several matrices into one; each part is (name, all its rows, this rank's rows).

        fused: the name of the one matrix in which a checkpoint of fused_projections has them, one below the other.
        """
        if self._config.fused_projections:
            parts = _below_one_another(fused, parts)
        size = sum(len(rows) for _, _, rows in parts)
        weight = self._matrix(size, self._config.hidden_size)
        bias_vector = self._empty(size) if bias else None
        start = 0
        for name, all_rows, rows in parts:
            end = start + len(rows)
            self._checkpoint.read(
                f"{name}.weight",
                (all_rows, self._config.hidden_size),
                rows=rows,
                out=weight[start:end],
            )
            if bias_vector is not None:
                self._checkpoint.read(
                    f"{name}.bias", (all_rows,), rows=rows, out=bias_vector[start:end]
                )
            start = end
        return Linear(weight, bias_vector)

    def _row_parallel(self, name: str, all_columns: int, columns: range) -> Linear:
        weight = self._matrix(self._config.hidden_size, len(columns))
        self._checkpoint.read(
            f"{name}.weight",
            (self._config.hidden_size, all_columns),
            columns=columns,
            out=weight,
        )
        return Linear(weight)

    def layer(self, layer: int) -> DecoderLayer:
        config, prefix = self._config, f"model.layers.{layer}"

        def norm(name: str, present: bool) -> Norm | None:
            return self.norm(f"{prefix}.{name}") if present else None

        # One name, two places: without norms of what comes out post_attention_layernorm is that of the MLP's input.
        has_experts = config.experts is not None and config.experts.layers[layer]
        pre, post, parallel = config.pre_norms, config.post_norms, config.parallel_residual
        return DecoderLayer(
            attention_norm=norm("input_layernorm", pre),
            attention=self._attention(layer, f"{prefix}.self_attn"),
            attention_out_norm=norm("post_attention_layernorm", post),
            mlp_norm=norm(
                "pre_feedforward_layernorm" if post else "post_attention_layernorm",
                pre and not parallel,
            ),
            mlp=self._experts(prefix) if has_experts else self._mlp(f"{prefix}.mlp"),
            mlp_out_norm=norm("post_feedforward_layernorm", post),
            residual_scale=config.residual_scale,
            parallel=parallel,
        )

    def _attention(self, layer: int, name: str) -> Attention:
        config, heads = self._config, self._shard.heads
        num_q, num_kv = config.num_heads, config.num_kv_heads
        q_rows = _items(heads.q_heads, config.head_dim)
        kv_rows = _items(heads.kv_heads, config.head_dim)
        q_items, kv_items = num_q * config.head_dim, num_kv * config.head_dim
        return Attention(
            layer=layer,
            kind=config.layers[layer],
            heads=heads,
            head_dim=config.head_dim,
            scale=config.attention_scale,
            softcap=config.attention_softcap,
            qkv=self._column_parallel(
                [
                    (f"{name}.q_proj", q_items, q_rows),
                    (f"{name}.k_proj", kv_items, kv_rows),
                    (f"{name}.v_proj", kv_items, kv_rows),
                ],
                fused=f"{name}.qkv_proj",
                bias=config.qkv_bias,
            ),
            qk_norm=self._qk_norm(name),
            output=self._row_parallel(f"{name}.o_proj", q_items, q_rows),
            output_bias=self._output_bias(f"{name}.o_proj", config.output_bias),
            parallel=self._parallel,
        )

    def _mlp(self, name: str) -> GatedMLP:
        config, columns = self._config, self._shard.mlp_columns
        return GatedMLP(
            activation=config.activation,
            gate_up=self._column_parallel(
                [
                    (f"{name}.gate_proj", config.intermediate_size, columns),
                    (f"{name}.up_proj", config.intermediate_size, columns),
                ],
                fused=f"{name}.gate_up_proj",
                bias=config.mlp_bias,
            ),
            down=self._row_parallel(f"{name}.down_proj", config.intermediate_size, columns),
            down_bias=self._output_bias(f"{name}.down_proj", config.mlp_bias),
            parallel=self._parallel,
        )

    def _experts(self, layer: str) -> Experts:
        config, experts = self._config, self._config.experts
        assert experts is not None, layer
        weights = read_experts(
            self._checkpoint,
            layer,
            experts,
            hidden_size=config.hidden_size,
            columns=self._shard.expert_columns,
            empty=self._empty,
        )
        return Experts(
            activation=config.activation,
            experts_per_token=experts.experts_per_token,
            normalize=experts.normalize,
            router=Linear(weights.router),
            gate_up=weights.gate_up,
            down=weights.down,
            parallel=self._parallel,
        )

    def _output_bias(self, name: str, present: bool) -> torch.Tensor | None:
        return self._vector(f"{name}.bias", self._config.hidden_size) if present else None


def _borrowed(count: int, dtype: torch.dtype) -> torch.Tensor:
    """Memory that goes back to the system as soon as it is let go; malloc keeps a block of less than 32 MiB."""
    return torch.frombuffer(mmap.mmap(-1, count * dtype.itemsize), dtype=dtype)


def _items(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)


def _below_one_another(
    fused: str, parts: list[tuple[str, int, range]]
) -> list[tuple[str, int, range]]:
    """The same rows, where one matrix holds all parts."""
    total, start, moved = sum(all_rows for _, all_rows, _ in parts), 0, []
    for _, all_rows, rows in parts:
        moved.append((fused, total, range(start + rows.start, start + rows.stop)))
        start += all_rows
    return moved
