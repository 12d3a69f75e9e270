"""Turn one GGUF file of a Llama-family model into an ordinary Hugging Face folder.

Owns the map from GGUF's metadata and tensor names to `config.json`, `generation_config.json` and `model.safetensors`;
the tokenizer's files come from `convert_tokenizer.py`. Reads with the `gguf` package and NumPy alone: no torch (mapping
the 135M model takes seconds; transformers wants accelerate, half a minute and 1.6 GB, and then refuses to save the
result). Knows nothing of caches, locks or atomic renames: `model_cache.py` does.

Weights are saved as float32. A quantized value is `scale * code + offset` of two float16 numbers, which float32 holds
exactly but for the last bits, and bfloat16 or float16 would round away. It also is what a CPU computes in, so ranks map
the file and use it in place, and transformers and rowcast start from the same bits. The price is disk: 538 MB where
bfloat16 takes 269 MB. Whoever serves in half precision rounds once, at load.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from .convert_tokenizer import eos_token_ids, tokenizer_files
from .gguf_header import check_gguf_header
from .progress import Stage

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Stage | None = None) -> None:
    """Write the model in `gguf_path` to `out_dir` in Hugging Face's form.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and, when the
    model has one, chat_template.jinja; each file with mode 0644 and flushed to the disk. `out_dir` is made when it is
    missing. `progress` hears of the bytes of the weights. A call that fails or is interrupted may leave a part: callers
    who need all or nothing build in a temporary folder and rename.

    Raises: ValueError, one sentence, for a file that is not GGUF, is truncated, or holds another model than a
        plain Llama.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    reader = read_gguf(gguf_path)
    metadata = _Metadata(reader, gguf_path)
    config = _llama_config(reader, metadata)
    names = _hugging_face_names(reader, config, gguf_path)

    texts = tokenizer_files(metadata)
    texts["config.json"] = _json(config)
    texts["generation_config.json"] = _json(
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": eos_token_ids(metadata),
            "pad_token_id": config["pad_token_id"],
        }
    )

    out_dir.mkdir(parents=True, exist_ok=True)
    for file_name, text in texts.items():
        with open(out_dir / file_name, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            _settle(file)
    _write_safetensors(out_dir / "model.safetensors", reader, names, config, progress)


def read_gguf(path: Path) -> GGUFReader:
    """Open a GGUF file and check that every tensor it announces lies inside it.

    Raises: ValueError for a missing, foreign, damaged or truncated file.
    """
    check_gguf_header(path)
    truncated = f"{path} is truncated or damaged ({path.stat().st_size} bytes are there, {{}}); download it again"
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # All lengths are right, so a value is wrong: a key twice, no UTF-8, tensor data that is not there.
        raise ValueError(truncated.format("the reader stumbles in them")) from error
    end = max((int(t.data_offset + t.n_bytes) for t in reader.tensors), default=0)
    if end > path.stat().st_size:
        raise ValueError(truncated.format(f"its tensors need {end}"))
    return reader


class _Metadata:
    """The key-value part of a GGUF file, with a sentence for what is missing."""

    def __init__(self, reader: GGUFReader, path: Path):
        self._reader = reader
        self.path = path

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(
                f"{self.path} has no {key!r} in its metadata; it is not a whole Llama model"
            )
        return value


def _llama_config(reader: GGUFReader, metadata: _Metadata) -> dict[str, Any]:
    """The content of config.json, out of the `llama.*` metadata."""
    path = metadata.path
    architecture = metadata.require("general.architecture")
    if architecture != "llama":
        raise ValueError(
            f"{path} holds a {architecture!r} model; rowcast converts 'llama' models only: "
            "give the model's Hugging Face folder instead"
        )
    for key, what in (
        ("llama.expert_count", "mixture-of-experts layers"),
        ("llama.rope.scaling.type", "scaled rotary positions"),
    ):
        if metadata.get(key) not in (None, 0, "", "none"):
            raise ValueError(
                f"{path} has {what} ({key} = {metadata.get(key)!r}), which the conversion does not support; "
                "give the model's Hugging Face folder instead"
            )
    num_heads = _one_number(metadata, "llama.attention.head_count")
    num_kv_heads = _one_number(metadata, "llama.attention.head_count_kv", num_heads)
    hidden_size = _one_number(metadata, "llama.embedding_length")
    head_dim = _one_number(metadata, "llama.attention.key_length", hidden_size // max(num_heads, 1))
    value_dim = _one_number(metadata, "llama.attention.value_length", head_dim)
    rope_dim = _one_number(metadata, "llama.rope.dimension_count", head_dim)
    if not head_dim == value_dim == rope_dim or head_dim % 2 or not head_dim:
        raise ValueError(
            f"{path} has key, value and rotary dimensions {head_dim}, {value_dim} and {rope_dim}; "
            "the conversion supports one even number for all three"
        )
    if num_kv_heads < 1 or num_heads % num_kv_heads:
        raise ValueError(
            f"{path} has {num_heads} query heads and {num_kv_heads} KV heads; query heads must be a multiple"
        )
    tensor_names = {tensor.name for tensor in reader.tensors}
    tokens = metadata.require("tokenizer.ggml.tokens")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(tokens),
        "hidden_size": hidden_size,
        "intermediate_size": _one_number(metadata, "llama.feed_forward_length"),
        "num_hidden_layers": _one_number(metadata, "llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": _one_number(metadata, "llama.context_length"),
        "rms_norm_eps": _shortest(metadata.require("llama.attention.layer_norm_rms_epsilon")),
        "rope_theta": _shortest(metadata.get("llama.rope.freq_base", 10000.0)),
        "attention_bias": "blk.0.attn_q.bias" in tensor_names,
        "attention_dropout": 0.0,
        "mlp_bias": "blk.0.ffn_gate.bias" in tensor_names,
        "tie_word_embeddings": "output.weight" not in tensor_names,
        "initializer_range": 0.02,
        "pretraining_tp": 1,
        "use_cache": True,
        "dtype": "float32",
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": metadata.get("tokenizer.ggml.eos_token_id"),
        "pad_token_id": metadata.get("tokenizer.ggml.padding_token_id"),
    }


def _one_number(metadata: _Metadata, key: str, default: int | None = None) -> int:
    value = metadata.require(key) if default is None else metadata.get(key, default)
    if not isinstance(value, int):
        raise ValueError(
            f"{metadata.path} has {key} = {value!r}; the conversion supports one number for all layers"
        )
    return value


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: GGUF's 9.999999747378752e-06 is the model's 1e-05."""
    return float(str(np.float32(value)))


def _hugging_face_names(
    reader: GGUFReader, config: dict[str, Any], path: Path
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name -> (Hugging Face name, shape), checked to be exactly the tensors that the model needs."""
    # A damaged layer count can be four thousand million: no list of names for that.
    if config["num_hidden_layers"] > len(reader.tensors):
        raise ValueError(
            f"{path} announces {config['num_hidden_layers']} layers and holds {len(reader.tensors)} tensors; "
            "it may be one part of a split file: give the merged one"
        )
    expected = _expected_shapes(config)
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in reader.tensors:
        name = _TOP_LEVEL_NAMES.get(tensor.name)
        layer = _LAYER_TENSOR.fullmatch(tensor.name)
        if layer and layer[2] in _LAYER_NAMES:
            name = f"model.layers.{layer[1]}.{_LAYER_NAMES[layer[2]]}.{layer[3]}"
        if name is None or name not in expected:
            raise ValueError(
                f"{path} holds the tensor {tensor.name!r}, which a plain Llama model does not have; "
                "give the model's Hugging Face folder instead"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != expected[name]:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} has shape {shape}, the metadata says {expected[name]}"
            )
        names[tensor.name] = (name, shape)
    missing = sorted(expected.keys() - {name for name, _ in names.values()})
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of the model's {len(expected)} tensors (first {missing[0]!r}); "
            "it may be one part of a split file: give the merged one"
        )
    return names


