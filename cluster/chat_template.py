"""Chat templates: which one a model folder has, and how messages become text with it.

Renders with jinja2 as transformers does (a sandbox, trimmed blocks, `raise_exception`, `strftime_now`, `tojson`, loop
controls, `{% generation %}` blocks), so that a model sees the very prompt that it was trained on. Templates are other
people's code: they run in jinja2's immutable sandbox and see plain data only.

Two things are done to messages first. A null field is left out, as in transformers: clients mean "not given", where
templates would print the word None. Content in parts becomes one text for a template that reads none of them: it would
print the list itself, or nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

_READS_PARTS = re.compile(
    r"""\.text\b|\[["']text["']\]|attribute=["']text["']|\.get\(["']text["']"""
)
_TEXT_PARTS = ("text", "input_text", "output_text")
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


def load_chat_templates(model_dir: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """The folder's templates by name ("default", "tool_use", ...); empty when it has none.

    Files win over the entry in tokenizer_config.json, as in transformers.
    Raises: ValueError for an entry that is neither a template nor templates by their names.
    """
    templates: dict[str, str] = {}
    default = model_dir / "chat_template.jinja"
    if default.is_file():
        templates["default"] = default.read_text(encoding="utf-8")
    for file in sorted((model_dir / "additional_chat_templates").glob("*.jinja")):
        templates[file.stem] = file.read_text(encoding="utf-8")
    if templates:
        return templates
    configured = tokenizer_config.get("chat_template") or []
    if isinstance(configured, str):
        return {"default": configured}
    named = configured
    if isinstance(configured, list):
        entries = [entry if isinstance(entry, Mapping) else {} for entry in configured]
        named = {entry.get("name"): entry.get("template") for entry in entries}
    if not isinstance(named, Mapping) or not all(
        isinstance(text, str) for entry in named.items() for text in entry
    ):
        raise ValueError(
            f"{model_dir / 'tokenizer_config.json'}: chat_template must be text, or a list of entries with a name and "
            "a template; mend it, or add chat_template.jinja"
        )
    return dict(named)


class ChatTemplate:
    """One compiled template; rendering is thread-safe.

    Raises: ValueError when the template does not compile.
    """

    def __init__(self, source: str):
        from jinja2.exceptions import TemplateError

        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise ValueError(f"the model's chat template does not compile: {error}") from error
        self._reads_parts = _READS_PARTS.search(source) is not None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool,
        variables: Mapping[str, Any],
    ) -> str:
        """Text of a conversation. `variables` are the model's special tokens and what the caller adds (tools, ...).

        Raises: ValueError for messages that are no list of dicts, or that the template refuses.
        """
        values = {"tools": None, "documents": None, **variables}
        try:
            return self._template.render(
                {name: _plain(value, name) for name, value in values.items()}
                | {
                    "messages": _checked(messages, as_text=not self._reads_parts),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (
            Exception
        ) as error:  # foreign code: whatever it raises is its answer to these messages
            raise ValueError(f"the model's chat template refused the messages: {error}") from error


def _checked(messages: Sequence[Mapping[str, Any]], *, as_text: bool) -> list[dict[str, Any]]:
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence):
        raise ValueError(
            f"messages must be a list of {{'role': ..., 'content': ...}}, got {type(messages).__name__}"
        )
    if not messages:
        raise ValueError("messages must hold at least one message, got none")
    checked = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise ValueError(
                f"messages[{index}] must be a dict with a 'role' string, got {message!r:.80}"
            )
        plain = {
            key: _plain(value, f"messages[{index}][{key!r}]")
            for key, value in message.items()
            if value is not None
        }
        if as_text and _is_in_parts(plain.get("content")):
            plain["content"] = _text_of(plain["content"], f"messages[{index}]")
        checked.append(_with_reasoning(plain))
    return checked


def _is_in_parts(content: Any) -> bool:
    return (
        isinstance(content, list)
        and len(content) > 0
        and all(isinstance(part, dict) and isinstance(part.get("type"), str) for part in content)
    )


def _text_of(parts: list[dict[str, Any]], where: str) -> str:
    """In lines, as vLLM has it."""
    for part in parts:
        if part["type"] not in _TEXT_PARTS or not isinstance(part.get("text"), str):
            raise ValueError(
                f"{where} has a part of type {part['type']!r:.40}; this model takes text alone"
            )
    return "\n".join(part["text"] for part in parts)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning the names that templates read, whichever one the client used."""
    reasoning = next((message[name] for name in _REASONING_FIELDS if name in message), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any, where: str) -> Any:
    """A copy made of JSON's types alone: other objects have methods that a template could call."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, where) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, where) for item in value]
    raise ValueError(
        f"{where} must be made of text, numbers, lists and dicts, got {type(value).__name__}"
    )


def _environment() -> Any:
    import jinja2.ext
    import jinja2.nodes
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the assistant's words for training; here its body is just text."""

        tags = {"generation"}  # noqa: RUF012 - jinja2's own interface

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body).set_lineno(line)

    def raise_exception(message: str) -> None:
        raise TemplateError(message)

    def strftime_now(form: str) -> str:
        return datetime.now().strftime(form)

    def to_json(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        # jinja2's own filter escapes HTML, which no model was trained on.
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = strftime_now
    return environment
