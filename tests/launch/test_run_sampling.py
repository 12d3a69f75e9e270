"""How `rowcast run` chooses tokens: its options, the model's recommendation, and what holds without either."""

from __future__ import annotations

import json

import pytest
from rowcast import SamplingParams
from rowcast.launch.cli import app
from rowcast.launch.commands.run import run
from rowcast.launch.commands.sampling_options import description, given, sampling_params


def test_nothing_given_and_nothing_recommended_is_greedy():
    params = sampling_params(given(temperature=None, stop=None, bad_words=[], ignore_eos=False), {})
    assert params == SamplingParams(temperature=0, max_tokens=256)
    assert description(params, {}, {}) == "greedy"


@pytest.mark.parametrize("option", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}, {"seed": 0}])
def test_an_option_that_asks_for_chance_is_not_without_effect(option):
    """`--top-p 0.9` alone was greedy: the option did nothing, and said nothing."""
    assert sampling_params(given(**option), {}).temperature == 1
    assert sampling_params(given(**option, temperature=0.0), {}).temperature == 0


def test_the_models_recommendation_holds_where_nothing_is_given():
    recommended = {"temperature": 0.6, "top_p": 0.95, "max_tokens": 40, "repetition_penalty": 1.1}
    assert sampling_params({}, recommended) == SamplingParams(**recommended)
    fields = given(temperature=0.0, max_tokens=3)
    params = sampling_params(fields, recommended)
    assert params == SamplingParams(**recommended | {"temperature": 0, "max_tokens": 3})
    assert (
        description(params, fields, recommended) == "greedy, repetition_penalty 1.1 (the model's)"
    )
    fields = given(top_p=0.5, seed=3)
    told = "temperature 0.6 (the model's), top_p 0.5, seed 3, repetition_penalty 1.1 (the model's)"
    assert description(sampling_params(fields, recommended), fields, recommended) == told
    assert sampling_params({}, {"top_k": 64}).temperature == 1  # Gemma 3 names no temperature


def test_min_tokens_makes_room_for_itself():
    params = sampling_params(given(min_tokens=300), {"max_tokens": 40})
    assert (params.min_tokens, params.max_tokens) == (300, 300)


@pytest.mark.parametrize(
    ("option", "told"),
    [
        ({"temperature": 2.5}, r"temperature must be a number in \[0, 2\], got 2.5"),
        ({"repetition_penalty": 0.0}, r"repetition_penalty must be a number in \(0, 2\], got 0.0"),
        ({"top_k": -2}, "top_k must be an integer, at least 1, or 0 or -1 for all tokens, got -2"),
        ({"min_tokens": 9, "max_tokens": 3}, "min_tokens must be .* at most max_tokens, got 9"),
        ({"stop": ["a"] * 5}, "stop must be .* at most 4 strings.*got 5 entries"),
        ({"bad_words": [""]}, "bad_words must be a list of strings of 1 to 256 characters"),
    ],
)
def test_a_bad_value_is_refused_by_its_name_and_range(option, told):
    """Zeros too: one that counted as not given would be dropped without a word."""
    with pytest.raises(ValueError, match=told):
        given(**option)


def test_a_bad_value_is_refused_before_run_looks_for_the_model():
    with pytest.raises(ValueError, match=r"^min_p must be a number in \[0, 1\], got -0.5$"):
        run("no/such/model", "hi", min_p=-0.5)


def test_run_asks_the_engine_for_what_it_was_given(tiny_model, tmp_path, capsys):
    """The recommendation's top_k 1 makes temperature 1 greedy; --top-k 0 takes it back; a bad word is not said."""
    folder = tiny_model(tmp_path)
    known = json.loads((folder / "generation_config.json").read_text())
    recommended = known | {"temperature": 1.0, "top_k": 1, "max_new_tokens": 7}
    (folder / "generation_config.json").write_text(json.dumps(recommended))

    def answer(**options) -> tuple[str, str]:
        asked = {"chat": False, "ignore_eos": True, "kv_cache_memory": "1MiB", "num_threads": 1}
        run(str(folder), "hello", **(asked | options))
        printed = capsys.readouterr()
        return printed.out.removesuffix("\n"), printed.err.splitlines()[-1]

    text, figures = answer()
    assert figures.startswith("7 tokens; ")
    assert figures.endswith("; temperature 1 (the model's), top_k 1 (the model's)")
    assert answer(temperature=0.0)[0] == text
    other, figures = answer(top_k=0, seed=5)
    assert other != text
    assert figures.endswith("; temperature 1 (the model's), seed 5")
    said = next(letter for letter in text if "!" <= letter <= "~")
    assert said not in answer(bad_word=[said])[0]
    assert answer(stop=[said])[0] == text[: text.index(said)]
    assert answer(min_tokens=8)[1].startswith("8 tokens; ")
    schema = tmp_path / "schema.json"
    schema.write_text('{"enum": [12, null]}')
    for given_as in (str(schema), schema.read_text()):
        shaped = answer(json_schema=given_as, max_tokens=5, ignore_eos=False)[0]
        assert json.loads(shaped) in (12, None)


def test_a_schema_that_is_no_file_and_no_schema_is_refused_before_the_model():
    for given_as, told in (
        ("no/such.json", r"--json-schema: no/such\.json cannot be read: No such file"),
        ("{", "structured_outputs: json must be a JSON schema"),
    ):
        with pytest.raises(ValueError, match=told):
            run("no/such/model", "hi", json_schema=given_as)


def test_help_has_a_heading_for_each_kind_of_option(capsys):
    app(args=["run", "--help"], prog_name="rowcast", standalone_mode=False)
    told = capsys.readouterr().out
    headings = [line for line in told.splitlines() if line.endswith(":") and line[0] != " "]
    assert [heading.split(" (")[0].rstrip(":") for heading in headings] == [
        "Arguments",
        "Options",
        "Choosing tokens",
        "Running the model",
    ]
    tokens = told[told.index("Choosing tokens") : told.index("Running the model")]
    for option in ("--temperature", "--min-p", "--frequency-penalty", "--stop", "--bad-word"):
        assert option in tokens
