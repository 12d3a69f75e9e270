"""A tiny Gemma 3 model as a .gguf file: random weights and a SentencePiece vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rowcast.tests.launch.tiny_gguf import Quantize, write_gguf

NORMAL, CONTROL, USER_DEFINED, BYTE = 1, 3, 4, 6
MERGED = ["▁t", "he", "▁the", "in", "▁w", "or", "wor", "▁wor", "ld", "▁world", "ab", "bc", "abc"]
"""Tokens of several characters, best score first."""


def vocabulary() -> tuple[list[str], list[float], list[int]]:
    """Tokens, scores and kinds in Gemma's order: control, runs and tags, bytes, merged tokens, single characters."""
    control = ["<pad>", "<eos>", "<bos>", "<unk>", "<end_of_turn>"]
    whole = ["\n", "\n\n", "\n\n\n", "  ", "   ", "    ", "\t", "\t\t", "<td>", "</td>"]
    tokens = control + whole
    kinds = [CONTROL] * len(control) + [USER_DEFINED] * len(whole)
    scores = [-1000.0] * len(tokens)
    tokens += [f"<0x{byte:02X}>" for byte in range(256)]
    kinds += [BYTE] * 256
    scores += [0.0] * 256
    normal = [*MERGED, *dict.fromkeys("▁abcdefghilmnorstuwx<>/.中é")]
    tokens += normal
    kinds += [NORMAL] * len(normal)
    scores += [-float(rank) for rank in range(len(normal))]
    return tokens, scores, kinds


@dataclass
class TinyGemma:
    """What goes into the file; each field may be changed before `write`. Norms are as GGUF holds them: about 1."""

    num_layers: int = 6
    num_heads: int = 2
    num_kv_heads: int = 1
    head_dim: int = 32
    hidden_size: int = 64
    intermediate_size: int = 96
    window: int = 4
    full_base: float = 1e6
    sliding_base: float = 1e4
    rms_norm_eps: float = 1e-6
    metadata: dict[str, Any] = field(default_factory=dict)
    """Metadata keys to set, or to leave out where the value is None."""
    tensors: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        rng = np.random.default_rng(11)

        def put(name: str, *shape: int, around: float = 0.0, spread: float = 0.2) -> None:
            self.tensors[name] = rng.normal(around, spread, shape).astype(np.float32)

        def norm(name: str, size: int) -> None:
            put(name, size, around=1.0, spread=0.3)

        hidden, inner = self.hidden_size, self.intermediate_size
        q_rows, kv_rows = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        put("token_embd.weight", len(vocabulary()[0]), hidden, spread=0.1)
        norm("output_norm.weight", hidden)
        for layer in range(self.num_layers):
            blk = f"blk.{layer}"
            for name in ("attn_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"):
                norm(f"{blk}.{name}.weight", hidden)
            norm(f"{blk}.attn_q_norm.weight", self.head_dim)
            norm(f"{blk}.attn_k_norm.weight", self.head_dim)
            put(f"{blk}.attn_q.weight", q_rows, hidden)
            put(f"{blk}.attn_k.weight", kv_rows, hidden)
            put(f"{blk}.attn_v.weight", kv_rows, hidden)
            put(f"{blk}.attn_output.weight", hidden, q_rows)
            put(f"{blk}.ffn_gate.weight", inner, hidden)
            put(f"{blk}.ffn_up.weight", inner, hidden)
            put(f"{blk}.ffn_down.weight", hidden, inner)

    def write(self, path: Path, quantize: Quantize | None = None) -> Path:
        tokens, scores, kinds = vocabulary()
        values: dict[str, Any] = {
            "general.architecture": "gemma3",
            "gemma3.block_count": self.num_layers,
            "gemma3.context_length": 128,
            "gemma3.embedding_length": self.hidden_size,
            "gemma3.feed_forward_length": self.intermediate_size,
            "gemma3.attention.head_count": self.num_heads,
            "gemma3.attention.head_count_kv": self.num_kv_heads,
            "gemma3.attention.key_length": self.head_dim,
            "gemma3.attention.value_length": self.head_dim,
            "gemma3.attention.layer_norm_rms_epsilon": self.rms_norm_eps,
            "gemma3.attention.sliding_window": self.window,
            "gemma3.rope.freq_base": self.full_base,
            "tokenizer.ggml.model": "llama",
            "tokenizer.ggml.pre": "default",
            "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.scores": scores,
            "tokenizer.ggml.token_type": kinds,
            "tokenizer.ggml.bos_token_id": 2,
            "tokenizer.ggml.eos_token_id": 1,
            "tokenizer.ggml.unknown_token_id": 3,
            "tokenizer.ggml.padding_token_id": 0,
            "tokenizer.ggml.add_bos_token": True,
            "tokenizer.ggml.add_space_prefix": False,
            **self.metadata,
        }
        return write_gguf(path, values, self.tensors, quantize)
