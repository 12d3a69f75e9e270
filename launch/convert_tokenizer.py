"""Make the tokenizer's files of a Hugging Face folder from a GGUF file's metadata, with the `tokenizers` package.

GGUF stores a byte-level BPE whole (tokens, merges, kinds) but for one thing: how text is split before the merges, of
which it has only a name, `tokenizer.ggml.pre`. `_pre_tokenizer` holds those that we know exactly; another name is
refused, because a guess gives other ids for some text and no error. A SentencePiece vocabulary (`llama` there) is made
in `convert_sentencepiece.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .convert_sentencepiece import sentencepiece_bpe
from .gguf_metadata import CONTROL, USER_DEFINED, Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_QWEN2_SPLIT = _LLAMA3_SPLIT.replace(r"\p{N}{1,3}", r"\p{N}")  # every digit for itself

_END_TOKENS = (
    "<|im_end|>",
    "<|endoftext|>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<|eom_id|>",
    "</s>",
    "<|end|>",
    "<end_of_turn>",
)
"""Control tokens that end a turn in the model families that use them, beside the one that the file names as its EOS."""


def tokenizer_files(metadata: Metadata) -> dict[str, str]:
    """The content of tokenizer.json, tokenizer_config.json and, when the model has one, chat_template.jinja.

    Raises: ValueError for a tokenizer of another kind than these two, or whose treatment of text is unknown.
    """
    tokens = metadata.tokens
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise ValueError(
            f"{metadata.path} names {len(tokens) - len(vocab)} tokens twice; its tokenizer is damaged"
        )
    files = {"tokenizer.json": _tokenizer(metadata, vocab).to_str(pretty=True)}
    config: dict[str, Any] = {
        # The class that takes tokenizer.json as it is; a named one (GPT2Tokenizer) rebuilds its splitting.
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata.own_count("context_length"),
    }
    for role, key in (
        ("bos_token", "bos_token_id"),
        ("eos_token", "eos_token_id"),
        ("unk_token", "unknown_token_id"),
        ("pad_token", "padding_token_id"),
    ):
        token_id = metadata.token_id(key, len(tokens))
        if token_id is not None:
            config[role] = tokens[token_id]
    files["tokenizer_config.json"] = json.dumps(config, indent=2, ensure_ascii=False) + "\n"
    template = metadata.get("tokenizer.chat_template")
    if template is not None:
        files["chat_template.jinja"] = template
    return files


def eos_token_ids(metadata: Metadata) -> list[int]:
    """Every token that ends an answer, the file's own EOS first.

    A chat model's EOS is its end of turn (`<|im_end|>`); it also must stop at its end of text, which the metadata has
    no field for, so the well-known names among the control tokens are added.
    """
    tokens = metadata.tokens
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    ids = [
        metadata.token_id(key, len(tokens))
        for key in ("eos_token_id", "eot_token_id", "eom_token_id")
    ]
    place_of = {
        token: place for place, token in enumerate(tokens[: len(kinds)]) if kinds[place] == CONTROL
    }
    ids += [place_of.get(token) for token in _END_TOKENS]
    return list(dict.fromkeys(token_id for token_id in ids if token_id is not None))


def _tokenizer(metadata: Metadata, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import processors

    kinds = {"gpt2": _byte_level_bpe, "llama": sentencepiece_bpe}
    kind = str(metadata.require("tokenizer.ggml.model"))
    if kind not in kinds:
        raise ValueError(
            f"{metadata.path} has a tokenizer of kind {kind!r}; the conversion supports byte-level BPE ('gpt2') and "
            "SentencePiece ('llama') only: give the model's Hugging Face folder instead"
        )
    tokenizer = kinds[kind](metadata, vocab)
    # llama.cpp's rule: what the file says, else SentencePiece and Llama 3 add a BOS.
    adds_bos = kind == "llama" or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
    if metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        before = tokenizer.post_processor
        bos = _bos_template(metadata, list(vocab))
        tokenizer.post_processor = bos if before is None else processors.Sequence([before, bos])
    return tokenizer


def _bos_template(metadata: Metadata, tokens: list[str]) -> Any:
    from tokenizers import processors

    bos_id = metadata.token_id("bos_token_id", len(tokens))
    if bos_id is None:
        raise ValueError(
            f"{metadata.path} puts a BOS token before each text but names none; its tokenizer is damaged"
        )
    bos = tokens[bos_id]
    return processors.TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, bos_id)]
    )


def _byte_level_bpe(metadata: Metadata, vocab: dict[str, int]) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors

    path, tokens = metadata.path, list(vocab)
    merges = [_pair(merge, path) for merge in metadata.require("tokenizer.ggml.merges")]
    pre = metadata.get("tokenizer.ggml.pre", "default")
    try:
        bpe = models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe")
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path} has a tokenizer whose merges do not fit: {error}") from error
    tokenizer = Tokenizer(bpe)
    tokenizer.pre_tokenizer = _pre_tokenizer(pre, path)
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    kinds = metadata.get("tokenizer.ggml.token_type") or []
    added = [
        AddedToken(token, special=kind == CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=False)
        if kind in (CONTROL, USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _pre_tokenizer(name: str, path: Path) -> Any:
    from tokenizers import Regex, pre_tokenizers

    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)

    def split(pattern: str) -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    known = {
        "gpt-2": lambda: byte_level,
        # Every digit is a token of its own, then GPT-2's splitting.
        "smollm": lambda: pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), byte_level]
        ),
        "llama-bpe": lambda: split(_LLAMA3_SPLIT),
        "qwen2": lambda: split(_QWEN2_SPLIT),
    }
    if name not in known:
        raise ValueError(
            f"{path} splits text the {name!r} way; the conversion knows {', '.join(known)}: "
            "give the model's Hugging Face folder instead"
        )
    return known[name]()


def _pair(merge: str, path: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not space or not left or not right:
        raise ValueError(f"{path} has a merge {merge!r}, not two pieces; its tokenizer is damaged")
    return left, right
