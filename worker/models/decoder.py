"""The one decoder of all architectures, built from a config's switches and this rank's shard of a checkpoint.

Owns which tensor goes where and the order of the layers. The arithmetic is in `layers/`, the split in `sharding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch

from ..architectures import QKNorm
from ..backend import Backend
from ..input_batch import InputBatch
from ..kv_cache import KVCache
from ..layers.attention import Attention
from ..layers.embedding import VocabEmbedding
from ..layers.experts import Experts
from ..layers.linear import Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import AllHeadsRMSNorm, LayerNorm, Norm, RMSNorm
from ..layers.rope_scaling import frequencies
from ..layers.rotary import RotaryEmbedding
from ..layers.step_context import StepContext
from ..model_config import ModelConfig
from ..parallel import TensorParallelGroup
from ..rope import Rope
from ..sharding import Shard, shard_of_rank
from .expert_weights import read_experts
from .weights import Checkpoint

Progress = Callable[[float], None]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); what an architecture lacks of its norms is None.

    Beside the norms of what goes in there may be some of what comes out, before the sum. residual_scale multiplies what
    is added. parallel: the MLP sees what attention sees, and both are added at once.
    """

    def __init__(
        self,
        *,
        attention_norm: Norm | None,
        attention: Attention,
        attention_out_norm: Norm | None,
        mlp_norm: Norm | None,
        mlp: Callable[[torch.Tensor, StepContext], torch.Tensor],
        mlp_out_norm: Norm | None,
        residual_scale: float,
        parallel: bool,
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._attention_out_norm = attention_out_norm
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._mlp_out_norm = mlp_out_norm
        self._residual_scale = residual_scale
        self._parallel = parallel

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> None:
        """Shapes: hidden [num_tokens, hidden_size], changed in place."""
        x = _normed(self._attention_norm, hidden)
        attended = self._attention(x, step)
        if self._parallel:
            fed = self._mlp(x, step)
            self._add(hidden, _normed(self._attention_out_norm, attended))
        else:
            self._add(hidden, _normed(self._attention_out_norm, attended))
            fed = self._mlp(_normed(self._mlp_norm, hidden), step)
        self._add(hidden, _normed(self._mlp_out_norm, fed))

    def _add(self, hidden: torch.Tensor, part: torch.Tensor) -> None:
        """Rounds the scaled part before it is added, as transformers does."""
        hidden.add_(part if self._residual_scale == 1.0 else part.mul_(self._residual_scale))


def _normed(norm: Norm | None, x: torch.Tensor) -> torch.Tensor:
    return x if norm is None else norm(x)


class Decoder:
    """One rank's part of the model; ranks call it together.

    rotary: RoPE -> its table. logits_divisor, logits_softcap: as in `ModelConfig`.
    """

    def __init__(
        self,
        *,
        embedding: VocabEmbedding,
        rotary: Mapping[Rope, RotaryEmbedding],
        layers: Iterable[DecoderLayer],
        norm: Norm,
        head: Linear,
        logits_divisor: float = 1.0,
        logits_softcap: float = 0.0,
    ) -> None:
        self._embedding = embedding
        self._rotary = rotary
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head
        self._logits_divisor = logits_divisor
        self._logits_softcap = logits_softcap

    def forward(self, batch: InputBatch, kv_cache: KVCache, backend: Backend) -> torch.Tensor:
        """Run every token of a step; its keys and values are in the cache afterwards.

        Shapes: returns hidden states [num_tokens, hidden_size] before the last norm, the same on every rank.
        """
        rotations = {rope: rotary.at(batch.positions) for rope, rotary in self._rotary.items()}
        step = StepContext(batch=batch, kv_cache=kv_cache, backend=backend, rotations=rotations)
        hidden = self._embedding(batch.input_ids)
        for layer in self._layers:
            layer(hidden, step)
        return hidden

    def logits(self, hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        """Score this rank's part of the vocabulary, for the tokens that sample alone.

        Shapes: hidden as `forward` returns it; logits_indices [num_sampling] int64 flat tokens; returns
            [num_sampling, vocabulary rows of this rank].
        """
        logits = self._head(self._norm(hidden.index_select(0, logits_indices)))
        if self._logits_divisor != 1.0:
            logits.div_(self._logits_divisor)
        if self._logits_softcap:
            logits.div_(self._logits_softcap).tanh_().mul_(self._logits_softcap)
        return logits


def load_decoder(
    config: ModelConfig,
    checkpoint: Checkpoint,
    *,
    parallel: TensorParallelGroup,
    max_model_len: int,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
) -> Decoder:
    """Read this rank's shard out of a checkpoint, layer by layer, and build the decoder around it.

    progress is called with the share done, from above 0 to 1.
    Raises: ValueError naming file and tensor for whatever does not fit the config.
    """
    shard = shard_of_rank(config, parallel.rank, parallel.world_size)
    loader = _Loader(config, checkpoint, shard, parallel, dtype, device)
    steps = config.num_layers + 2  # the embedding and the head each count as a layer

    def tell(done: int) -> None:
        if progress is not None:
            progress(done / steps)

    embedding = loader.vocab_rows(_EMBEDDING)
    tell(1)
    layers = []
    for layer in range(config.num_layers):
        layers.append(loader.layer(layer))
        tell(layer + 2)
    head = embedding if config.tie_word_embeddings else loader.vocab_rows(_HEAD)
    decoder = Decoder(
        embedding=VocabEmbedding(
            embedding, shard.vocab_rows, parallel, scale=config.embedding_scale
        ),
        rotary={
            rope: _rotary(rope, config.head_dim, max_model_len, dtype, device)
            for rope in {kind.rope for kind in config.layers}
            if rope is not None
        },
        layers=layers,
        norm=loader.norm("model.norm"),
        head=Linear(head),
        logits_divisor=config.logits_divisor,
        logits_softcap=config.logits_softcap,
    )
    checkpoint.refuse_unread(ignored=_changes_nothing)
    tell(steps)
    return decoder


def _rotary(
    rope: Rope, head_dim: int, max_model_len: int, dtype: torch.dtype, device: torch.device
) -> RotaryEmbedding:
    turns, factor = frequencies(rope, head_dim, max_model_len=max_model_len)
    return RotaryEmbedding(
        turns, factor=factor, max_position=max_model_len, dtype=dtype, device=device
    )


def _changes_nothing(name: str) -> bool:
    """Tensors that old checkpoints carry and nobody reads: stored frequencies, and a head that is tied anyway."""
    return name == _HEAD or re.search(r"\.rotary_emb\.inv_freq$", name) is not None


class _Loader:
    """Fills this rank's fused matrices from the checkpoint's separate ones."""

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

    def vocab_rows(self, name: str) -> torch.Tensor:
        config, rows = self._config, self._shard.vocab_rows
        out = self._empty(len(rows), config.hidden_size)
        self._checkpoint.read(name, (config.vocab_size, config.hidden_size), rows=rows, out=out)
        return out

    def _column_parallel(
        self, parts: list[tuple[str, int, range]], *, fused: str, bias: bool
    ) -> Linear:
        """Stack row ranges of several matrices into one; each part is (name, all its rows, this rank's rows).

        fused: the name of the one matrix in which a checkpoint of fused_projections has them, one below the other.
        """
        if self._config.fused_projections:
            parts = _below_one_another(fused, parts)
        size = sum(len(rows) for _, _, rows in parts)
        weight = self._empty(size, self._config.hidden_size)
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
        weight = self._empty(self._config.hidden_size, len(columns))
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
