"""Chat templates as models ship them, tools and all: the text is transformers', and so is what is refused."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from rowcast.cluster.chat_options import ChatOptions
from rowcast.cluster.text import TextProcessor
from tokenizers import Tokenizer, models

SYSTEM = {"role": "system", "content": "Be brief.\n"}
ASK = {"role": "user", "content": " What's the weather in <Ærø>? "}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {"type": "function", "function": {"name": "weather", "arguments": {"city": "Ærø", "n": 1}}}
    ],
}
ANSWER = {"role": "tool", "name": "weather", "content": '{"wind": "5 m/s"}'}
CONVERSATIONS = {
    "a question": [ASK],
    "a system message": [SYSTEM, ASK],
    "a tool's answer": [SYSTEM, ASK, CALL, ANSWER],
    "a call beside no text": [ASK, {**CALL, "content": None}],
    "two of the user's": [ASK, ASK],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "Hi"}, {"type": "image"}]}],
}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "Tells the weather & 'wind' <now>.",
            "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
        },
    }
]

# In the manner of the model families, each with what is special to it.
TEMPLATES = {
    "chatml, tools as lines of JSON": """
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {{- "# Tools\\n<tools>" }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if message.role == "user" and message.content is string and not message.content.startswith('<x>') %}
        {%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.content is string %}{%- set content = message.content %}
    {%- else %}{%- set content = '' %}{%- endif %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {{- '<|im_start|>assistant\\n' + content }}
        {%- for tool_call in message.tool_calls or [] %}
            {%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n{"name": "' }}{{- tool_call.name }}{{- '", "arguments": ' }}
            {%- if tool_call.arguments is string %}{{- tool_call.arguments }}
            {%- else %}{{- tool_call.arguments | tojson }}{%- endif %}
            {{- '}' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {{- '<tool_response>' + content + '</tool_response>' }}
        {%- if loop.last or (messages[loop.index0 + 1].role != "tool") %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
""",
    "headers, today's date, indented tools": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}{%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}{%- set date_string = "26 Jul 2024" %}{%- endif %}
{%- endif %}
{%- if not tools is defined %}{%- set tools = none %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system_message = "" %}{%- endif %}
{{- "<|header|>system\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Today Date: " + date_string + "\\n\\n" }}
{%- if tools is not none %}
    {%- for t in tools %}
        {{- t | tojson(indent=4) }}
        {{- "\\n\\n" }}
    {%- endfor %}
{%- endif %}
{{- system_message }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|header|>' + message['role'] + '\\n\\n' + message['content'] | string | trim + '<|eot|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls|length == 1 %}{{- raise_exception("one tool-call at once") }}{%- endif %}
        {%- set tool_call = message.tool_calls[0].function %}
        {{- '{"name": "' + tool_call.name + '", "parameters": ' }}{{- tool_call.arguments | tojson }}{{- "}" }}
    {%- else %}
        {%- if message.content is mapping or message.content is iterable %}{{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|header|>assistant\\n\\n' }}{%- endif %}
""",
    "no system role, strict turns": """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{{ raise_exception('System role not supported') }}{% endif %}
{% for message in messages %}
{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}{% endif %}
{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}{% set role = message['role'] %}{% endif %}
{{ '<turn>' + role + '\\n' }}
{%- if message['content'] is string -%}{{ message['content'] | trim }}
{%- elif message['content'] is iterable -%}
    {%- for item in message['content'] -%}
        {%- if item['type'] == 'image' -%}{{ '<image>' }}
        {%- elif item['type'] == 'text' -%}{{ item['text'] | trim }}{%- endif -%}
    {%- endfor -%}
{%- else -%}{{ raise_exception("Invalid content type") }}{%- endif -%}
{{ '<end>\\n' }}{% endfor %}
{% if add_generation_prompt %}{{ '<turn>model\\n' }}{% endif %}""",
    "system before the last question, loop over a filter": """
{%- if messages[0]["role"] == "system" %}
    {%- set system_message = messages[0]["content"] %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set user_messages = loop_messages | selectattr("role", "equalto", "user") | list %}
{{- bos_token }}
{%- for message in loop_messages | rejectattr("role", "equalto", "tool_results") %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == user_messages[-1]) %}
            {{- "[TOOLS][" }}
            {%- for tool in tools %}
                {%- set tool = tool.function %}
                {{- '{"type": "function", "function": {' }}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val|tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
                {{- "}}" }}
            {%- endfor %}
            {{- "][/TOOLS]" }}
        {%- endif %}
        {%- if loop.last and system_message is defined %}
            {{- "[INST]" + system_message + "\\n\\n" + message["content"] | string + "[/INST]" }}
        {%- else %}{{- "[INST]" + message["content"] | string + "[/INST]" }}{%- endif %}
    {%- elif message["role"] == "assistant" %}
        {{- (message.content or "CALL") + eos_token }}
    {%- elif message["role"] == "tool" %}
        {{- raise_exception("Only user and assistant roles are supported, got " + message["role"]) }}
    {%- endif %}
{%- endfor %}
""",
}


def folder_with(template: str, folder: Path) -> Path:
    folder.mkdir()
    tokenizer = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 2}))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def text_or_refusal(render: Any, refusal: type[Exception]) -> tuple[str, str]:
    try:
        return "text", render()
    except refusal as error:
        return "refused", str(error)


@pytest.mark.parametrize("template", TEMPLATES)
def test_templates_of_model_families_render_as_in_transformers(
    template: str, tmp_path: Path
) -> None:
    """Every conversation, with and without tools, with and without the beginning of the answer."""
    from jinja2.exceptions import TemplateError
    from transformers import AutoTokenizer

    folder = folder_with(TEMPLATES[template], tmp_path / "model")
    reference, processor = AutoTokenizer.from_pretrained(folder), TextProcessor(folder)
    texts, refusals = set(), 0
    for name, messages in CONVERSATIONS.items():
        if name == "parts" and "item['text']" not in TEMPLATES[template]:
            continue  # the next test
        for tools in (None, TOOLS):
            for begun in (True, False):
                for more in ({}, {"enable_thinking": False}):
                    kind, expected = text_or_refusal(
                        lambda m=messages, t=tools, b=begun, v=more: reference.apply_chat_template(
                            m, tools=t, add_generation_prompt=b, tokenize=False, **v
                        ),
                        TemplateError,
                    )
                    options = ChatOptions(
                        tools=tools, add_generation_prompt=begun, chat_template_kwargs=more
                    )
                    given_kind, given = text_or_refusal(
                        lambda m=messages, o=options: processor.apply_chat_template(
                            m, o.add_generation_prompt, **o.variables
                        ),
                        ValueError,
                    )
                    assert given_kind == kind
                    if kind == "refused":
                        assert (
                            given == f"the model's chat template refused the messages: {expected}"
                        )
                        refusals += 1
                    else:
                        assert given == expected
                        texts.add(given)
    assert len(texts) >= 4
    assert bool(refusals) == (template in list(TEMPLATES)[2:])


@pytest.mark.parametrize("template", [name for name in TEMPLATES if "turns" not in name])
def test_a_template_that_reads_no_parts_gets_their_text(template: str, tmp_path: Path) -> None:
    """It printed Python's form of the list into the prompt, or left the question out."""
    processor = TextProcessor(folder_with(TEMPLATES[template], tmp_path / "model"))
    parts = [{"type": "text", "text": "Look:"}, {"type": "text", "text": "a bird"}]
    expected = processor.apply_chat_template([SYSTEM, {**ASK, "content": "Look:\na bird"}])
    assert processor.apply_chat_template([SYSTEM, {**ASK, "content": parts}]) == expected
    with pytest.raises(ValueError, match=r"messages\[0\] has a part of type 'image'; this model"):
        processor.apply_chat_template(CONVERSATIONS["parts"])


def test_a_variable_may_have_any_name(tmp_path: Path) -> None:
    """One called self or messages was a TypeError about Python's arguments."""
    processor = TextProcessor(folder_with("{{ value }}{{ name }}", tmp_path / "model"))
    names = {"self": 1, "name": "a", "value": "b", "add_special_tokens": 2}
    assert processor.apply_chat_template([ASK], True, **names) == "ba"


@pytest.mark.parametrize("entry", [5, True, ["text"], [{"nme": "default"}], {"default": None}])
def test_an_entry_that_is_no_template_is_refused_by_its_file(tmp_path: Path, entry: Any) -> None:
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": entry}))
    with pytest.raises(ValueError, match=r"tokenizer_config\.json: chat_template must be text"):
        TextProcessor(tmp_path).apply_chat_template([ASK])


def test_the_date_is_todays(tmp_path: Path) -> None:
    folder = folder_with("{{ strftime_now('%d %b %Y') }}", tmp_path / "model")
    days = {datetime.datetime.now().strftime("%d %b %Y")}
    given = TextProcessor(folder).apply_chat_template([ASK])
    assert given in days | {datetime.datetime.now().strftime("%d %b %Y")}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tools": "weather"}, "^tools must be a list of dicts, got 'weather'"),
        ({"tools": [print]}, "^tools must be a list of dicts"),
        ({"tools": TOOLS[0]}, "^tools must be a list of dicts"),
        ({"add_generation_prompt": None}, "^add_generation_prompt must be True or False"),
        ({"chat_template_kwargs": [1]}, "^chat_template_kwargs must be a dict"),
        ({"chat_template_kwargs": {1: 2}}, "^chat_template_kwargs must be a dict of names"),
        ({"chat_template_kwargs": {"tools": []}}, "^chat_template_kwargs must not hold tools"),
        ({"chat_template_kwargs": {"messages": []}}, "^chat_template_kwargs must not hold mess"),
    ],
)
def test_bad_chat_options_are_refused_by_their_name(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        ChatOptions(**options)
