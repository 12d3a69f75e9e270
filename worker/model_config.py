"""What kind of model a folder holds: sizes and features out of config.json and generation_config.json.

Owns the list of features that rowcast computes; whatever would change a token and is not on it is refused here, by
name, because a silently ignored feature gives plausible wrong text. Reads no weights and needs no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .architectures import ARCHITECTURES, QKNorm, Windows
from .config_reader import ConfigReader, read_json, short
from .expert_config import ExpertConfig, read_expert_config
from .layer_kinds import LayerKind, read_layer_kinds
from .quantization import refuse_quantized

TORCH_DTYPES = ("float32", "bfloat16", "float16")
ACTIVATIONS = ("silu", "gelu_pytorch_tanh")

# Keys of config.json that change what a decoder computes, and the values under which they change nothing. An
# architecture that reads a key has it in its `computes`.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
    "attention_bias": (None, False),
    "attention_chunk_size": (None, 0),
    "attention_multiplier": (None,),
    "attn_logit_softcapping": (None,),
    "clip_qkv": (None,),
    "compression_config": (None,),
    "embedding_multiplier": (None, 1, 1.0),
    "final_logit_softcapping": (None,),
    "logits_scaling": (None, 1, 1.0),
    "mlp_bias": (None, False),
    "no_rope_layer_interval": (None, 0),
    "no_rope_layers": (None,),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "qk_layernorm": (None, False),
    "quantization_config": (None,),
    "query_pre_attn_scalar": (None,),
    "residual_multiplier": (None, 1, 1.0),
    "rope_interleaved": (None, False),
    "rope_local_base_freq": (None,),
    "sliding_window_pattern": (None, 4),  # OLMo 3's, which its class does not read
    "use_bidirectional_attention": (None, False),
    "use_parallel_residual": (None, False),
    "use_qk_norm": (None, False),
    "use_qkv_bias": (None, False),
    "use_sliding_window": (None, False),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder's sizes and switches: all that the rest of the worker knows of an architecture.

    Units: every size counts items of the whole model, not of a rank. max_position_embeddings is tokens.
    layers: what sets each layer's attention apart.
    torch_dtype: the checkpoint's, one of TORCH_DTYPES.
    eos_token_ids: every id that ends a request, possibly none.
    activation: the MLP's, one of ACTIVATIONS.
    attention_scale: what q . k is multiplied by.
    attention_softcap, logits_softcap: c * tanh(x / c) of the scores, of the logits; 0 is off.
    embedding_scale: what embeddings are multiplied by; round_embedding_scale: rounded to the model's dtype first.
    residual_scale: what attention's and MLP's results are multiplied by before they are added.
    logits_divisor: what logits are divided by.
    parallel_residual: attention and MLP see the same input, and both are added at once.
    experts: what some layers have in place of the MLP, if any.
    qk_norm, pre_norms, post_norms, layer_norms, offset_norms, wide_norms, fused_projections: as in `Architecture`.
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
    norm_eps: float
    attention_scale: float
    tie_word_embeddings: bool
    torch_dtype: str
    eos_token_ids: tuple[int, ...]
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    activation: str = "silu"
    embedding_scale: float = 1.0
    round_embedding_scale: bool = False
    residual_scale: float = 1.0
    attention_softcap: float = 0.0
    logits_softcap: float = 0.0
    logits_divisor: float = 1.0
    parallel_residual: bool = False
    qk_norm: QKNorm = QKNorm.NONE
    pre_norms: bool = True
    post_norms: bool = False
    layer_norms: bool = False
    offset_norms: bool = False
    wide_norms: bool = False
    fused_projections: bool = False
    experts: ExpertConfig | None = None

    @property
    def num_layers(self) -> int:
        return len(self.layers)

    @property
    def longest_model_len(self) -> int:
        """Tokens up to which the model may be used: some RoPEs stretch beyond max_position_embeddings."""
        said = self.max_position_embeddings
        return min((kind.rope.reach(said) for kind in self.layers if kind.rope), default=said)

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
        refuse_quantized(path, values)
        for key, neutral in NEUTRAL_VALUES.items():
            if key not in architecture.computes:
                reader.refuse_unless(key, neutral)
        if architecture.windows is Windows.NONE:
            reader.refuse_unless("sliding_window", (None,))
        if architecture.gelu_means_tanh and values.get(architecture.activation_key) == "gelu":
            values[architecture.activation_key] = "gelu_pytorch_tanh"
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
        attention_bias = reader.flag("attention_bias")
        scale = head_dim**-0.5
        if "query_pre_attn_scalar" in architecture.computes:
            scale = reader.real("query_pre_attn_scalar") ** -0.5
        elif "attention_multiplier" in architecture.computes:
            scale = reader.real("attention_multiplier")
        layers = read_layer_kinds(reader, architecture, head_dim)
        rules = architecture.experts
        return cls(
            architecture=name,
            layers=layers,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            intermediate_size=reader.size("intermediate_size"),
            vocab_size=vocab_size,
            max_position_embeddings=reader.size("max_position_embeddings"),
            norm_eps=(
                reader.real("layer_norm_eps", 1e-5)
                if architecture.layer_norms
                else reader.real("rms_norm_eps", 1e-6)
            ),
            attention_scale=scale,
            tie_word_embeddings=reader.flag("tie_word_embeddings"),
            torch_dtype=_torch_dtype(path, values),
            eos_token_ids=_eos_token_ids(
                {generation_path: generation, path: values}, vocab_size=vocab_size
            ),
            qkv_bias=architecture.qkv_bias or attention_bias or reader.flag("use_qkv_bias"),
            output_bias=attention_bias,
            mlp_bias=reader.flag("mlp_bias"),
            activation=values[architecture.activation_key],
            embedding_scale=(
                hidden_size**0.5
                if architecture.scaled_embeddings
                else reader.real("embedding_multiplier", 1.0)
            ),
            round_embedding_scale=architecture.scaled_embeddings,
            residual_scale=reader.real("residual_multiplier", 1.0),
            attention_softcap=_softcap(reader, "attn_logit_softcapping"),
            logits_softcap=_softcap(reader, "final_logit_softcapping"),
            logits_divisor=reader.real("logits_scaling", 1.0),
            parallel_residual=reader.flag("use_parallel_residual"),
            qk_norm=QKNorm.EACH_HEAD if reader.flag("qk_layernorm") else architecture.qk_norm,
            pre_norms=architecture.pre_norms,
            post_norms=architecture.post_norms,
            layer_norms=architecture.layer_norms,
            offset_norms=architecture.offset_norms,
            wide_norms=architecture.wide_norms,
            fused_projections=architecture.fused_projections,
            experts=None if rules is None else read_expert_config(reader, rules, len(layers)),
        )


def _softcap(reader: ConfigReader, key: str) -> float:
    return 0.0 if reader.values.get(key) is None else reader.real(key)


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
