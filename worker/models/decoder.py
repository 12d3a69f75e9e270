"""The Llama family's decoder, built from a config and this rank's shard of a checkpoint.

Owns which tensor goes where and the order of the layers. The arithmetic is in `layers/`, the split in `sharding.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

import torch

from ..backend import Backend
from ..input_batch import InputBatch
from ..kv_cache import KVCache
from ..layers.attention import Attention
from ..layers.embedding import VocabEmbedding
from ..layers.linear import Linear
from ..layers.mlp import SwiGLU
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
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(
        self,
        attention_norm: RMSNorm,
        attention: Attention,
        mlp_norm: RMSNorm,
        mlp: SwiGLU,
    ) -> None:
        self._attention_norm = attention_norm
        self._attention = attention
        self._mlp_norm = mlp_norm
        self._mlp = mlp

    def __call__(self, hidden: torch.Tensor, step: StepContext) -> None:
        """Shapes: hidden [num_tokens, hidden_size], changed in place."""
        hidden.add_(self._attention(self._attention_norm(hidden), step))
        hidden.add_(self._mlp(self._mlp_norm(hidden)))


class Decoder:
    """One rank's part of the model; ranks call it together."""

    def __init__(
        self,
        *,
        embedding: VocabEmbedding,
        rotary: RotaryEmbedding,
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
        cos, sin = self._rotary.at(batch.positions)
        step = StepContext(batch=batch, kv_cache=kv_cache, backend=backend, cos=cos, sin=sin)
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
        embedding=VocabEmbedding(embedding, shard.vocab_rows, parallel),
        rotary=RotaryEmbedding(
            config.head_dim,
            max_position=max_model_len,
            theta=config.rope_theta,
            dtype=dtype,
            device=device,
        ),
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
        return RMSNorm(self._vector(name, self._config.hidden_size), self._config.rms_norm_eps)

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
        return DecoderLayer(
            self.norm(f"{prefix}.input_layernorm.weight"),
            Attention(
                layer=layer,
                heads=shard.heads,
                head_dim=config.head_dim,
                qkv=self._column_parallel(
                    [
                        (f"{attention}.q_proj", q_items, q_rows),
                        (f"{attention}.k_proj", kv_items, kv_rows),
                        (f"{attention}.v_proj", kv_items, kv_rows),
                    ],
                    bias=config.attention_bias,
                ),
                output=self._row_parallel(f"{attention}.o_proj", q_items, q_rows),
                output_bias=self._output_bias(f"{attention}.o_proj", config.attention_bias),
                parallel=self._parallel,
            ),
            self.norm(f"{prefix}.post_attention_layernorm.weight"),
            SwiGLU(
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
        )

    def _output_bias(self, name: str, present: bool) -> torch.Tensor | None:
        return self._vector(f"{name}.bias", self._config.hidden_size) if present else None


def _items(heads: range, head_dim: int) -> range:
    return range(heads.start * head_dim, heads.stop * head_dim)
