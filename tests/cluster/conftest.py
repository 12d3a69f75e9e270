"""A local Ray of the tests' own, and a tiny random model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from rowcast.cluster import engine
from rowcast.cluster.state_file import read_record
from rowcast.tests.cluster.support import (
    EOS,
    MAX_MODEL_LEN,
    VOCAB_SIZE,
    Cluster,
    family_of,
    own_home,
)
from safetensors.numpy import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A 2-layer Llama of random weights with a tokenizer of single bytes and a chat template."""
    folder = tmp_path_factory.mktemp("tiny")
    hidden, heads, kv_heads, head_dim, intermediate, layers = 32, 4, 2, 8, 64, 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate,
        "vocab_size": VOCAB_SIZE,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "max_position_embeddings": MAX_MODEL_LEN,
        "tie_word_embeddings": True,
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eos_token_id": EOS,
    }
    (folder / "config.json").write_text(json.dumps(config))
    rng = np.random.default_rng(5)

    def matrix(*shape: int) -> np.ndarray:
        return rng.normal(0, 0.3, shape).astype(np.float32)

    weights = {
        "model.embed_tokens.weight": matrix(VOCAB_SIZE, hidden),
        "model.norm.weight": np.ones(hidden, np.float32),
    }
    for layer in range(layers):
        prefix = f"model.layers.{layer}"
        weights |= {
            f"{prefix}.input_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.post_attention_layernorm.weight": np.ones(hidden, np.float32),
            f"{prefix}.self_attn.q_proj.weight": matrix(heads * head_dim, hidden),
            f"{prefix}.self_attn.k_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.v_proj.weight": matrix(kv_heads * head_dim, hidden),
            f"{prefix}.self_attn.o_proj.weight": matrix(hidden, heads * head_dim),
            f"{prefix}.mlp.gate_proj.weight": matrix(intermediate, hidden),
            f"{prefix}.mlp.up_proj.weight": matrix(intermediate, hidden),
            f"{prefix}.mlp.down_proj.weight": matrix(hidden, intermediate),
        }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
        "{% for t in tools or [] %}{{ t.name }}{{ mood }}{% endfor %}"
        "{% if not add_generation_prompt %}-{% endif %}"
    )
    recommended = {"eos_token_id": EOS, "top_k": 1, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"chat_template": template, "eos_token": "<eos>"})
    )
    return folder


@pytest.fixture(scope="module")
def home() -> Iterator[pytest.MonkeyPatch]:
    with own_home() as patch:
        yield patch


@pytest.fixture(scope="module")
def cluster(home: pytest.MonkeyPatch, tiny_model: Path) -> Iterator[Cluster]:
    """A local Ray of this module's own; nothing of it is left afterwards."""
    name = "t"
    session = engine.connect(None, name=name)
    record = read_record(name)
    assert record is not None
    assert record.head is not None
    family: list[psutil.Process] = []
    try:
        yield Cluster(session, name, tiny_model)
        family = family_of(record.head.pid)
    finally:
        engine.stop_engine(name)
    left = [process for process in family if process.is_running()]
    assert not left, "processes of the head are left"
    assert not Path(record.head.temp_dir).exists()
