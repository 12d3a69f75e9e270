"""Structured output on SmolLM2-135M, from the caller's schema to a text that validates, and back out of a recording.

The suite asks for a few schemas; ROWCAST_SCHEMAS=50 for that many, greedily and sampled, with and without white space.
"""

from __future__ import annotations

import json
import os
import random
import re
from collections.abc import Iterator
from pathlib import Path

import jsonschema
import pytest
from rowcast import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams
from rowcast.launch.cli import run_command
from rowcast.tests.launch.random_schemas import random_schema

NUM_SCHEMAS = int(os.environ.get("ROWCAST_SCHEMAS", "0"))
PROMPT = "Here is a JSON document:\n"
NESTED = {
    "$defs": {"place": {"type": "object", "properties": {"x": {"$ref": "#/$defs/x"}, "y": {"$ref": "#/$defs/x"}},
                        "required": ["x", "y"], "additionalProperties": False},
              "x": {"type": "integer", "minimum": -9, "maximum": 9}},
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 12},
        "home": {"type": "object", "properties": {"street": {"type": "string", "maxLength": 12},
                                                  "at": {"$ref": "#/$defs/place"}},
                 "required": ["street", "at"], "additionalProperties": False},
        "path": {"type": "array", "items": {"$ref": "#/$defs/place"}, "minItems": 1, "maxItems": 2},
        "kind": {"enum": ["cat", "dog", None]},
    },
    "required": ["name", "home", "path", "kind"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def recording(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "steps.rec"


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path, recording: Path) -> Iterator[LLM]:
    llm = LLM(str(smollm2_dir), max_num_seqs=25, max_model_len=1024, record=recording)
    yield llm
    llm.close()


def answer(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput]:
    return [output.outputs[0] for output in llm.generate([PROMPT] * len(params), params)]


def ask(llm: LLM, forms: list, **options) -> list[CompletionOutput]:
    options = {"temperature": 0, "max_tokens": 100, **options}
    return answer(llm, [SamplingParams(structured_outputs=form, **options) for form in forms])


def test_every_finished_output_validates(llm: LLM):
    """Nested objects, and random schemas: each answer comes to its end by itself."""
    whim = random.Random(7)
    schemas = [NESTED, *(random_schema(whim) for _ in range(NUM_SCHEMAS or 5))]
    ways = [(0, False), (1, True), (0, True), (1, False)]  # temperature, without white space
    if NUM_SCHEMAS:
        cases = [(schema, way) for way in ways for schema in schemas]
    else:
        cases = [(schema, ways[place % 4]) for place, schema in enumerate(schemas)]
    params = [
        SamplingParams(
            temperature=temperature,
            seed=place,
            max_tokens=600,
            structured_outputs={"json": schema, "disable_any_whitespace": compact},
        )
        for place, (schema, (temperature, compact)) in enumerate(cases)
    ]
    for (schema, way), got in zip(cases, answer(llm, params), strict=True):
        assert got.finish_reason == "stop", (way, got.text, schema)
        jsonschema.validate(json.loads(got.text), schema)


def test_each_form_beside_a_request_that_asks_for_none(llm: LLM):
    """Who asks for nothing gets what it gets alone; the EOS behind an answer that might go on is no part of it."""
    (free,) = ask(llm, [None], max_tokens=12)
    forms = [
        None,
        StructuredOutputsParams(choice=["maybe", "never"]),
        {"regex": "(ab|cd)+[0-9]{2}"},
        {"grammar": 'start: "<" /[a-z]/ ("," /[a-z]/)~2 ">"'},
        {"regex": "yes( and yes)*"},
        {"json_object": True},
    ]
    got = ask(llm, forms, max_tokens=12)
    assert got[0] == free
    assert got[1].text in ("maybe", "never")
    assert re.fullmatch(r"(ab|cd)+[0-9]{2}|(ab|cd)+[0-9]?[abcd]?", got[2].text)
    assert re.fullmatch("<[a-z],[a-z],[a-z]>", got[3].text)
    assert got[4].text.startswith("yes")
    assert got[5].text.startswith("{")
    assert [answer.finish_reason for answer in got[1:2] + got[3:4]] == ["stop", "stop"]
    assert got[5].finish_reason == "length"  # any object may be long
    (ended,) = ask(llm, [{"regex": "yes( and yes)*"}], logit_bias={2: 100})
    assert (ended.text, ended.finish_reason, ended.token_ids[-1]) == ("yes", "stop", 2)
    (longer,) = ask(llm, [{"regex": "yes( and yes)*"}], logit_bias={2: 100}, min_tokens=5)
    assert re.fullmatch("yes( and yes)+", longer.text)


def test_answers_to_one_prompt_stream_and_each_has_the_form(llm: LLM):
    params = SamplingParams(
        n=2, seed=1, max_tokens=30, structured_outputs={"regex": "[A-Z][a-z]{2,8} [0-9]{4}"}
    )
    pieces = list(llm.stream(PROMPT, params))
    texts = [answer.text for answer in pieces[-1].outputs]
    assert all(re.fullmatch("[A-Z][a-z]{2,8} [0-9]{4}", text) for text in texts)
    assert texts[0] != texts[1]
    assert len(pieces) > 3


def test_a_form_that_cannot_be_compiled_is_the_callers_mistake(llm: LLM):
    """E-04: one sentence that names the prompt, and the engine goes on."""
    with pytest.raises(
        ValueError, match=r"^prompts\[1\]: structured_outputs: the regex .*unclosed"
    ):
        ask(llm, [{"regex": "ab"}, {"regex": "a("}])
    with pytest.raises(ValueError, match=r"^structured_outputs: the json .*uniqueItems"):
        next(llm.stream(PROMPT, SamplingParams(structured_outputs={"json": {"uniqueItems": True}})))
    assert ask(llm, [{"regex": "ab"}])[0].text == "ab"
    assert llm.snapshot()["compiling"] == 0


def test_a_recording_of_masked_steps_replays(
    llm: LLM, recording: Path, capsys: pytest.CaptureFixture
):
    """The digests cover the masks; a step is shown with the rows that waited for one."""
    ask(llm, [{"regex": "ab"}, None], max_tokens=3)
    assert run_command(["replay", str(recording), "--json"]) == 0
    (life,) = json.loads(capsys.readouterr().out.splitlines()[-1])["lives"]
    assert life["digests"] > 20
    assert run_command(["replay", str(recording), "--until", "1", "--explain"]) == 0
    assert re.search(r"lets rows \[0.*sample by a mask", " ".join(capsys.readouterr().out.split()))
