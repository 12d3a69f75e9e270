"""A SentencePiece BPE vocabulary (tokens, scores, kinds) as a tokenizer of the `tokenizers` package.

SentencePiece has no list of merges: of all neighbours whose joined text is a token it joins the pair of the highest
score, the leftmost of equals. So each way to split a normal token into two normal tokens becomes a merge, ordered by
the token's score. What is no token falls back to the tokens of its UTF-8 bytes. Spaces are written as U+2581, so a text
that holds that character itself comes back with a space there, as from SentencePiece.

User-defined tokens (Gemma: runs of spaces, of newlines and of tabs, HTML tags) are found in the raw text first, the
longest at each place, and never merge with anything: that is what an added token does.

Source: SentencePiece's BPE; the order of a token's own splits is that of transformers' conversion of Gemma.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .gguf_metadata import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, Metadata

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPACE = "\u2581"


def sentencepiece_bpe(metadata: Metadata, vocab: dict[str, int]) -> Tokenizer:
    """The tokenizer of a GGUF file with `tokenizer.ggml.model` = `llama`; `vocab` is in order of ids.

    Raises: ValueError when the vocabulary is damaged, has no bytes to fall back to, or treats text in a way that the
        file only hints at (a space before the text, removed spaces, a character map).
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers

    _refuse_other_text_rules(metadata)
    tokens = list(vocab)
    kinds = _per_token(metadata, "token_type", len(tokens))
    scores = _per_token(metadata, "scores", len(tokens))
    bytes_named = [token for token, kind in zip(tokens, kinds, strict=True) if kind == BYTE]
    if sorted(bytes_named) != [f"<0x{byte:02X}>" for byte in range(256)]:
        raise ValueError(
            f"{metadata.path} has {len(bytes_named)} byte tokens, expected 256 from <0x00> to <0xFF>; "
            "text outside its vocabulary would be lost: give the model's Hugging Face folder instead"
        )
    unknown_id = metadata.token_id("unknown_token_id", len(tokens))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_by_score(tokens, scores, kinds),
            unk_token=None if unknown_id is None else tokens[unknown_id],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    tokenizer.normalizer = normalizers.Replace(" ", _SPACE)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kind != USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if kind in (CONTROL, UNKNOWN, USER_DEFINED)
        ]
    )
    return tokenizer


def merges_by_score(
    tokens: list[str], scores: list[float], kinds: list[int]
) -> list[tuple[str, str]]:
    """Every split of a normal token into two normal tokens, the best token first; of one token, the longest left part.

    Example: tokens a, b, c, ab, bc, abc with scores 0, 0, 0, -2, -1, -3 -> (b, c), (a, b), (ab, c), (a, bc).
    """
    normal = {
        token: score
        for token, score, kind in zip(tokens, scores, kinds, strict=True)
        if kind == NORMAL
    }
    merges = [
        (-score, token[:place], token[place:])
        for token, score in normal.items()
        for place in range(len(token) - 1, 0, -1)
        if token[:place] in normal and token[place:] in normal
    ]
    merges.sort(key=lambda merge: merge[0])  # stable: a token's own splits stay in order
    return [(left, right) for _, left, right in merges]


def _refuse_other_text_rules(metadata: Metadata) -> None:
    for key, default, what in (
        ("add_space_prefix", True, "puts a space before each text"),
        ("remove_extra_whitespaces", False, "removes spaces from the text"),
        ("precompiled_charsmap", None, "replaces characters of the text"),
    ):
        if metadata.get(f"tokenizer.ggml.{key}", default):
            raise ValueError(
                f"{metadata.path} has a SentencePiece tokenizer that {what} (tokenizer.ggml.{key}), which the "
                "conversion does not support; give the model's Hugging Face folder instead"
            )


def _per_token(metadata: Metadata, key: str, num_tokens: int) -> list[Any]:
    values = metadata.require(f"tokenizer.ggml.{key}")
    if (
        not isinstance(values, list)
        or len(values) != num_tokens
        or not all(isinstance(value, int | float) for value in values)
    ):
        raise ValueError(
            f"{metadata.path} has no list of {num_tokens} numbers in tokenizer.ggml.{key}, one for each token; "
            "its tokenizer is damaged"
        )
    return values
