"""A converted folder is the same model: by transformers' own loader, against the GGUF file's own formulas."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from rowcast.launch.convert_gguf import convert_gguf
from rowcast.launch.gguf_families import unpermute
from safetensors.numpy import load_file


def gguf_logits(model, token_ids: list[int]) -> np.ndarray:
    """Logits of every position, computed from the file's own tensors as llama.cpp does: neighbouring rows rotate."""
    weights = model.tensors
    positions = np.arange(len(token_ids))
    angles = positions[:, None] * model.rope_theta ** (
        -np.arange(0, model.head_dim, 2) / model.head_dim
    )

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.rms_norm_eps) * weight

    def rotated_heads(x, num_heads):
        x = x.reshape(len(token_ids), num_heads, model.head_dim // 2, 2)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        even, odd = x[..., 0], x[..., 1]
        turned = np.stack([even * cos - odd * sin, even * sin + odd * cos], axis=-1)
        return turned.reshape(len(token_ids), num_heads, model.head_dim)

    x = weights["token_embd.weight"][token_ids].astype(np.float64)
    for layer in range(model.num_layers):
        w = {name.split(".", 2)[2]: t for name, t in weights.items() if f"blk.{layer}." in name}
        h = norm(x, w["attn_norm.weight"])
        q = rotated_heads(h @ w["attn_q.weight"].T, model.num_heads)
        k = rotated_heads(h @ w["attn_k.weight"].T, model.num_kv_heads)
        v = (h @ w["attn_v.weight"].T).reshape(len(token_ids), model.num_kv_heads, model.head_dim)
        heads = []
        for head in range(model.num_heads):
            kv_head = head // (model.num_heads // model.num_kv_heads)
            scores = q[:, head] @ k[:, kv_head].T / np.sqrt(model.head_dim)
            scores[np.triu_indices(len(token_ids), 1)] = -np.inf
            share = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(share / share.sum(-1, keepdims=True) @ v[:, kv_head])
        x = x + np.concatenate(heads, axis=-1) @ w["attn_output.weight"].T
        h = norm(x, w["ffn_norm.weight"])
        gate = h @ w["ffn_gate.weight"].T
        x = x + (gate / (1 + np.exp(-gate)) * (h @ w["ffn_up.weight"].T)) @ w["ffn_down.weight"].T
    output = weights.get("output.weight", weights["token_embd.weight"])
    return norm(x, weights["output_norm.weight"]) @ output.T


@pytest.mark.parametrize("tied", [True, False])
def test_transformers_computes_the_files_own_logits(tiny_llama, tmp_path: Path, tied: bool) -> None:
    """Wrong row order of q or k keeps every shape and gives fluent nonsense."""
    import torch
    from transformers import AutoModelForCausalLM

    model = tiny_llama(tied=tied)
    convert_gguf(model.write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.float32
    token_ids = [5, 200, 17, 3, 90, 90, 264, 41]
    with torch.no_grad():
        logits = loaded(torch.tensor([token_ids])).logits[0].numpy()
    np.testing.assert_allclose(logits, gguf_logits(model, token_ids), rtol=0, atol=2e-4)


def test_unpermute_is_the_docstrings_example() -> None:
    rows = np.array(["a0", "b0", "a1", "b1"])
    assert unpermute(rows, 1).tolist() == ["a0", "a1", "b0", "b1"]


def test_unpermute_row_by_row() -> None:
    num_heads, head_dim = 3, 8
    weight = np.arange(num_heads * head_dim * 2).reshape(num_heads * head_dim, 2)
    result = unpermute(weight, num_heads)
    for head in range(num_heads):
        for i in range(head_dim // 2):
            for j in range(2):
                there = head * head_dim + 2 * i + j
                here = head * head_dim + i + j * head_dim // 2
                assert result[here].tolist() == weight[there].tolist()


def test_quantized_tensors_keep_every_value(tiny_llama, tmp_path: Path) -> None:
    """float32 holds what the file says; a 16-bit file would round it."""
    kinds = {
        "ffn_up": gguf.GGMLQuantizationType.Q4_1,
        "ffn_gate": gguf.GGMLQuantizationType.Q8_0,
        "ffn_down": gguf.GGMLQuantizationType.F16,
        "attn_v": gguf.GGMLQuantizationType.BF16,
    }
    model = tiny_llama()
    path = model.write(
        tmp_path / "tiny.gguf",
        lambda name: next((kind for part, kind in kinds.items() if part in name), None),
    )
    convert_gguf(path, tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    names = {"ffn_up": "mlp.up_proj", "ffn_gate": "mlp.gate_proj"}
    names |= {"ffn_down": "mlp.down_proj", "attn_v": "self_attn.v_proj"}
    for part, kind in kinds.items():
        tensor = model.tensors[f"blk.1.{part}.weight"]
        expected = gguf.dequantize(gguf.quantize(tensor, kind), kind)
        assert saved[f"model.layers.1.{names[part]}.weight"].tolist() == expected.tolist()
    embedding = saved["model.embed_tokens.weight"]
    assert embedding.tolist() == model.tensors["token_embd.weight"].tolist()


def test_config_and_end_tokens(tiny_llama, tmp_path: Path) -> None:
    convert_gguf(tiny_llama().write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    expected = {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 3 + 256 + 10,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1e4,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((tmp_path / "hf" / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [2, 0]  # <|im_end|>, and <|endoftext|>


def test_files_are_readable_by_all_whatever_the_umask(tiny_llama, tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    before = os.umask(0o077)
    try:
        convert_gguf(path, tmp_path / "hf")
    finally:
        os.umask(before)
    modes = {file.name: file.stat().st_mode & 0o777 for file in (tmp_path / "hf").iterdir()}
    assert set(modes.values()) == {0o644}
    assert len(modes) == 6


def test_progress_ends_at_all_bytes(tiny_llama, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    convert_gguf(path, tmp_path / "hf", lambda done, total: seen.append((done, total)))
    assert seen == sorted(seen)
    assert seen[-1][0] == seen[-1][1] == 4 * sum(t.size for t in tiny_llama().tensors.values())


def test_conversion_loads_no_torch(tiny_llama, tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    script = (
        "import sys; from pathlib import Path; from rowcast.launch.convert_gguf import convert_gguf\n"
        "convert_gguf(Path(sys.argv[1]), Path(sys.argv[2]))\n"
        "assert not {'torch', 'transformers', 'ray'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, path, tmp_path / "hf"], check=True)


@pytest.mark.parametrize("kept", [0, 3, 4, 20, 300, 4000, 9000, -1, -700])
def test_a_truncated_file_gets_one_sentence(tiny_llama, tmp_path: Path, kept: int) -> None:
    """4000 cuts the token list, -1 the last tensor's last byte."""
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    path.write_bytes(data[:kept])
    with pytest.raises(ValueError, match=r"truncated or damaged|not a GGUF file") as caught:
        convert_gguf(path, tmp_path / "hf")
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_a_damaged_count_is_found_before_it_is_believed(tiny_llama, tmp_path: Path) -> None:
    """An array of 2**40 numbers in a file of 80 kB made the reader append empty values until memory was gone."""
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    key = data.index(b"tokenizer.ggml.token_type") + len("tokenizer.ggml.token_type")
    count = key + 4 + 4  # after the value's type and the items' type
    assert int.from_bytes(data[count : count + 8], "little") == 3 + 256 + 10
    data[count + 5] = 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="truncated or damaged"):
        convert_gguf(path, tmp_path / "hf")


def test_another_gguf_version_is_refused_by_name(tiny_llama, tmp_path: Path) -> None:
    path = tiny_llama().write(tmp_path / "tiny.gguf")
    data = bytearray(path.read_bytes())
    data[4:8] = (1).to_bytes(4, "little")
    path.write_bytes(data)
    with pytest.raises(ValueError, match="GGUF version 1"):
        convert_gguf(path, tmp_path / "hf")


def test_flipped_header_bytes_never_escape_as_another_error(tiny_llama, tmp_path: Path) -> None:
    """A damaged length sends the reader anywhere; whatever it trips over must be a ValueError."""
    path = tiny_llama(num_layers=1).write(tmp_path / "tiny.gguf")
    data = path.read_bytes()
    rng = np.random.default_rng(3)
    sentences = []
    for _ in range(150):
        damaged = bytearray(data)
        for place in rng.integers(4, 2000, 3):
            damaged[place] = rng.integers(256)
        path.write_bytes(damaged)
        try:
            convert_gguf(path, tmp_path / "hf")
        except ValueError as error:
            sentences.append(str(error))
    assert len(sentences) > 50
    assert not [sentence for sentence in sentences if "\n" in sentence]


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (
            {"general.architecture": "phi3"},
            "holds a 'phi3' model; rowcast converts 'gemma3', 'llama', 'qwen2', 'qwen3' models only",
        ),
        ({"llama.expert_count": 8}, "mixture-of-experts"),
        ({"llama.rope.scaling.type": "yarn"}, "scaled rotary positions"),
        ({"llama.rope.dimension_count": 4}, "dimensions 8, 8 and 4"),
        ({"llama.attention.head_count_kv": 3}, "4 query heads and 3 KV heads"),
        ({"llama.attention.head_count": [4, 4]}, "one number for all layers"),
        ({"llama.block_count": None}, "no 'llama.block_count'"),
        ({"llama.block_count": 2**32 - 1}, "announces 4294967295 layers"),
        ({"llama.block_count": 3}, "lacks 9 of the model's 29 tensors"),
        ({"llama.block_count": 1}, "does not have"),
        ({"llama.feed_forward_length": 96}, "has shape"),
        ({"tokenizer.ggml.model": "bert"}, "tokenizer of kind 'bert'"),
        ({"tokenizer.ggml.model": "llama"}, "puts a space before each text"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, "splits text the 'deepseek-llm' way"),
        ({"tokenizer.ggml.eos_token_id": 9999}, "eos_token_id 9999"),
        ({"tokenizer.ggml.merges": ["he"]}, "merge 'he'"),
        ({"tokenizer.ggml.merges": ["h zz"]}, "merges do not fit"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    tiny_llama, tmp_path: Path, metadata: dict, message: str
) -> None:
    path = tiny_llama(metadata=metadata).write(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        convert_gguf(path, tmp_path / "hf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hf").exists()


def test_an_unknown_tensor_is_refused(tiny_llama, tmp_path: Path) -> None:
    """Llama 3.1's rope_freqs change the model; dropping them silently would too."""
    model = tiny_llama()
    model.tensors["rope_freqs.weight"] = np.ones(4, np.float32)
    with pytest.raises(ValueError, match=r"'rope_freqs\.weight'"):
        convert_gguf(model.write(tmp_path / "tiny.gguf"), tmp_path / "hf")


def test_a_kind_of_number_that_cannot_be_read_is_named(tiny_llama, tmp_path: Path) -> None:
    model = tiny_llama()
    model.tensors["output_norm.weight"] = model.tensors["output_norm.weight"].astype(np.float64)
    path = model.write(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=r"tensor 'output_norm\.weight' is stored as F64"):
        convert_gguf(path, tmp_path / "hf")


@pytest.mark.parametrize("pre", ["smollm", "gpt-2", "llama-bpe"])
@pytest.mark.parametrize("adds_bos", [False, True])
def test_transformers_reads_the_tokenizer(
    tiny_llama, tmp_path: Path, pre: str, adds_bos: bool
) -> None:
    from transformers import AutoTokenizer

    metadata = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": adds_bos}
    model = tiny_llama(metadata=metadata)
    convert_gguf(model.write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "hf")
    bos = ["<|im_start|>"] if adds_bos else []
    digits = {"smollm": ["1", "2", "3"], "gpt-2": ["12", "3"], "llama-bpe": ["12", "3"]}[pre]
    tokens = tokenizer.convert_ids_to_tokens(tokenizer("hello world123<|im_end|>").input_ids)
    assert tokens == [*bos, "hello", "Ġworld", *digits, "<|im_end|>"]
    for text in (
        "한국어 🙂👩‍👩‍👧\n\n\t x  y",
        "I'm  don't ½ ٣ 4567.89",
        " lead",
        "",
        "a\r\n\r\nb   ",
    ):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        assert tokenizer.decode(ids) == text
    assert tokenizer.bos_token_id == 1
    assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hello"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"


def test_the_real_model_answers(smollm2_dir: Path) -> None:
    """A wrong constant (rotary base, epsilon, a head count) still loads; it does not know where Paris is."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_dir)
    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    output = model.generate(**prompt, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
