"""Text to token ids and back: the tokenizer, the chat template and the incremental detokenizer of one model folder.

Used by fronts and by the embedded engine. Needs `tokenizers` and jinja2 only: transformers' tokenizer class takes 3.5 s
to load because it imports torch. Gives the ids and the text that transformers gives on the same folder. The tokenizer
is read at first use, so a folder without tokenizer.json still serves callers who send token ids.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .chat_template import ChatTemplate, load_chat_templates
from .sampling_defaults import sampling_defaults

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
_REPLACEMENT = "\ufffd"
"""What a tokenizer prints for bytes that are no UTF-8 (yet)."""


class TextProcessor:
    """The text side of one model folder. Thread-safe: nothing changes after the first use of a part.

    Raises: ValueError from each text function when the folder lacks what it needs.
    """

    def __init__(self, model_dir: str | Path):
        self.model_dir = Path(model_dir)
        self._lock = threading.Lock()
        self._loaded: Tokenizer | None = None
        self._compiled: dict[str, ChatTemplate] = {}
        self._token_texts: dict[int, str] = {}

    # Facts of the folder

    @property
    def has_tokenizer(self) -> bool:
        return (self.model_dir / "tokenizer.json").is_file()

    @property
    def has_chat_template(self) -> bool:
        return "default" in self._chat_templates

    @cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The ids that end an answer: every one that either file names, as the worker reads them; there may be none."""
        ids: dict[int, None] = {}
        for values in (self._json("generation_config.json"), self._model_config):
            named = values.get("eos_token_id")
            if named is not None:
                ids |= dict.fromkeys(named if isinstance(named, list) else [int(named)])
        return tuple(ids)

    @cached_property
    def sampling_defaults(self) -> dict[str, Any]:
        """Fields of SamplingParams for a caller who gives none."""
        return sampling_defaults(self._json("generation_config.json"))

    @cached_property
    def vocab_size(self) -> int:
        """How many token ids the model knows: rows of its embedding, of which the tokenizer may name fewer."""
        size = self._model_config.get("vocab_size")
        return int(size) if size is not None else self._tokenizer.get_vocab_size()

    @cached_property
    def special_tokens(self) -> dict[str, str]:
        """bos_token, eos_token, ... -> their text, as chat templates see them."""
        named: dict[str, str] = {}
        # The second file is what older folders have; an entry of the first one wins.
        for values in (self._json("special_tokens_map.json"), self._tokenizer_config):
            for name in _SPECIAL_TOKENS:
                token = values.get(name)
                if isinstance(token, Mapping):
                    token = token.get("content")
                if isinstance(token, str):
                    named[name] = token
        return {name: named[name] for name in _SPECIAL_TOKENS if name in named}

    def tokenizer_json(self) -> str:
        """The tokenizer as the text of a tokenizer.json, with all that this folder's other files mark as special."""
        return self._tokenizer.to_str()

    # Text to ids

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text, with the BOS that tokenizer.json puts before it, if it does.

        (`add_bos_token` of tokenizer_config.json decides nothing beside a tokenizer.json, in transformers neither.)

        Raises: ValueError for text that is not Unicode (a lone surrogate); TypeError for something that is no text.
        """
        if not isinstance(text, str):
            raise TypeError(f"a prompt's text must be a str, got {type(text).__name__}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise ValueError(
                f"the text is not valid Unicode at character {error.start}: {error.reason}; "
                "remove the lone surrogate"
            ) from None
        return self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def apply_chat_template(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        **variables: Any,
    ) -> str:
        """The prompt's text for a conversation: `[{"role": "user", "content": "..."}]`.

        `variables` (tools, documents, enable_thinking, ...) go to the template by their names. The text already holds
        the special tokens: encode it with `add_special_tokens=False`, or use `encode_chat`.

        Raises: ValueError when the model has no template, or the template refuses the messages.
        """
        template = self._chat_template(tools=bool(variables.get("tools")))
        return template.render(
            messages,
            add_generation_prompt=add_generation_prompt,
            variables={**self.special_tokens, **variables},
        )

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        /,
        **variables: Any,
    ) -> list[int]:
        """Token ids of a conversation. The template writes the BOS itself, so none is added."""
        text = self.apply_chat_template(messages, add_generation_prompt, **variables)
        return self.encode(text, add_special_tokens=False)

    # Ids to text

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """Text of token ids; an id that the tokenizer does not name gives no text."""
        return self._tokenizer.decode(
            [int(token_id) for token_id in token_ids], skip_special_tokens=skip_special_tokens
        )

    def token_text(self, token_id: int) -> str:
        """The text of one token by itself, a special one too; bytes that are no character by themselves are U+FFFD."""
        text = self._token_texts.get(token_id)
        if text is None:
            text = self._token_texts[token_id] = self.decode([token_id], skip_special_tokens=False)
        return text

    # Parts, each read once

    @property
    def _tokenizer(self) -> Tokenizer:
        if self._loaded is None:
            with self._lock:
                if self._loaded is None:
                    self._loaded = self._load_tokenizer()
        return self._loaded

    def _load_tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = self.model_dir / "tokenizer.json"
        if not path.is_file():
            raise ValueError(
                f"{self.model_dir} has no tokenizer.json, so it takes and gives token ids only; "
                "send prompts as lists of token ids, or add the file"
            )
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception
            raise ValueError(f"cannot read {path}: {error}") from error
        # A file may carry the training run's own limits; a prompt is never cut or padded silently.
        tokenizer.no_truncation()
        tokenizer.no_padding()
        self._add_configured_tokens(tokenizer)
        return tokenizer

    def _add_configured_tokens(self, tokenizer: Tokenizer) -> None:
        """Older folders name special tokens in tokenizer_config.json that tokenizer.json does not mark."""
        marked = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
        missing = [token for token in self.special_tokens.values() if token not in marked]
        if missing:
            tokenizer.add_special_tokens(list(dict.fromkeys(missing)))

    def _chat_template(self, *, tools: bool) -> ChatTemplate:
        name = "tool_use" if tools and "tool_use" in self._chat_templates else "default"
        source = self._chat_templates.get(name)
        if source is None:
            raise ValueError(
                f"{self.model_dir} has no chat template (a base model continues text and does not chat); "
                "send the prompt as text, or add chat_template.jinja"
            )
        with self._lock:
            if name not in self._compiled:
                self._compiled[name] = ChatTemplate(source)
            return self._compiled[name]

    @cached_property
    def _chat_templates(self) -> dict[str, str]:
        return load_chat_templates(self.model_dir, self._tokenizer_config)

    @cached_property
    def _tokenizer_config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json")

    @cached_property
    def _model_config(self) -> dict[str, Any]:
        """config.json; a multimodal model's text part lies one level down."""
        config = self._json("config.json")
        return {**config, **config.get("text_config", {})}

    def _json(self, name: str) -> dict[str, Any]:
        path = self.model_dir / name
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return {}
        except (OSError, ValueError) as error:
            raise ValueError(f"cannot read {path}: {error}") from error
        if not isinstance(values, dict):
            raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
        return values

    # What the incremental detokenizer asks

    @cached_property
    def special_token_ids(self) -> frozenset[int]:
        """The ids that decoding skips."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(token_id for token_id, token in added.items() if token.special)

    @cached_property
    def is_byte_level(self) -> bool:
        """Whether tokens are pieces of UTF-8 bytes (GPT-2, Llama 3), so that one may end inside a character."""
        return "ByteLevel" in str(self._tokenizer.decoder)

    def names(self, token_id: int) -> bool:
        """Whether the tokenizer has a token of this id."""
        return self._tokenizer.id_to_token(token_id) is not None

    @cached_property
    def byte_tokens(self) -> dict[int, int]:
        """Id -> byte of the single-byte tokens of a byte-fallback vocabulary (`<0xE1>`: Llama 2, Gemma); else empty."""
        return {token_id: byte for byte, token_id in self.tokens_of_bytes.items()}

    @cached_property
    def tokens_of_bytes(self) -> dict[int, int]:
        """`byte_tokens` the other way round. A byte may lack one (Gemma 1 has its own tab), those of U+FFFD not."""
        ids = {byte: self._tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)}
        named = {byte: token_id for byte, token_id in ids.items() if token_id is not None}
        return named if named.keys() >= set(_REPLACEMENT.encode()) else {}


class IncrementalDetokenizer:
    """Turn one request's output tokens into text as they come; never half a character.

    `append` returns only what no later token can change: the bytes of an unfinished character are held until it is
    complete, or until the request ends, which flushes them as U+FFFD. All pieces together are the output's text as it
    reads after the prompt: `decode(prompt + output)` without the prompt's part. When the prompt itself ends inside a
    character, the output that completes it begins with that character. Broken bytes are one U+FFFD for each broken
    character; a byte-fallback decoder would print the whole run of bytes so, with the characters already given.

    Only a window of recent tokens is decoded again, so a token costs the same however long the output is. Belongs to
    one thread. Without a tokenizer (the folder has none) every piece is "".

    Example: byte tokens F0 9F | 98 | 80 -> "", "", one emoji.
    """

    _CONTEXT_TOKENS = 6
    _WINDOW_TOKENS = 24

    def __init__(
        self,
        processor: TextProcessor,
        prompt_ids: Sequence[int],
        skip_special_tokens: bool = True,
    ):
        self._processor = processor
        self._skip_special_tokens = skip_special_tokens
        self._has_text = processor.has_tokenizer
        # The recent tokens that have text, decoded at each append: a few that are only context, then the new ones.
        self._window: list[int] = []
        # Of the window's text, what callers already have or what is the prompt's.
        self._given = ""
        # The prompt's text with its unfinished character, which stays the prompt's unless the output completes it.
        self._prompt_text = ""
        # How many of the window's tokens end between two characters: a place where it may be cut.
        self._whole = 0
        if self._has_text:
            self._window = self._prompt_context(prompt_ids)
            self._given, self._whole = self._sure_text()
            self._prompt_text = self._decode(self._window)

    def append(self, token_ids: Iterable[int], finished: bool) -> str:
        """The new text after `token_ids`; with `finished`, also what was held."""
        if not self._has_text:
            return ""
        self._window.extend(token_id for token_id in map(int, token_ids) if self._shows(token_id))
        text, num_whole = (self._decode(self._window), 0) if finished else self._sure_text()
        if self._prompt_text and text.startswith(self._prompt_text):
            self._given, self._prompt_text = self._prompt_text, ""
        new = text[len(self._given) :]
        if new:
            self._given, self._prompt_text = text, ""
        if not finished:
            self._slide(num_whole)
        return new

    def _sure_text(self) -> tuple[str, int]:
        """The window's text without an unfinished character at its end, and how many tokens it is the text of.

        0 tokens: the text ends inside a token.
        """
        if self._processor.is_byte_level:
            # The decoder prints one U+FFFD for all bytes of an unfinished character.
            text = self._decode(self._window)
            if text.endswith(_REPLACEMENT):
                return text[:-1], 0
            return text, len(self._window)
        num_tokens = len(self._window) - self._num_unfinished_bytes()
        return self._decode(self._window[:num_tokens]), num_tokens

    def _num_unfinished_bytes(self) -> int:
        """How many single-byte tokens at the window's end wait for the rest of their character."""
        byte_of = self._processor.byte_tokens
        for count, token_id in enumerate(reversed(self._window[-3:]), start=1):
            byte = byte_of.get(token_id)
            if byte is None or byte < 0x80 or byte > 0xF4:
                return 0
            if byte >= 0xC2:  # the first byte of a character, which says how many it has
                return count if count < 2 + (byte >= 0xE0) + (byte >= 0xF0) else 0
        return 0

    def _slide(self, num_whole: int) -> None:
        """Forget old tokens once the window is long, without changing what is still to be given."""
        cut = 0
        if num_whole:
            cut, self._whole = self._whole, num_whole
        elif len(self._window) - self._whole > self._WINDOW_TOKENS:
            # Each piece of a byte-level text ends inside a character, or the model talks no UTF-8: there is no good
            # place to cut, and none is needed, for what a cut breaks at the front stays the same from then on.
            cut = len(self._window) - self._CONTEXT_TOKENS
        if len(self._window) <= self._WINDOW_TOKENS or not cut:
            return
        if not self._decode(self._window[cut:]):
            return  # Some decoders strip the space of a text's first word: context must have text.
        self._window = self._window[cut:]
        self._given, self._whole = self._sure_text()

    def _prompt_context(self, prompt_ids: Sequence[int]) -> list[int]:
        """The last few prompt tokens that have text, and not the middle of a run of single bytes."""
        context: list[int] = []
        for token_id in map(int, reversed(prompt_ids[-256:])):
            if not self._shows(token_id):
                continue
            is_long = len(context) >= self._CONTEXT_TOKENS
            if is_long and context[-1] not in self._processor.byte_tokens:
                break
            context.append(token_id)
        return context[::-1]

    def _shows(self, token_id: int) -> bool:
        if self._skip_special_tokens and token_id in self._processor.special_token_ids:
            return False
        return self._processor.names(token_id)

    def _decode(self, token_ids: list[int]) -> str:
        # Special tokens are left out of the window where they are not wanted.
        return self._processor.decode(self._repaired(token_ids), skip_special_tokens=False)

    def _repaired(self, token_ids: list[int]) -> list[int]:
        """The tokens with each run of single bytes made valid UTF-8: what is broken becomes the bytes of U+FFFD."""
        byte_of = self._processor.byte_tokens
        if byte_of.keys().isdisjoint(token_ids):
            return token_ids
        repaired: list[int] = []
        for is_bytes, run in groupby(token_ids, byte_of.__contains__):
            if is_bytes:
                text = bytes(byte_of[token_id] for token_id in run).decode(errors="replace")
                repaired += [self._processor.tokens_of_bytes[byte] for byte in text.encode()]
            else:
                repaired += run
        return repaired
