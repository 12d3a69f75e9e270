"""A tiny Llama model as a .gguf file: 2 layers, random weights, a byte-level tokenizer of a few merges."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from tokenizers.pre_tokenizers import ByteLevel

CONTROL, NORMAL = 3, 1
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2"]
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@dataclass
class TinyLlama:
    """What goes into the file. Weights are in GGUF's order of rows; each field may be changed before `write`."""

    num_layers: int = 2
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 8
    hidden_size: int = 32
    intermediate_size: int = 64
    rope_theta: float = 1e4
    rms_norm_eps: float = 1e-5
    tied: bool = True
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata keys to set, or to leave out where the value is None."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    @property
    def tokens(self) -> list[str]:
        merged = [merge.replace(" ", "") for merge in MERGES]
        return [*SPECIALS, *sorted(ByteLevel.alphabet()), *merged]

    def __post_init__(self) -> None:
        rng = np.random.default_rng(7)

        def put(name: str, *shape: int) -> None:
            self.tensors[name] = rng.normal(0, 0.25, shape).astype(np.float32)

        put("token_embd.weight", len(self.tokens), self.hidden_size)
        put("output_norm.weight", self.hidden_size)
        if not self.tied:
            put("output.weight", len(self.tokens), self.hidden_size)
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        for layer in range(self.num_layers):
            blk = f"blk.{layer}"
            put(f"{blk}.attn_norm.weight", self.hidden_size)
            put(f"{blk}.ffn_norm.weight", self.hidden_size)
            put(f"{blk}.attn_q.weight", q_rows, self.hidden_size)
            put(f"{blk}.attn_k.weight", kv_rows, self.hidden_size)
            put(f"{blk}.attn_v.weight", kv_rows, self.hidden_size)
            put(f"{blk}.attn_output.weight", self.hidden_size, q_rows)
            put(f"{blk}.ffn_gate.weight", self.intermediate_size, self.hidden_size)
            put(f"{blk}.ffn_up.weight", self.intermediate_size, self.hidden_size)
            put(f"{blk}.ffn_down.weight", self.hidden_size, self.intermediate_size)

    def write(
        self, path: Path, quantize: Callable[[str], gguf.GGMLQuantizationType | None] | None = None
    ) -> Path:
        tokens = self.tokens
        values: dict[str, Any] = {
            "general.architecture": "llama",
            "llama.block_count": self.num_layers,
            "llama.context_length": 128,
            "llama.embedding_length": self.hidden_size,
            "llama.feed_forward_length": self.intermediate_size,
            "llama.attention.head_count": self.num_heads,
            "llama.attention.head_count_kv": self.num_kv_heads,
            "llama.attention.key_length": self.head_dim,
            "llama.attention.value_length": self.head_dim,
            "llama.attention.layer_norm_rms_epsilon": self.rms_norm_eps,
            "llama.rope.freq_base": self.rope_theta,
            "llama.rope.dimension_count": self.head_dim,
            "tokenizer.ggml.model": "gpt2",
            "tokenizer.ggml.pre": "smollm",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": [CONTROL] * 3 + [NORMAL] * (len(tokens) - 3),
            "tokenizer.ggml.merges": MERGES,
            "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.padding_token_id": 2,
            "tokenizer.ggml.add_bos_token": False,
            "tokenizer.chat_template": TEMPLATE,
            **self.metadata,
        }
        writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
        for key, value in values.items():
            if isinstance(value, bool):
                writer.add_bool(key, value)
            elif isinstance(value, int):
                writer.add_uint32(key, value)
            elif isinstance(value, float):
                writer.add_float32(key, value)
            elif isinstance(value, str):
                writer.add_string(key, value)
            elif value is not None:
                writer.add_array(key, value)
        for name, tensor in self.tensors.items():
            kind = quantize(name) if quantize else None
            if kind is None:
                writer.add_tensor(name, tensor)
            else:
                writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path


@pytest.fixture
def tiny_llama() -> type[TinyLlama]:
    return TinyLlama


@pytest.fixture(scope="session")
def tiny_model() -> Callable[[Path], Path]:
    """Converts the tiny model into a Hugging Face folder inside the given one; a context of 128 tokens."""
    from rowcast.launch.convert_gguf import convert_gguf

    def make(folder: Path) -> Path:
        model = folder / "tiny-llama"
        model.mkdir()
        convert_gguf(TinyLlama().write(folder / "tiny.gguf"), model, lambda done, total: None)
        return model

    return make
