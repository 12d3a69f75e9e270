"""What kind of model a folder holds: sizes and features out of config.json and generation_config.json.

Owns the list of features that rowcast computes; whatever would change a token and is not on it is refused here, by
name, because a silently ignored feature gives plausible wrong text. Reads no weights and needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES
from .config_reader import ConfigReader, read_json, short
from .layer_kinds import LayerKind, read_layer_kinds

TORCH_DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

# Keys of config.json that change what a decoder computes, and the values under which they change nothing here.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None, 0),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layer_interval": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "use_bidirectional_attention": (None, False),
    "use_qk_norm": (None, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder's sizes and switches: all that the rest of the worker knows of an architecture.

    Units: every size counts items of the whole model, not of a rank. max_position_embeddings is tokens.
    layers: what sets each layer's attention apart. torch_dtype: the checkpoint's, one of TORCH_DTYPES. eos_token_ids:
    every id that ends a request, possibly none. activation: the MLP's, one of ACTIVATIONS. attention_scale: what
    q . k is multiplied by. head_norms, sandwich_norms, offset_norms: as in `Architecture`.
    """

    architecture: str
    layers: tuple[LayerKind, ...]
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    attention_scale: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    activation: str = "silu"
    embedding_scale: float = 1.0
    head_norms: bool = False
    sandwich_norms: bool = False
    offset_norms: bool = False

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read a Hugging Face folder's config.json, and generation_config.json if it is there.

        Raises: ValueError, one sentence: what file, what in it, what rowcast supports.
        """
        path = Path(folder) / "config.json"
        said = read_json(path)
        generation_path = Path(folder) / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        name = _architecture(path, said)
        architecture = ARCHITECTURES[name]
        values = {**architecture.defaults, **said}
        reader = ConfigReader(path, values)
        for key, neutral in _NEUTRAL_VALUES.items():
            reader.refuse_unless(key, neutral)
        if "sliding_attention" not in architecture.thetas:
            reader.refuse_unless("sliding_window", (None,))
        reader.refuse_unless(architecture.activation_key, ACTIVATIONS)
        hidden_size = reader.size("hidden_size")
        num_heads = reader.size("num_attention_heads")
        num_kv_heads = reader.size("num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"{path}: num_attention_heads {num_heads} must be a multiple of num_key_value_heads {num_kv_heads}"
            )
        if values.get("head_dim") is None and hidden_size % num_heads:
            raise ValueError(
                f"{path}: head_dim is missing and hidden_size {hidden_size} is no multiple of "
                f"num_attention_heads {num_heads}"
            )
        head_dim = reader.size("head_dim", hidden_size // num_heads)
        if head_dim % 2:
            raise ValueError(f"{path}: head_dim must be even for rotary positions, got {head_dim}")
        vocab_size = reader.size("vocab_size")
        return cls(
            architecture=name,
            layers=read_layer_kinds(reader, architecture),
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=reader.size("intermediate_size"),
            vocab_size=vocab_size,
            max_position_embeddings=reader.size("max_position_embeddings"),
            rms_norm_eps=reader.real("rms_norm_eps", 1e-6),
            attention_scale=reader.real("query_pre_attn_scalar", head_dim) ** -0.5,
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=reader.flag("attention_bias"),
            mlp_bias=reader.flag("mlp_bias"),
            torch_dtype=_torch_dtype(path, values),
            eos_token_ids=_eos_token_ids(
                {generation_path: generation, path: values}, vocab_size=vocab_size
            ),
            activation=values[architecture.activation_key],
            embedding_scale=hidden_size**0.5 if architecture.scaled_embeddings else 1.0,
            head_norms=architecture.head_norms,
            sandwich_norms=architecture.sandwich_norms,
            offset_norms=architecture.offset_norms,
        )


def _architecture(path: Path, values: Mapping[str, Any]) -> str:
    named = values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or str(named[0]) not in ARCHITECTURES:
        got = ", ".join(map(str, named)) if isinstance(named, list) and named else "nothing"
        raise ValueError(
            f"{path}: architecture {got} is not supported yet; rowcast runs {', '.join(ARCHITECTURES)}"
        )
    return named[0]


def _torch_dtype(path: Path, values: Mapping[str, Any]) -> str:
    named = values.get("dtype") or values.get("torch_dtype") or "float32"
    if named not in TORCH_DTYPES:
        raise ValueError(
            f"{path}: dtype must be one of {', '.join(TORCH_DTYPES)}, got {short(named)}"
        )
    return named


def _eos_token_ids(
    values_of_path: Mapping[Path, Mapping[str, Any]], *, vocab_size: int
) -> tuple[int, ...]:
    """Every id that either file calls end of sequence, each once; a chat model's second is often in one alone."""
    ids: dict[int, None] = {}
    for path, values in values_of_path.items():
        named = values.get("eos_token_id")
        if named is None:
            continue
        for token in named if isinstance(named, list) else [named]:
            if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
                raise ValueError(
                    f"{path}: eos_token_id must name ids in [0, {vocab_size}), got {short(token)}"
                )
            ids[token] = None
    return tuple(ids)
