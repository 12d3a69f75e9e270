"""What a caller may say of a chat beside its messages, checked once, here. Renders nothing: `chat_template.py` does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Tools = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class ChatOptions:
    """What the chat template is told beside the messages.

    tools: descriptions of functions that the model may call, as JSON schemas; what they must hold is the template's
        affair. add_generation_prompt: end the prompt with the beginning of the assistant's answer.
    chat_template_kwargs: further variables of the template, such as enable_thinking.
    Raises: ValueError that names the option.
    """

    tools: Tools | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.tools is not None and not (
            isinstance(self.tools, list | tuple)
            and all(isinstance(tool, Mapping) for tool in self.tools)
        ):
            raise ValueError(f"tools must be a list of dicts, got {self.tools!r:.60}")
        if not isinstance(self.add_generation_prompt, bool):
            raise ValueError(
                f"add_generation_prompt must be True or False, got {self.add_generation_prompt!r:.60}"
            )
        values = {} if self.chat_template_kwargs is None else self.chat_template_kwargs
        if not isinstance(values, Mapping) or not all(isinstance(name, str) for name in values):
            raise ValueError(
                f"chat_template_kwargs must be a dict of names to values, got {values!r:.60}"
            )
        taken = {"messages", "tools", "add_generation_prompt"} & values.keys()
        if taken:
            raise ValueError(
                f"chat_template_kwargs must not hold {', '.join(sorted(taken))}; that has an argument of its own"
            )
        object.__setattr__(self, "chat_template_kwargs", dict(values))

    @property
    def variables(self) -> dict[str, Any]:
        """The template's variables beside messages and add_generation_prompt."""
        return {"tools": self.tools, **(self.chat_template_kwargs or {})}
