"""The one decoder of all architectures, built from a config's switches and this rank's shard of a checkpoint.

Owns the order of the layers, and what comes before the first and after the last.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

import torch

from ..backend import Backend
from ..input_batch import InputBatch
from ..kv_cache import KVCache
from ..layers.decoder_layer import DecoderLayer
from ..layers.embedding import VocabEmbedding
from ..layers.linear import Linear
from ..layers.norm import Norm
from ..layers.rope_scaling import frequencies
from ..layers.rotary import RotaryEmbedding
from ..layers.step_context import StepContext
from ..model_config import ModelConfig
from ..parallel import TensorParallelGroup
from ..rope import Rope
from ..sharding import shard_of_rank
from .layer_loader import LayerLoader
from .weights import Checkpoint

Progress = Callable[[float], None]

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


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
    loader = LayerLoader(config, checkpoint, shard, parallel, dtype, device)
    steps = config.num_layers + 2  # the embedding and the head each count as a layer

    def tell(done: int) -> None:
        if progress is not None:
            progress(done / steps)

    embedding, head = loader.vocabulary(_EMBEDDING, _HEAD)
    tell(1)
    layers = []
    for layer in range(config.num_layers):
        layers.append(loader.layer(layer))
        tell(layer + 2)
    decoder = Decoder(
        embedding=VocabEmbedding(
            embedding,
            shard.vocab_rows,
            parallel,
            dtype=dtype,
            scale=config.embedding_scale,
            round_scale=config.round_embedding_scale,
        ),
        rotary={
            rope: _rotary(rope, config.head_dim, max_model_len, dtype, device)
            for rope in {kind.rope for kind in config.layers}
            if rope is not None
        },
        layers=layers,
        norm=loader.norm("model.norm"),
        head=head,
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
    """Tensors that old checkpoints carry and nobody reads: stored frequencies."""
    return re.search(r"\.rotary_emb\.inv_freq$", name) is not None
