"""What form a user may ask for: exactly one, a wrong value refused by its field, the same on both sides of the wire."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from rowcast.scheduler.front_messages import Submit, decode, encode, make_submit_key
from rowcast.scheduler.messages import ProtocolError
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.structured_outputs import MAX_CHOICES, StructuredOutputsParams

SCHEMA = {"type": "object", "properties": {"größe": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"json": SCHEMA}, "json"),
        ({"json": json.dumps(SCHEMA), "disable_any_whitespace": True}, "json"),
        ({"regex": "a|b"}, "regex"),
        ({"choice": ["yes", "no"]}, "choice"),
        ({"grammar": 'start: "a"'}, "grammar"),
        ({"json_object": True}, "json_object"),
        ({"json_object": False, "regex": "a"}, "regex"),
    ],
)
def test_a_form_is_the_same_behind_the_wire(fields: dict, kind: str):
    params = SamplingParams(structured_outputs=fields)
    assert params.structured_outputs == StructuredOutputsParams(**fields)
    assert params.structured_outputs.kind == kind
    assert len({params.structured_outputs, StructuredOutputsParams(**fields)}) == 1
    submit = Submit(
        number=1,
        submit_key=make_submit_key(bytes(16), 1),
        request_id="a",
        prompt_token_ids=np.array([1], np.int32),
        seed=1,
        params=params,
    )
    read = decode(encode(submit))
    assert isinstance(read, Submit)
    assert read.params == params
    assert replace(params, temperature=0.5).structured_outputs == params.structured_outputs


def test_a_schema_is_kept_as_text():
    kept = StructuredOutputsParams(json=SCHEMA).json
    assert isinstance(kept, str)
    assert json.loads(kept) == SCHEMA


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({}, "must have exactly one of json, regex, choice, grammar, json_object, got none"),
        ({"json": "{}", "regex": "a"}, "exactly one of .*, got json and regex"),
        ({"json": "{"}, "json must be a JSON schema, a dict or its text: "),
        ({"json": "true"}, "json must be a JSON schema, a dict or its text, got 'true'"),
        ({"json": "[]"}, "json must be a JSON schema, a dict or its text, got '\\[\\]'"),
        ({"json": {"a": {1, 2}}}, "json must be a JSON schema, .* not JSON serializable"),
        ({"json": {"minimum": float("nan")}}, "json must be a JSON schema"),
        ({"json": 7}, "json must be a JSON schema, a dict or its text, got 7"),
        ({"regex": ""}, "regex must be a string, not an empty one, got ''"),
        ({"regex": "\ud800"}, "regex is not valid Unicode"),
        ({"grammar": "a" * (2**20 + 1)}, "grammar must have at most 1048576 bytes, got 1048577"),
        ({"choice": "yes"}, "choice must be a list of 1 to 4096 strings, .* got 'yes'"),
        ({"choice": []}, "choice must be .* got 0 entries"),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, "got 4097 entries"),
        ({"choice": ["a", ""]}, "got the entry ''"),
        ({"json_object": 1}, "json_object must be True, or left out, got 1"),
        ({"json_object": False}, "got none"),
        ({"regex": "a", "disable_any_whitespace": True}, "has no effect on a regex"),
        ({"json": "{}", "disable_any_whitespace": "yes"}, "must be True or False, got 'yes'"),
        ({"xml": "<a/>"}, "dict of some of json, regex, .*, got {'xml': '<a/>'}"),
        (["regex"], r"must be StructuredOutputsParams, or a dict .*, got \['regex'\]"),
    ],
)
def test_a_form_that_is_none_is_refused_by_its_field(fields, sentence: str):
    with pytest.raises(ValueError, match=f"structured_outputs.*{sentence}"):
        SamplingParams(structured_outputs=fields)


def test_a_bad_form_on_the_wire_is_a_protocol_error():
    """A front of another program: the scheduler's door must not take its word."""
    good = encode(
        Submit(
            number=1,
            submit_key=make_submit_key(bytes(16), 1),
            request_id="a",
            prompt_token_ids=np.array([1], np.int32),
            seed=1,
            params=SamplingParams(structured_outputs={"regex": "ab"}),
        )
    )
    with pytest.raises(ProtocolError, match="exactly one of"):
        decode(good.replace(b"regex", b"regey").replace(b"\xa5regey\xa2ab", b"\xa5regex\xc0"))
