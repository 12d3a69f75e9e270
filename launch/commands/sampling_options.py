"""How `rowcast run` chooses tokens: its options, and what holds where none is given.

What is not given is what the model's generation_config.json recommends. A model that recommends nothing about chance
answers greedily, unless an option asks for chance: an option never goes without effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from ...scheduler.sampling_params import SamplingParams
from ...scheduler.structured_outputs import StructuredOutputsParams

DEFAULT_MAX_TOKENS = 256
_CHANCE = (
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
)  # who gives one of them wants no greedy answer
_PENALTIES = ("repetition_penalty", "presence_penalty", "frequency_penalty")
_PANEL = "Choosing tokens (where not given: what the model's generation_config.json says)"


def _option(*names: str, metavar: str, help: str) -> Any:
    return typer.Option(
        *names, metavar=metavar, help=help, show_default=False, rich_help_panel=_PANEL
    )


MaxTokens = Annotated[
    int | None,
    _option(
        "--max-tokens", metavar="N", help=f"Tokens to answer at most [else {DEFAULT_MAX_TOKENS}]"
    ),
]
MinTokens = Annotated[
    int | None, _option("--min-tokens", metavar="N", help="Tokens before the answer may end")
]
Temperature = Annotated[
    float | None,
    _option(
        "--temperature",
        metavar="T",
        help="0 is greedy, up to 2 [else 0; 1 beside --top-k, --top-p, --min-p or --seed]",
    ),
]
TopK = Annotated[
    int | None, _option("--top-k", metavar="K", help="Keep the K likeliest; 0 keeps all")
]
TopP = Annotated[
    float | None,
    _option("--top-p", metavar="P", help="Keep the likeliest tokens up to this probability"),
]
MinP = Annotated[
    float | None,
    _option(
        "--min-p", metavar="P", help="Keep what is at least P times as likely as the likeliest"
    ),
]
Seed = Annotated[int | None, _option("--seed", metavar="N", help="Makes chance repeatable")]
PresencePenalty = Annotated[
    float | None,
    _option("--presence-penalty", metavar="X", help="Against answering a token again, -2 to 2"),
]
FrequencyPenalty = Annotated[
    float | None,
    _option("--frequency-penalty", metavar="X", help="The same for each time it came, -2 to 2"),
]
RepetitionPenalty = Annotated[
    float | None,
    _option(
        "--repetition-penalty",
        metavar="X",
        help="Above 1: against tokens of prompt and answer, up to 2",
    ),
]
Stop = Annotated[
    list[str] | None,
    _option("--stop", metavar="TEXT", help="End before this text; may be given four times"),
]
BadWord = Annotated[
    list[str] | None,
    _option("--bad-word", metavar="TEXT", help="Never answer this; may be given several times"),
]
JsonSchema = Annotated[
    str | None,
    _option("--json-schema", metavar="FILE|JSON", help="Answer with JSON of this schema"),
]
IgnoreEos = Annotated[
    bool,
    typer.Option("--ignore-eos", help="Go on past the model's end of text", rich_help_panel=_PANEL),
]


def json_form(schema: str | None) -> StructuredOutputsParams | None:
    """What --json-schema asks for: a schema's text, or the file that holds it.

    Raises: ValueError if the file cannot be read, or holds no JSON object.
    """
    if schema is None:
        return None
    if not schema.lstrip().startswith("{"):
        try:
            schema = Path(schema).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            raise ValueError(f"--json-schema: {schema} cannot be read: {why}") from None
    return StructuredOutputsParams(json=schema)


def given(**options: Any) -> dict[str, Any]:
    """The fields that were given, checked as far as no model is needed.

    Raises: ValueError naming the field and its range.
    """
    fields: dict[str, Any] = {
        name: value
        for name, value in options.items()
        if value is not None and value is not False and value != []
    }
    SamplingParams(**(dict[str, Any](max_tokens=None) | fields))
    return fields


def sampling_params(fields: Mapping[str, Any], recommended: Mapping[str, Any]) -> SamplingParams:
    """What holds: an option, else the model's recommendation, else the command's own default.

    recommended: the fields that generation_config.json names (`LLM.sampling_defaults`).
    Example: nothing given, nothing recommended -> greedy, 256 tokens; --top-p 0.9 -> temperature 1.
    Raises: ValueError as `given`, also for what the model recommends.
    """
    holds: dict[str, Any] = {**recommended, **fields}
    if "max_tokens" not in fields:
        most = recommended.get("max_tokens", DEFAULT_MAX_TOKENS)
        holds["max_tokens"] = max(most, fields.get("min_tokens", 0))
    if not any(name in holds for name in _CHANCE):
        holds["temperature"] = 0.0
    return SamplingParams(**holds)


def description(
    params: SamplingParams, fields: Mapping[str, Any], recommended: Mapping[str, Any]
) -> str:
    """How tokens were chosen, in a few words: `greedy`, or `temperature 0.6 (the model's), seed 3`."""
    nothing = SamplingParams()
    said = ["greedy"] if params.temperature == 0 else []
    for name in (*_CHANCE, *_PENALTIES) if params.temperature else _PENALTIES:
        value = getattr(params, name)
        if name == "temperature" or value != getattr(nothing, name):
            whose = " (the model's)" if name in recommended and name not in fields else ""
            said.append(f"{name} {value if name == 'seed' else format(value, 'g')}{whose}")
    return ", ".join(said)
