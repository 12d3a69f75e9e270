"""Qwen 2 and 3 from GGUF: transformers' own model, written under gguf's own names, comes back as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import pytest
from rowcast.launch.convert_gguf import convert_gguf
from rowcast.tests.launch.tiny_gguf import MERGES, write_gguf
from rowcast.worker.model_config import ModelConfig

ARCHITECTURES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3}
SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 5e5,
    "initializer_range": 0.2,
}


def tokenizer_values(tiny: Any) -> dict[str, Any]:
    """Those of the tiny Llama, split as Qwen's are."""
    tokens = tiny.tokens
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "qwen2",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": False,
    }


def write(path: Path, name: str, tied: bool, tiny: Any) -> Any:
    """A random model of transformers as a .gguf file; returns it."""
    import torch
    import transformers

    torch.manual_seed(3)
    number = name.removeprefix("qwen")
    head_dim = {"head_dim": 16} if name == "qwen3" else {}  # Qwen 2 has hidden_size / heads
    config = getattr(transformers, f"Qwen{number}Config")(
        vocab_size=len(tiny.tokens), tie_word_embeddings=tied, **SIZES, **head_dim
    )
    model = getattr(transformers, f"Qwen{number}ForCausalLM")(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if key.endswith("bias") or "norm" in key:
                parameter.uniform_(0.5, 1.5)
    names = gguf.get_tensor_name_map(ARCHITECTURES[name], SIZES["num_hidden_layers"])
    tensors = {}
    for key, value in model.state_dict().items():
        if not (tied and key == "lm_head.weight"):
            stem, _, kind = key.rpartition(".")
            tensors[f"{names.get_name(stem)}.{kind}"] = value.numpy()
    values = {
        "general.architecture": name,
        f"{name}.block_count": 2,
        f"{name}.context_length": 128,
        f"{name}.embedding_length": 48,
        f"{name}.feed_forward_length": 80,
        f"{name}.attention.head_count": 6,
        f"{name}.attention.head_count_kv": 2,
        f"{name}.attention.layer_norm_rms_epsilon": 1e-6,
        f"{name}.rope.freq_base": 5e5,
        **tokenizer_values(tiny),
    }
    if head_dim:
        values |= {f"{name}.attention.key_length": 16, f"{name}.attention.value_length": 16}
    write_gguf(path, values, tensors)
    return model


@pytest.mark.parametrize(("name", "tied"), [("qwen2", True), ("qwen2", False), ("qwen3", False)])
def test_a_model_written_as_gguf_comes_back(
    tiny_llama: Any, tmp_path: Path, name: str, tied: bool
) -> None:
    """A bias or a head's norm that is lost, or rows in another order, leaves fluent nonsense."""
    import torch
    from transformers import AutoModelForCausalLM

    model = write(tmp_path / "tiny.gguf", name, tied, tiny_llama())
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(loaded) is type(model)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    token_ids = torch.tensor([[5, 200, 17, 3, 90, 90, 264, 41]])
    with torch.no_grad():
        assert torch.equal(loaded(token_ids).logits, model(token_ids).logits)
    config = ModelConfig.from_folder(tmp_path / "hf")  # and rowcast takes it
    assert (config.num_heads, config.num_kv_heads) == (6, 2)
    assert config.head_dim == (16 if name == "qwen3" else 8)
    assert config.qkv_bias is (name == "qwen2")
    assert not config.output_bias
    assert config.tie_word_embeddings is tied


def test_text_is_split_as_by_transformers_own_class(tiny_llama: Any, tmp_path: Path) -> None:
    from transformers import AutoTokenizer, Qwen2Tokenizer

    tiny = tiny_llama()
    write(tmp_path / "tiny.gguf", "qwen2", True, tiny)
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "hf")
    ours = AutoTokenizer.from_pretrained(tmp_path / "hf")
    vocab = {token: token_id for token_id, token in enumerate(tiny.tokens)}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    theirs = Qwen2Tokenizer(vocab=vocab, merges=merges)  # type: ignore[arg-type]
    for text in (
        "hello world 12123 hello\r\n\r\n  world  ",
        "Cafe\u0301 and Café, ½ ٣ 한국어 🙂👩‍👩‍👧",
        "I'M don't 'LL\t x\n\ty",
        "",
    ):
        assert ours(text).input_ids == theirs(text).input_ids
