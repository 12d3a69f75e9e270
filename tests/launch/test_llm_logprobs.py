"""Log-probabilities as callers of an embedded LLM get them: one entry a token, whatever ends or cuts an answer."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import rowcast
from rowcast import LLM, Logprob, RequestOutput, SamplingParams
from rowcast.cluster.outputs import CompletionOutput
from rowcast.tests.launch.tiny_engine import assert_idle, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[LLM]:
    with make_llm(model) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    yield shared
    assert_idle(shared)


def check_answer(answer: CompletionOutput, num_best: int) -> None:
    """SA-13, E-08: an entry a token, that token first and among N or N + 1, ranked, finite, and summed up."""
    assert answer.logprobs is not None
    assert len(answer.logprobs) == len(answer.token_ids)
    total = 0.0
    for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
        assert next(iter(entry)) == token_id
        assert len(entry) == num_best + (entry[token_id].rank > num_best)
        for given in entry.values():
            assert isinstance(given, Logprob)
            assert math.isfinite(given.logprob)
            assert given.logprob <= 0
        ordered = sorted(entry.values(), key=lambda given: given.rank)
        assert [one.rank for one in ordered][:num_best] == list(range(1, num_best + 1))
        assert ordered == sorted(ordered, key=lambda given: -given.logprob)
        total += entry[token_id].logprob
    assert answer.cumulative_logprob == pytest.approx(total)


def check_prompt(output: RequestOutput, num_best: int) -> None:
    """B15: one entry a prompt token, None first."""
    first, *others = output.prompt_logprobs or ()
    assert first is None
    assert len(others) == len(output.prompt_token_ids) - 1
    for token_id, entry in zip(output.prompt_token_ids[1:], others, strict=True):
        assert entry is not None
        assert next(iter(entry)) == token_id
        assert len(entry) == num_best + (entry[token_id].rank > num_best)


@pytest.mark.parametrize("num_best", [0, 1, 20])
def test_every_token_has_its_entry(llm, num_best):
    params = replace(GREEDY, logprobs=num_best, prompt_logprobs=num_best)
    outputs = llm.generate(["hello world", [5], "hello"], params)
    for output in outputs:
        check_answer(output.outputs[0], num_best)
        check_prompt(output, num_best)
        for entry in output.outputs[0].logprobs:
            assert max(entry.values(), key=lambda one: one.logprob).rank == 1  # greedy


def test_who_does_not_ask_gets_none(llm):
    asked, plain = llm.generate(["hello", "hello"], [GREEDY, replace(GREEDY, logprobs=None)])
    assert asked.prompt_logprobs is None
    assert plain.outputs[0] == replace(asked.outputs[0], logprobs=None, cumulative_logprob=None)
    assert plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


def test_a_prompt_that_is_cached_has_all_its_rows_again(model):
    """B15, PC-13: 33 tokens, sent twice: 33 entries both times, the second time computed anew, and then found."""
    prompt = [5 + n % 90 for n in range(33)]
    with make_llm(model) as llm:
        params = replace(GREEDY, prompt_logprobs=1, max_tokens=1)
        one, two = (llm.generate(prompt, params)[0] for _ in range(2))
        for output in (one, two):
            check_prompt(output, 1)
            assert len(output.prompt_logprobs or ()) == 33
            assert output.cached_tokens == 0
        assert two.prompt_logprobs == one.prompt_logprobs
        assert llm.generate(prompt, GREEDY)[0].cached_tokens == 32


def test_a_stop_string_cuts_no_entry_from_its_token(llm):
    """O-02: as many entries as tokens are delivered, though the text ends inside one of them."""
    whole = llm.generate("hello", replace(GREEDY, max_tokens=60))[0].outputs[0]
    text = whole.text
    stop = next(text[i : i + 2] for i in range(6, len(text) - 2) if text[i : i + 2].isascii())
    params = replace(GREEDY, max_tokens=110, stop=stop)
    (answer,) = llm.generate("hello", params)[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    check_answer(answer, 2)
    assert answer.logprobs == (whole.logprobs or [])[: len(answer.token_ids)]
    assert list(llm.stream("hello", params))[-1].outputs == [answer]


def test_a_stream_grows_by_token_and_entry_together(llm):
    params = replace(GREEDY, prompt_logprobs=1, max_tokens=12)
    whole = llm.generate("hello world", params)[0]
    seen = list(llm.stream("hello world", params))
    for output in seen:
        answer = output.outputs[0]
        check_answer(answer, 2)
        check_prompt(output, 1)
        assert whole.outputs[0].logprobs is not None
        assert answer.logprobs == whole.outputs[0].logprobs[: len(answer.token_ids)]
    assert len({id(output.outputs[0].logprobs) for output in seen}) == len(seen)
    sums = [output.outputs[0].cumulative_logprob for output in seen]
    assert sums == sorted(sums, reverse=True)
    assert seen[-1].outputs == whole.outputs


def test_each_of_n_answers_has_its_entries_and_the_prompt_is_scored_once(llm):
    params = SamplingParams(
        seed=3, n=3, max_tokens=6, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    (output,) = llm.generate("hello", params)
    check_prompt(output, 0)
    assert len({tuple(answer.token_ids) for answer in output.outputs}) == 3
    for answer in output.outputs:
        check_answer(answer, 1)
    alone = llm.generate("hello", replace(params, n=1, seed=4, prompt_logprobs=None))[0]
    assert output.outputs[1].token_ids == alone.outputs[0].token_ids
    expected = [
        {token: (given.rank, pytest.approx(given.logprob, abs=1e-5)) for token, given in e.items()}
        for e in alone.outputs[0].logprobs or ()
    ]
    assert [
        {token: (given.rank, given.logprob) for token, given in entry.items()}
        for entry in output.outputs[1].logprobs or ()
    ] == expected


def test_without_detokenizing_tokens_have_no_text(llm):
    """O-08: ids, no text, and 3 or 4 entries where 3 are asked for."""
    params = replace(GREEDY, logprobs=3, prompt_logprobs=3)
    shown = llm.generate("hello", params)[0]
    bare = llm.generate("hello", replace(params, detokenize=False))[0]
    assert bare.outputs[0].token_ids == shown.outputs[0].token_ids
    for entry in [*(bare.outputs[0].logprobs or ()), *(bare.prompt_logprobs or ())[1:]]:
        assert entry is not None
        assert len(entry) in (3, 4)
        assert {given.decoded_token for given in entry.values()} == {None}
    for entry, token_id in zip(
        shown.outputs[0].logprobs or (), shown.outputs[0].token_ids, strict=True
    ):
        assert all(isinstance(given.decoded_token, str) for given in entry.values())
        text = llm._text.decode([token_id], skip_special_tokens=False)
        assert entry[token_id].decoded_token == text


def test_what_is_aborted_keeps_what_it_has(llm):
    params = replace(GREEDY, max_tokens=80, prompt_logprobs=1)
    stream = llm.stream("hello world", params, request_id="mine")
    first = next(stream)
    check_prompt(first, 1)
    llm.abort("mine")
    (*_, last) = stream
    assert last.outputs[0].finish_reason == "abort"
    check_answer(last.outputs[0], 2)
    check_prompt(last, 1)


def test_rows_that_gave_way_have_each_entry_once(model):
    """P-09: a pool too small for all; the answers are those of one after the other."""
    prompts = [[5 + n] * 20 for n in range(4)]
    params = replace(GREEDY, max_tokens=40, prompt_logprobs=1)
    with make_llm(model, kv_cache_memory=10 * 4096, max_model_len=64) as llm:
        together = llm.generate(prompts, params)
        assert llm.snapshot()["preemptions"] > 0
        for prompt, output in zip(prompts, together, strict=True):
            check_answer(output.outputs[0], 2)
            check_prompt(output, 1)
            alone = llm.generate(prompt, params)[0]
            assert output.outputs[0].token_ids == alone.outputs[0].token_ids
            assert output.outputs[0].cumulative_logprob == pytest.approx(
                alone.outputs[0].cumulative_logprob, abs=1e-4
            )


@pytest.mark.parametrize("field", ["logprobs", "prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 1_000_000, True, 2.0, "3"])
def test_a_count_out_of_range_is_refused_with_field_and_range(field, value):
    """SA-14, F06: -1, which elsewhere is the whole vocabulary, too."""
    with pytest.raises(ValueError, match=rf"^{field} must be an integer in \[0, 20\], or None"):
        SamplingParams(**{field: value})


def test_logprob_is_public_and_loads_nothing():
    script = (
        "import sys, rowcast; rowcast.Logprob; print('torch' in sys.modules, 'ray' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]
    assert "Logprob" in dir(rowcast)
