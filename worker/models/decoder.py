"""The one decoder of all architectures, built from a config's switches and this rank's shard of a checkpoint.

Owns which tensor goes where and the order of the layers. The arithmetic is in `layers/`, the split in `sharding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch

from ..backend import Backend
from ..input_batch import InputBatch
from ..kv_cache import KVCache
from ..layers.attention import Attention
from ..layers.embedding import VocabEmbedding
from ..layers.linear import Linear
from ..layers.mlp import GatedMLP
from ..layers.norm import RMSNorm
from ..layers.rotary import RotaryEmbedding
from ..layers.step_context import StepContext
from ..model_config import ModelConfig
from ..parallel import TensorParallelGroup
from ..sharding import Shard, shard_of_rank
from .weights import Checkpoint

Progress = Callable[[float], None]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class DecoderLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)); sandwich norms stand between each result and its sum."""

    def __init__(
        self,
        *,
        attention_norm: RMSNorm,
        attention: Attention,
        attention_out_norm: RMSNorm | None,
        mlp_norm: RMSNorm,
        mlp: GatedMLP,
        mlp_out_norm: RMSNorm | None,
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._attention_out_norm = attention_out_norm
        self._mlp_norm = mlp_norm
        self._mlp = mlp
        self._mlp_out_norm = mlp_out_norm

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> None:
        """Shapes: hidden [num_tokens, hidden_size], changed in place."""
        attended = self._attention(self._attention_norm(hidden), step)
        if self._attention_out_norm is not None:
            attended = self._attention_out_norm(attended)
        hidden.add_(attended)
        fed = self._mlp(self._mlp_norm(hidden))
        if self._mlp_out_norm is not None:
            fed = self._mlp_out_norm(fed)
        hidden.add_(fed)


class Decoder:
    """One rank's part of the model; ranks call it together. rotary: RoPE base -> its table."""

    def __init__(
        self,
        *,
        embedding: VocabEmbedding,
        rotary: Mapping[float, RotaryEmbedding],
        layers: Iterable[DecoderLayer],
        norm: RMSNorm,
        head: Linear,
    ) -> None:
        self._embedding = embedding
        self._rotary = rotary
        self._layers = tuple(layers)
        self._norm = norm
        self._head = head

    def forward(self, batch: InputBatch, kv_cache: KVCache, backend: Backend) -> torch.Tensor:
        """Run every token of a step; its keys and values are in the cache afterwards.

        Shapes: returns hidden states [num_tokens, hidden_size] before the last norm, the same on every rank.
        """
        rotations = {theta: rotary.at(batch.positions) for theta, rotary in self._rotary.items()}
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
        return self._head(self._norm(hidden.index_select(0, logits_indices)))


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
            theta: RotaryEmbedding(
                config.head_dim,
                max_position=max_model_len,
                theta=theta,
                dtype=dtype,
                device=device,
            )
            for theta in {kind.rope_theta for kind in config.layers}
        },
        layers=layers,
        norm=loader.norm("model.norm.weight"),
        head=Linear(head),
    )
    checkpoint.refuse_unread(ignored=_changes_nothing)
    tell(steps)
    return decoder


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

    def norm(self, name: str) -> RMSNorm:
        weight = self._norm_weight(name, self._config.hidden_size)
        return RMSNorm(weight, self._config.rms_norm_eps)

    def _norm_weight(self, name: str, size: int) -> torch.Tensor:
        """Offsets are rounded to the model's dtype and then added to 1 in float32, as transformers does."""
        weight = self._vector(name, size)
        return weight.float().add_(1.0) if self._config.offset_norms else weight

    def _qk_norm(self, attention: str) -> RMSNorm | None:
        """One weight a head for q and k together: a single pass over both."""
        config, heads = self._config, self._shard.heads
        if not config.head_norms:
            return None
        query, key = (
            self._norm_weight(f"{attention}.{name}.weight", config.head_dim)
            for name in ("q_norm", "k_norm")
        )
        weights = [query] * len(heads.q_heads) + [key] * len(heads.kv_heads)
        return RMSNorm(torch.stack(weights), config.rms_norm_eps)

    def vocab_rows(self, name: str) -> torch.Tensor:
        config, rows = self._config, self._shard.vocab_rows
        out = self._empty(len(rows), config.hidden_size)
        self._checkpoint.read(name, (config.vocab_size, config.hidden_size), rows=rows, out=out)
        return out

    def _column_parallel(self, parts: list[tuple[str, int, range]], *, bias: bool) -> Linear:
        """Stack row ranges of several matrices into one; each part is (name, all its rows, this rank's rows)."""
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
        config, shard, prefix = self._config, self._shard, f"model.layers.{layer}"
        q_items, kv_items = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        )
        q_rows = _items(shard.heads.q_heads, config.head_dim)
        kv_rows = _items(shard.heads.kv_heads, config.head_dim)
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        sandwich = config.sandwich_norms

        def norm(name: str) -> RMSNorm:
            return self.norm(f"{prefix}.{name}.weight")

        return DecoderLayer(
            attention_norm=norm("input_layernorm"),
            attention=Attention(
                layer=layer,
                kind=config.layers[layer],
                heads=shard.heads,
                head_dim=config.head_dim,
                scale=config.attention_scale,
                qkv=self._column_parallel(
                    [
                        (f"{attention}.q_proj", q_items, q_rows),
                        (f"{attention}.k_proj", kv_items, kv_rows),
                        (f"{attention}.v_proj", kv_items, kv_rows),
                    ],
                    bias=config.attention_bias,
                ),
                qk_norm=self._qk_norm(attention),
                output=self._row_parallel(f"{attention}.o_proj", q_items, q_rows),
                output_bias=self._output_bias(f"{attention}.o_proj", config.attention_bias),
                parallel=self._parallel,
            ),
            # One name means two places: without sandwich norms post_attention_layernorm is that of the MLP's input.
            attention_out_norm=norm("post_attention_layernorm") if sandwich else None,
            mlp_norm=norm("pre_feedforward_layernorm" if sandwich else "post_attention_layernorm"),
            mlp=GatedMLP(
                activation=config.activation,
                gate_up=self._column_parallel(
                    [
                        (f"{mlp}.gate_proj", config.intermediate_size, shard.mlp_columns),
                        (f"{mlp}.up_proj", config.intermediate_size, shard.mlp_columns),
                    ],
                    bias=config.mlp_bias,
                ),
                down=self._row_parallel(
                    f"{mlp}.down_proj", config.intermediate_size, shard.mlp_columns
                ),
                down_bias=self._output_bias(f"{mlp}.down_proj", config.mlp_bias),
                parallel=self._parallel,
            ),
            mlp_out_norm=norm("post_feedforward_layernorm") if sandwich else None,
        )

    def _output_bias(self, name: str, present: bool) -> torch.Tensor | None:
        return self._vector(f"{name}.bias", self._config.hidden_size) if present else None


def _items(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
