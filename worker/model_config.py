"""What kind of model a folder holds: sizes and features out of config.json and generation_config.json.

Owns the list of features that rowcast computes; whatever would change a token and is not on it is refused here, by
name, because a silently ignored feature gives plausible wrong text. Reads no weights and needs no torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM",)
TORCH_DTYPES = ("float32", "bfloat16", "float16")

# Keys of config.json that change what a decoder computes, and the values under which they change nothing here.
_NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_chunk_size": (None, 0),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "hidden_act": ("silu",),
    "logits_scaling": (None, 1, 1.0),
    "no_rope_layer_interval": (None, 0),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "partial_rotary_factor": (None, 1, 1.0),
    "quantization_config": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "sliding_window": (None,),
    "use_qk_norm": (None, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A Llama-family decoder's sizes and switches.

    Units: every size counts items of the whole model, not of a rank. max_position_embeddings is tokens.
    torch_dtype: the checkpoint's, one of TORCH_DTYPES. eos_token_ids: every id that ends a request, possibly none.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]

    @classmethod
    def from_folder(cls, folder: str | Path) -> ModelConfig:
        """Read a Hugging Face folder's config.json, and generation_config.json if it is there.

        Raises: ValueError, one sentence: what file, what in it, what rowcast supports.
        """
        path = Path(folder) / "config.json"
        values = _read_json(path)
        generation_path = Path(folder) / "generation_config.json"
        generation = _read_json(generation_path) if generation_path.exists() else {}
        reader = _Reader(path, values)
        architecture = _architecture(path, values)
        for key, neutral in _NEUTRAL_VALUES.items():
            if key in values and not _is_one_of(values[key], neutral):
                raise ValueError(
                    f"{path}: {key} = {_short(values[key])} is not supported yet by rowcast"
                )
        _refuse_layer_kinds(path, values)
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
            architecture=architecture,
            hidden_size=hidden_size,
            num_layers=reader.size("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=reader.size("intermediate_size"),
            vocab_size=vocab_size,
            max_position_embeddings=reader.size("max_position_embeddings"),
            rms_norm_eps=reader.real("rms_norm_eps", 1e-6),
            rope_theta=_rope_theta(reader),
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            attention_bias=reader.flag("attention_bias"),
            mlp_bias=reader.flag("mlp_bias"),
            torch_dtype=_torch_dtype(path, values),
            eos_token_ids=_eos_token_ids(
                {generation_path: generation, path: values}, vocab_size=vocab_size
            ),
        )


class _Reader:
    """Typed look-ups in one JSON object; None counts as missing."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        self.path = path
        self.values = values

    def size(self, key: str, default: int | None = None) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            got = "nothing" if value is None else _short(value)
            raise ValueError(f"{self.path}: {key} must be an integer, at least 1, got {got}")
        return value

    def real(self, key: str, default: float) -> float:
        value = self.values.get(key)
        if value is None:
            return default
        if (
            not isinstance(value, int | float)
            or isinstance(value, bool)
            or not 0 < value < math.inf
        ):
            raise ValueError(f"{self.path}: {key} must be a number above 0, got {_short(value)}")
        return float(value)

    def flag(self, key: str) -> bool:
        value = self.values.get(key)
        if value is None:
            return False
        if not isinstance(value, bool):
            raise ValueError(f"{self.path}: {key} must be true or false, got {_short(value)}")
        return value


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Membership without Python's 0 == False: a number is not a switch."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
    )


def _architecture(path: Path, values: Mapping[str, Any]) -> str:
    named = values.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or named[0] not in ARCHITECTURES:
        got = ", ".join(map(str, named)) if isinstance(named, list) and named else "nothing"
        raise ValueError(
            f"{path}: architecture {got} is not supported yet; rowcast runs {', '.join(ARCHITECTURES)}"
        )
    return named[0]


def _refuse_layer_kinds(path: Path, values: Mapping[str, Any]) -> None:
    kinds = values.get("layer_types")
    if kinds is None:
        return
    strange = (
        [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    )
    if strange:
        raise ValueError(
            f"{path}: layer_types has {_short(strange[0])}; rowcast supports full_attention layers so far"
        )


def _rope_theta(reader: _Reader) -> float:
    """The base of default RoPE. Older configs say rope_theta and rope_scaling, newer ones rope_parameters."""
    theta = reader.real("rope_theta", 10000.0)
    for key in ("rope_scaling", "rope_parameters"):
        rope = reader.values.get(key)
        if rope is None:
            continue
        if not isinstance(rope, dict):
            raise ValueError(f"{reader.path}: {key} must be an object, got {_short(rope)}")
        others = sorted(set(rope) - {"rope_theta", "partial_rotary_factor"})
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise ValueError(
                f"{reader.path}: {key} asks for RoPE type {_short(kind)}; rowcast supports default so far"
            )
        if others and not {"rope_type", "type"} & rope.keys():
            # Without a type a factor, or one object a layer kind, would be passed over in silence.
            raise ValueError(
                f"{reader.path}: {key} has {others[0]} and no rope_type; rowcast supports default RoPE so far"
            )
        if rope.get("partial_rotary_factor") not in (None, 1, 1.0):
            raise ValueError(
                f"{reader.path}: partial_rotary_factor = {_short(rope['partial_rotary_factor'])} is not "
                "supported yet by rowcast"
            )
        theta = _Reader(reader.path, rope).real("rope_theta", theta)
    return theta


def _torch_dtype(path: Path, values: Mapping[str, Any]) -> str:
    named = values.get("dtype") or values.get("torch_dtype") or "float32"
    if named not in TORCH_DTYPES:
        raise ValueError(
            f"{path}: dtype must be one of {', '.join(TORCH_DTYPES)}, got {_short(named)}"
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
                    f"{path}: eos_token_id must name ids in [0, {vocab_size}), got {_short(token)}"
                )
            ids[token] = None
    return tuple(ids)
