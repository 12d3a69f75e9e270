"""A converted Gemma 3 is the same model, by transformers' own loader, and reads text as SentencePiece does."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
from rowcast.cluster.text import TextProcessor
from rowcast.launch.convert_gguf import convert_gguf
from rowcast.launch.convert_sentencepiece import merges_by_score
from rowcast.tests.launch.tiny_gemma import NORMAL, USER_DEFINED, TinyGemma, vocabulary
from safetensors.numpy import load_file


def gguf_logits(model: TinyGemma, is_full: list[bool], token_ids: list[int]) -> np.ndarray:
    """Logits of every position, from the file's own tensors as llama.cpp computes them: norms multiply as they are."""
    num_tokens, head_dim = len(token_ids), model.head_dim
    positions = np.arange(num_tokens)

    def norm(x, weight):
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + model.rms_norm_eps) * weight

    def rotated(x, base):
        angles = positions[:, None] * base ** (-np.arange(0, head_dim, 2) / head_dim)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]
        low, high = x[..., : head_dim // 2], x[..., head_dim // 2 :]
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    x = model.tensors["token_embd.weight"][token_ids].astype(np.float64) * model.hidden_size**0.5
    for layer in range(model.num_layers):
        w = {
            name.split(".", 2)[2].removesuffix(".weight"): tensor.astype(np.float64)
            for name, tensor in model.tensors.items()
            if name.startswith(f"blk.{layer}.")
        }
        base = model.full_base if is_full[layer] else model.sliding_base
        seen = positions[None, :] <= positions[:, None]
        if not is_full[layer]:
            seen &= positions[None, :] > positions[:, None] - model.window
        h = norm(x, w["attn_norm"])
        q, k, v = (
            (h @ w[f"attn_{name}"].T).reshape(num_tokens, -1, head_dim) for name in ("q", "k", "v")
        )
        q, k = rotated(norm(q, w["attn_q_norm"]), base), rotated(norm(k, w["attn_k_norm"]), base)
        heads = []
        for head in range(model.num_heads):
            kv_head = head // (model.num_heads // model.num_kv_heads)
            scores = np.where(seen, q[:, head] @ k[:, kv_head].T / head_dim**0.5, -np.inf)
            share = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(share / share.sum(-1, keepdims=True) @ v[:, kv_head])
        attended = np.concatenate(heads, axis=-1) @ w["attn_output"].T
        x = x + norm(attended, w["post_attention_norm"])
        h = norm(x, w["ffn_norm"])
        gate = h @ w["ffn_gate"].T
        gelu = 0.5 * gate * (1 + np.tanh((2 / np.pi) ** 0.5 * (gate + 0.044715 * gate**3)))
        x = x + norm((gelu * (h @ w["ffn_up"].T)) @ w["ffn_down"].T, w["post_ffw_norm"])
    return norm(x, model.tensors["output_norm.weight"]) @ model.tensors["token_embd.weight"].T


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    convert_gguf(TinyGemma().write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    return tmp_path / "hf"


@pytest.mark.parametrize(
    ("pattern", "full_layers"),
    [
        (None, [5]),  # nothing said: each sixth
        (3, [2, 5]),
        ([True, False, True, True, False, True], [1, 4]),
    ],
)
def test_transformers_computes_the_files_own_logits(
    tmp_path: Path, pattern: object, full_layers: list[int]
) -> None:
    """A norm that lost or kept its one, a swapped base or norm, a window off by one: all give fluent nonsense."""
    import torch
    from transformers import AutoModelForCausalLM

    model = TinyGemma(metadata={"gemma3.attention.sliding_window_pattern": pattern})
    convert_gguf(model.write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    loaded, info = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", output_loading_info=True)
    assert type(loaded).__name__ == "Gemma3ForCausalLM"
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert loaded.dtype == torch.float32
    token_ids = [2, 280, 17, 3, 290, 290, 264, 41, 100, 5, 273, 281, 6, 9]
    with torch.no_grad():
        logits = loaded(torch.tensor([token_ids])).logits[0].numpy()
    is_full = [layer in full_layers for layer in range(model.num_layers)]
    np.testing.assert_allclose(logits, gguf_logits(model, is_full, token_ids), rtol=0, atol=2e-4)


def test_the_bases_of_both_kinds_come_from_the_file(tmp_path: Path) -> None:
    model = TinyGemma(full_base=5e5, metadata={"gemma3.rope.freq_base_swa": 2e4})
    convert_gguf(model.write(tmp_path / "tiny.gguf"), tmp_path / "hf")
    config = json.loads((tmp_path / "hf" / "config.json").read_text())
    bases = {kind: rope["rope_theta"] for kind, rope in config["rope_parameters"].items()}
    assert bases == {"full_attention": 5e5, "sliding_attention": 2e4}


def test_config_and_end_tokens(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    expected = {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "vocab_size": len(vocabulary()[0]),
        "num_hidden_layers": 6,
        "head_dim": 32,
        "query_pre_attn_scalar": 32,
        "hidden_activation": "gelu_pytorch_tanh",
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-6,
        "sliding_window": 4,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "tie_word_embeddings": True,
        "bos_token_id": 2,
        "eos_token_id": 1,
        "pad_token_id": 0,
    }
    assert {key: config[key] for key in expected} == expected
    generation = json.loads((folder / "generation_config.json").read_text())
    assert generation["eos_token_id"] == [1, 4]  # <eos>, and <end_of_turn>
    assert not (folder / "chat_template.jinja").exists()


def test_values_are_the_files_norms_less_one(tmp_path: Path) -> None:
    """And each weight is what the file's own kind of numbers says."""
    kinds = {
        "ffn_down": gguf.GGMLQuantizationType.Q8_0,
        "attn_q.": gguf.GGMLQuantizationType.Q5_0,
        "ffn_up": gguf.GGMLQuantizationType.Q4_0,
    }
    model = TinyGemma(num_layers=1)

    def kind_of(name: str) -> gguf.GGMLQuantizationType | None:
        return next((kind for part, kind in kinds.items() if part in name), None)

    convert_gguf(model.write(tmp_path / "tiny.gguf", kind_of), tmp_path / "hf")
    saved = load_file(tmp_path / "hf" / "model.safetensors")
    layer = {name.removeprefix("model.layers.0."): values for name, values in saved.items()}
    renamed = {
        "attn_norm": "input_layernorm",
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
        "attn_q_norm": "self_attn.q_norm",
        "attn_k_norm": "self_attn.k_norm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    for there, here in renamed.items():
        name = f"blk.0.{there}.weight"
        expected, kind = model.tensors[name], kind_of(name)
        if kind is not None:
            expected = gguf.dequantize(gguf.quantize(expected, kind), kind)
        elif there.endswith("norm"):
            expected = expected - np.float32(1)
        assert layer[f"{here}.weight"].tolist() == expected.tolist(), there
    norm = model.tensors["output_norm.weight"] - np.float32(1)
    assert saved["model.norm.weight"].tolist() == norm.tolist()


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({"general.architecture": "gemma2"}, "holds a 'gemma2' model"),
        ({"gemma3.attention.sliding_window": None}, "no 'gemma3.attention.sliding_window'"),
        ({"gemma3.attention.sliding_window": 0}, "sliding window of 0 tokens"),
        ({"gemma3.attention.sliding_window_pattern": [True]}, "expected a number or 6 flags"),
        ({"gemma3.attention.sliding_window_pattern": 0}, "expected a number or 6 flags"),
        ({"gemma3.final_logit_softcapping": 30.0}, "capped logits"),
        ({"gemma3.attn_logit_softcapping": 50.0}, "capped attention scores"),
        ({"gemma3.rope.scaling.type": "linear"}, "scaled rotary positions"),
        ({"gemma3.block_count": 5}, r"'blk\.5\.[a-z_]+\.weight', which a Gemma 3 text model"),
        ({"tokenizer.ggml.add_space_prefix": None}, "puts a space before each text"),
        ({"tokenizer.ggml.remove_extra_whitespaces": True}, "removes spaces from the text"),
        ({"tokenizer.ggml.precompiled_charsmap": [1, 2]}, "replaces characters of the text"),
        (
            {"tokenizer.ggml.scores": [0.0, 1.0]},
            "no list of [0-9]+ numbers in tokenizer.ggml.scores",
        ),
        ({"tokenizer.ggml.scores": None}, "no 'tokenizer.ggml.scores'"),
        ({"tokenizer.ggml.token_type": [1] * len(vocabulary()[0])}, "has 0 byte tokens"),
        ({"tokenizer.ggml.scores": ["a"] * len(vocabulary()[0])}, "no list of [0-9]+ numbers"),
        ({"tokenizer.ggml.tokens": [7] * len(vocabulary()[0])}, "no list of strings"),
        ({"tokenizer.ggml.bos_token_id": "a"}, "bos_token_id 'a'"),
        ({"tokenizer.ggml.bos_token_id": None}, "names none"),
        ({"gemma3.rope.freq_base": "a"}, r"gemma3\.rope\.freq_base = 'a', expected one number"),
        ({"tokenizer.ggml.unknown_token_id": 9999}, "unknown_token_id 9999"),
    ],
)
def test_what_cannot_be_converted_is_refused_by_name(
    tmp_path: Path, metadata: dict, message: str
) -> None:
    path = TinyGemma(metadata=metadata).write(tmp_path / "tiny.gguf")
    with pytest.raises(ValueError, match=message) as caught:
        convert_gguf(path, tmp_path / "hf")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "hf").exists()


# The tokenizer


def sentencepiece_ids(text: str) -> list[int]:
    """SentencePiece's own way, plainly: whole tokens first, then the best pair again and again, then bytes."""
    tokens, scores, kinds = vocabulary()
    id_of = {token: token_id for token_id, token in enumerate(tokens)}
    score_of = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == NORMAL
    }
    whole = [token for token, kind in zip(tokens, kinds, strict=True) if kind == USER_DEFINED]
    pieces: list[tuple[str, bool]] = []  # text, and whether it may be joined
    while text:
        run = max((token for token in whole if text.startswith(token)), key=len, default="")
        pieces.append((run, False) if run else (text[0].replace(" ", "▁"), True))
        text = text[len(run) or 1 :]
    while True:
        pairs = [
            (score_of[left + right], -place)
            for place, ((left, joins), (right, also)) in enumerate(pairwise(pieces))
            if joins and also and left + right in score_of
        ]
        if not pairs:
            break
        place = -max(pairs)[1]
        pieces[place : place + 2] = [(pieces[place][0] + pieces[place + 1][0], True)]
    ids: list[int] = []
    for piece, _ in pieces:
        known = [id_of[piece]] if piece in id_of else None
        ids += known or [id_of[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


def test_merges_are_the_docstrings_example() -> None:
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc"], [0.0, 0.0, 0.0, -2.0, -1.0, -3.0]
    merges = merges_by_score(tokens, scores, [NORMAL] * 6)
    assert merges == [("b", "c"), ("a", "b"), ("ab", "c"), ("a", "bc")]
    # What is no normal token takes no part.
    assert merges_by_score(tokens, scores, [NORMAL] * 4 + [USER_DEFINED, NORMAL]) == [
        ("a", "b"),
        ("ab", "c"),
    ]


def test_text_becomes_the_ids_that_sentencepiece_gives(folder: Path) -> None:
    """Runs of spaces and newlines are one token each and never join the word after them."""
    from transformers import AutoTokenizer

    processor, reference = TextProcessor(folder), AutoTokenizer.from_pretrained(folder)
    assert processor.encode("the world", add_special_tokens=False) == sentencepiece_ids("the world")
    named = reference.convert_ids_to_tokens(processor.encode("  the world\n\n<td>中🙂"))
    assert named == [
        *("<bos>", "  ", "t", "he", "▁world", "\n\n", "<td>", "中"),
        *("<0xF0>", "<0x9F>", "<0x99>", "<0x82>"),
    ]
    rng = random.Random(3)
    parts = [*"abcwtheinorld<>/.中é", " ", "  ", "   ", "\n", "\n\n", "\t", "<td>", "</td>"]
    parts += [" the", " world", "abc", "🙂", "한", "\x00", "\u00a0"]
    for _ in range(400):
        text = "".join(rng.choice(parts) for _ in range(rng.randrange(30)))
        ids = processor.encode(text, add_special_tokens=False)
        assert ids == sentencepiece_ids(text), text
        assert processor.decode(ids) == text
        assert reference(text).input_ids == [2, *ids]
        assert reference.decode(ids) == text


def test_special_tokens_are_bos_and_what_the_file_calls_control(folder: Path) -> None:
    from transformers import AutoTokenizer

    processor, reference = TextProcessor(folder), AutoTokenizer.from_pretrained(folder)
    assert processor.encode("") == [2]
    assert processor.encode("a<eos>\n") == [2, vocabulary()[0].index("a"), 1, 5]
    assert processor.decode([2, 5, 1, 9]) == "\n   "
    assert processor.special_token_ids == frozenset(range(5))
    assert (reference.bos_token_id, reference.eos_token_id, reference.pad_token_id) == (2, 1, 0)
    assert reference.unk_token_id == 3


# The real one


def test_the_real_models_tokenizer(gemma_dir: Path) -> None:
    """Ids of the published model; they come from the vocabulary's order of scores alone."""
    processor = TextProcessor(gemma_dir)
    assert processor.encode("The capital of France is") == [2, 818, 5279, 529, 7001, 563]
    assert processor.vocab_size == 262144
    ids = processor.encode("a\n\n    b", add_special_tokens=False)
    assert ids == [236746, 108, 140, 236763]
    for text in (
        "Hello've world23 HOW's  how's are   yous?",
        "  leading, trailing  ",
        "中国的首都是北京。日本語 한국어",
        "🫩 🥲 🤔➡️🌱👩‍👩‍👧 é ½ ٣",
        "def f(x):\n\tif x:\n\t\treturn  1\n\n\n    # done\n" + " " * 40 + "\n" * 40,
        "<table><tr><td>x</td></tr></table>",
        "\x00\x7f\u00a0\u3000\r\n",
    ):
        assert processor.decode(processor.encode(text)) == text


def test_the_real_model_continues_text(gemma_dir: Path) -> None:
    """llama.cpp's greedy answer on the very file, by transformers on the folder: a wrong constant still loads."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gemma_dir)
    model = AutoModelForCausalLM.from_pretrained(gemma_dir, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=15, do_sample=False)
    answer = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    assert answer == (" the capital of the country of France. It is the largest city in France")
