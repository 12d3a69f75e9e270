"""The key-value part of a GGUF file, with a sentence for what is missing or of another form.

Model numbers lie under the architecture's own prefix (`llama.block_count`); methods with `own` in their name add it.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from gguf import GGUFReader

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
"""Kinds of tokens in `tokenizer.ggml.token_type` (gguf.TokenType)."""


class Metadata:
    """Reads values; remembers the file's path for sentences and the names of its tensors."""

    def __init__(self, reader: GGUFReader, path: Path):
        self._reader = reader
        self.path = path
        self.tensor_names = frozenset(tensor.name for tensor in reader.tensors)

    @property
    def architecture(self) -> str:
        return str(self.require("general.architecture"))

    def get(self, key: str, default: Any = None) -> Any:
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def require(self, key: str) -> Any:
        value = self.get(key)
        if value is None:
            raise ValueError(f"{self.path} has no {key!r} in its metadata; it is not a whole model")
        return value

    def own(self, key: str, default: Any = None) -> Any:
        """The value of a key of the architecture."""
        return self.get(f"{self.architecture}.{key}", default)

    def own_count(self, key: str, default: int | None = None) -> int:
        """A whole number that holds for all layers; required where there is no default.

        Raises: ValueError when it is missing or differs between layers.
        """
        full_key = f"{self.architecture}.{key}"
        value = self.require(full_key) if default is None else self.get(full_key, default)
        if not isinstance(value, int):
            raise ValueError(
                f"{self.path} has {full_key} = {value!r}; the conversion supports one number for all layers"
            )
        return value

    def own_real(self, key: str, default: float | None = None) -> float:
        """A float32 as the shortest decimal that is the same: the file's 9.999999747378752e-06 is the model's 1e-05."""
        full_key = f"{self.architecture}.{key}"
        value = self.require(full_key) if default is None else self.get(full_key, default)
        if not isinstance(value, int | float):
            raise ValueError(f"{self.path} has {full_key} = {value!r:.80}, expected one number")
        return float(str(np.float32(value)))

    def refuse_own(self, features: dict[str, str]) -> None:
        """Refuse the file when a key (-> what it means) is set to something.

        Raises: ValueError naming the first one.
        """
        for key, what in features.items():
            value = self.own(key)
            if value not in (None, 0, "", "none"):
                raise ValueError(
                    f"{self.path} has {what} ({self.architecture}.{key} = {value!r}), which the conversion does not "
                    "support; give the model's Hugging Face folder instead"
                )

    @property
    def tokens(self) -> list[str]:
        """The vocabulary, in order of ids."""
        tokens = self.require("tokenizer.ggml.tokens")
        if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
            raise ValueError(f"{self.path} has a vocabulary that is no list of strings")
        return tokens

    def token_id(self, role: str, num_tokens: int) -> int | None:
        """The id of `tokenizer.ggml.<role>`, checked to be one of the vocabulary's."""
        token_id = self.get(f"tokenizer.ggml.{role}")
        if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < num_tokens):
            raise ValueError(
                f"{self.path} has {role} {token_id!r}; its vocabulary is [0, {num_tokens})"
            )
        return token_id