def _expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    q_rows = config["num_attention_heads"] * config["head_dim"]
    kv_rows = config["num_key_value_heads"] * config["head_dim"]
    linear = {
        "self_attn.q_proj": (q_rows, hidden, config["attention_bias"]),
        "self_attn.k_proj": (kv_rows, hidden, config["attention_bias"]),
        "self_attn.v_proj": (kv_rows, hidden, config["attention_bias"]),
        "self_attn.o_proj": (hidden, q_rows, config["attention_bias"]),
        "mlp.gate_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.up_proj": (inner, hidden, config["mlp_bias"]),
        "mlp.down_proj": (hidden, inner, config["mlp_bias"]),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"model.layers.{layer}.{norm}.weight"] = (hidden,)
        for name, (rows, columns, has_bias) in linear.items():
            shapes[f"model.layers.{layer}.{name}.weight"] = (rows, columns)
            if has_bias:
                shapes[f"model.layers.{layer}.{name}.bias"] = (rows,)
    return shapes


def unpermute(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undo the row order that GGUF's llama models give the query and key projections.

    Shapes: weight [num_heads * head_dim, ...]; the result has the same shape.
    GGUF rotates neighbouring rows (2i, 2i + 1) of a head; Hugging Face rotates rows (i, i + head_dim / 2). So row
    2i + j of a head there is row i + j * head_dim / 2 here.
    Example: one head, rows [a0, b0, a1, b1] -> [a0, a1, b0, b1].
    Source: `permute` of llama.cpp's converter, inverted.
    """
    half = weight.shape[0] // num_heads // 2
    paired = weight.reshape(num_heads, half, 2, *weight.shape[1:])
    return paired.swapaxes(1, 2).reshape(weight.shape)


def _write_safetensors(
    path: Path,
    reader: GGUFReader,
    names: dict[str, tuple[str, tuple[int, ...]]],
    config: dict[str, Any],
    progress: Stage | None,
) -> None:
    """Write the file tensor by tensor, so that memory holds one dequantized tensor and not the model.

    Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data offsets), the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in names.values():
        num_bytes = int(np.prod(shape)) * 4
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # The data starts at a multiple of 8.
    written = 0
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in reader.tensors:
            name, shape = names[tensor.name]
            weight = _dequantized(tensor, reader, shape)
            if ".q_proj." in name:
                weight = unpermute(weight, config["num_attention_heads"])
            elif ".k_proj." in name:
                weight = unpermute(weight, config["num_key_value_heads"])
            weight = np.ascontiguousarray(weight, dtype="<f4")
            file.write(weight.data)
            written += weight.nbytes
            if progress is not None:
                progress(written, offset)
        _settle(file)


def _dequantized(tensor: Any, reader: GGUFReader, shape: tuple[int, ...]) -> np.ndarray:
    try:
        weight = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(
            f"tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, which the gguf package cannot read; "
            "use a file of another quantization"
        ) from error
    return np.asarray(weight, dtype=np.float32).reshape(shape)


def _json(values: dict[str, Any]) -> str:
    given = {key: value for key, value in values.items() if value is not None}
    return json.dumps(given, indent=2, ensure_ascii=False) + "\n"


def _settle(file: Any) -> None:
    """Readable by everyone whatever the umask, and on the disk before the folder gets its name."""
    file.flush()
    os.fchmod(file.fileno(), 0o644)
    os.fsync(file.fileno())
