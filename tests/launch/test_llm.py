"""The embedded LLM on a tiny model: what callers get back, in which order, and that nothing is left behind."""

from __future__ import annotations

import gc
import itertools
import json
import os
import shutil
import signal
import threading
import time
import weakref
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from rowcast import LLM, SamplingParams
from rowcast.tests.launch.tiny_engine import assert_idle, make_llm

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def shared(model: Path) -> Iterator[LLM]:
    with make_llm(model) as llm:
        yield llm


@pytest.fixture
def llm(shared: LLM) -> Iterator[LLM]:
    """The shared engine; whatever a test does, it must give every row and block back."""
    yield shared
    assert_idle(shared)


def token_ids(outputs) -> list[list[int]]:
    return [output.outputs[0].token_ids for output in outputs]


def test_results_come_in_the_order_of_the_prompts(llm):
    """The short ones end first; 9 prompts on 4 rows also wait for each other."""
    prompts = [[5] * (9 - n) + [20 + n] for n in range(9)]
    params = [SamplingParams(temperature=0, max_tokens=9 - n, ignore_eos=True) for n in range(9)]
    together = llm.generate(prompts, params)
    assert [output.prompt_token_ids for output in together] == prompts
    assert [len(ids) for ids in token_ids(together)] == [9, 8, 7, 6, 5, 4, 3, 2, 1]
    alone = [llm.generate(prompts[n], params[n])[0] for n in range(9)]
    assert token_ids(together) == token_ids(alone)


def test_text_and_ids_are_the_same_prompt(llm):
    text = "hello world 12"
    ids = llm.generate(text, GREEDY)[0].prompt_token_ids
    mixed = llm.generate([text, ids], GREEDY)
    assert mixed[0].outputs[0].token_ids == mixed[1].outputs[0].token_ids
    assert (mixed[0].prompt, mixed[1].prompt) == (text, None)


def test_no_prompts_give_no_results(llm):
    assert llm.generate([], GREEDY) == []


def test_a_seed_makes_sampling_repeatable_and_no_seed_does_not(llm):
    seeded = SamplingParams(temperature=1.5, max_tokens=12, seed=11, ignore_eos=True)
    first, second = token_ids(llm.generate([[5, 6], [5, 6]], seeded))
    assert first == second
    free = SamplingParams(temperature=1.5, max_tokens=12, ignore_eos=True)
    assert len({tuple(ids) for ids in token_ids(llm.generate([[5, 6]] * 4, free))}) > 1


def test_a_request_ends_by_length_or_by_a_stop_token(llm):
    output = llm.generate([5, 6, 7], GREEDY)[0]
    assert output.finished
    assert output.outputs[0].finish_reason == "length"
    fourth = output.outputs[0].token_ids[3]
    expected = output.outputs[0].token_ids[: output.outputs[0].token_ids.index(fourth) + 1]
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, stop_token_ids=(fourth,))
    stopped = llm.generate([5, 6, 7], params)[0].outputs[0]
    assert stopped.token_ids == expected
    assert (stopped.finish_reason, stopped.stop_reason) == ("stop", fourth)


def test_max_tokens_none_runs_up_to_the_models_length(llm):
    params = SamplingParams(temperature=0, max_tokens=None, ignore_eos=True)
    output = llm.generate([5] * 100, params)[0].outputs[0]
    assert len(output.token_ids) == 128 - 100  # the model's context is 128
    assert output.finish_reason == "length"


# ---------------------------------------------------------------- stop strings, n answers


def test_a_stop_string_ends_the_text_and_the_request(llm):
    """O-02: of 120 tokens asked for it takes as many as the string needs; the fixture counts rows and blocks."""
    text = llm.generate("hello", SamplingParams(temperature=0, max_tokens=60, ignore_eos=True))
    text = text[0].outputs[0].text
    stop = next(text[i : i + 2] for i in range(6, len(text) - 2) if text[i : i + 2].isascii())
    expected = text[: text.index(stop)]
    params = SamplingParams(temperature=0, max_tokens=120, ignore_eos=True, stop=stop)
    outputs = llm.generate(["hello", "hello"], [params, replace(params, stop=None, max_tokens=2)])
    (answer,) = outputs[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (expected, "stop", stop)
    assert len(answer.token_ids) <= 60
    assert len(outputs[1].outputs[0].token_ids) == 2
    seen = list(llm.stream("hello", params))
    assert all(expected.startswith(output.outputs[0].text) for output in seen)
    assert seen[-1].outputs == [answer]
    (included,) = llm.generate("hello", replace(params, include_stop_str_in_output=True))[0].outputs
    assert (included.text, included.token_ids) == (expected + stop, answer.token_ids)


def test_a_stop_string_before_min_tokens_stays_in_the_text(llm):
    """S18, in the engine: an early character stops nothing, a later one of the same kind does."""
    params = SamplingParams(temperature=0, max_tokens=60, min_tokens=12, ignore_eos=True)
    (whole,) = llm.generate("hello", params)[0].outputs
    early = llm._text.decode(whole.token_ids[:12])
    stop = next(c for c in early if c.isascii() and c in whole.text[len(early) + 1 :])
    (answer,) = llm.generate("hello", replace(params, stop=stop))[0].outputs
    assert (answer.finish_reason, answer.stop_reason) == ("stop", stop)
    assert 12 < len(answer.token_ids) < 60
    assert answer.text == whole.text[: whole.text.index(stop, len(early))]
    assert stop in answer.text


def test_a_stop_string_met_while_another_thread_steps_ends_the_stream(llm):
    """The text is made where the token comes, and not only where its owner looks."""
    text = llm.generate("hello", replace(GREEDY, max_tokens=40))[0].outputs[0].text
    stop = next(c for c in text[6:] if c.isascii())
    stopped = replace(GREEDY, max_tokens=110, stop=stop)
    stream = llm.stream("hello", stopped)
    next(stream)
    llm.generate([5, 6], replace(GREEDY, max_tokens=60))
    (*_, last) = stream
    assert last.outputs == llm.generate("hello", stopped)[0].outputs
    assert last.outputs[0].finish_reason == "stop"


def test_n_answers_have_the_seeds_from_the_given_one_on(llm):
    """SA-04: and the last seed's successor is 0."""
    last = 2**63 - 1
    params = SamplingParams(seed=last, max_tokens=12, ignore_eos=True)
    alone = [llm.generate("hello", replace(params, seed=seed))[0] for seed in (last, 0, 1)]
    three, one = llm.generate(["hello", "world"], [replace(params, n=3), params])
    assert [answer.token_ids for answer in three.outputs] == token_ids(alone)
    assert [answer.index for answer in three.outputs] == [0, 1, 2]
    assert (three.finished, three.prompt, len(one.outputs)) == (True, "hello", 1)
    seen = list(llm.stream("hello", replace(params, n=3)))
    assert seen[-1].outputs == three.outputs
    assert seen[-1].finished
    assert not any(output.finished for output in seen[:-1])
    free = llm.generate("hello", replace(params, n=3, seed=None))[0].outputs
    assert len({tuple(answer.token_ids) for answer in free}) == 3


def test_later_answers_find_the_prompt_of_the_first_in_the_cache(model):
    """One row: its prompt has settled when the second is admitted, 16 of its 20 tokens in full blocks."""
    with make_llm(model, max_num_seqs=1) as llm:
        params = SamplingParams(max_tokens=3, ignore_eos=True, n=3)
        (output,) = llm.generate([5 + n for n in range(20)], params)
        assert [len(answer.token_ids) for answer in output.outputs] == [3, 3, 3]
        assert output.cached_tokens == 0
        assert llm.snapshot()["prefix_cache_hits"] == 2 * 16
        assert_idle(llm)


def test_aborting_a_request_ends_all_of_its_answers(llm):
    """O-07."""
    params = SamplingParams(max_tokens=100, ignore_eos=True, n=2)
    stream = llm.stream([5, 6], params, request_id="mine")
    next(stream)
    with pytest.raises(ValueError, match="request_id 'mine' is in use"):
        next(llm.stream([6], GREEDY, request_id="mine"))
    llm.abort("mine")
    (*_, last) = stream
    assert [answer.finish_reason for answer in last.outputs] == ["abort", "abort"]
    assert_idle(llm)
    for output in llm.stream([5, 6], params):
        if sum(len(answer.token_ids) for answer in output.outputs) >= 3:
            break


def test_each_of_n_answers_takes_a_place_in_the_queue(model, monkeypatch):
    with make_llm(model) as llm:
        monkeypatch.setattr(llm._engine, "_max_live", 3)
        (output,) = llm.generate([5], SamplingParams(max_tokens=2, ignore_eos=True, n=7))
        assert [len(answer.token_ids) for answer in output.outputs] == [2] * 7
        assert_idle(llm)
        scheduler = llm._engine._engine._scheduler_loop._scheduler
        full = replace(scheduler.config, max_waiting=5)
        monkeypatch.setattr(scheduler, "config", full)
        with pytest.raises(RuntimeError, match="the queue holds 5"):
            list(llm.stream([5], SamplingParams(max_tokens=100, ignore_eos=True, n=12)))
        assert_idle(llm)


def test_without_detokenizing_ids_come_alone(llm):
    """O-08."""
    (with_text,) = llm.generate("hello", GREEDY)[0].outputs
    (ids_alone,) = llm.generate("hello", replace(GREEDY, detokenize=False))[0].outputs
    assert with_text.text
    assert ids_alone == replace(with_text, text="")


# ---------------------------------------------------------------- streaming


def test_a_stream_grows_to_what_generate_gives(llm):
    whole = llm.generate("hello", GREEDY)[0].outputs[0]
    seen = list(llm.stream("hello", GREEDY))
    counts = [len(output.outputs[0].token_ids) for output in seen]
    assert counts == [1, 2, 3, 4, 5, 6, 7, 8]
    assert [output.finished for output in seen] == [False] * 7 + [True]
    texts = [output.outputs[0].text for output in seen]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert seen[-1].outputs[0] == whole


def test_leaving_a_stream_aborts_its_request(llm):
    """Its row and blocks are back at once; the fixture counts them."""
    for output in llm.stream([5, 6], SamplingParams(max_tokens=100, ignore_eos=True)):
        if len(output.outputs[0].token_ids) == 3:
            break


def test_a_stream_that_nobody_reads_queues_nothing(llm):
    stream = llm.stream([5, 6], GREEDY)
    assert llm.snapshot()["waiting"] == 0
    del stream


def test_streams_in_one_thread_and_generate_share_the_engine(llm):
    alone = token_ids(llm.generate([[5, 6], [7, 8], [9]], GREEDY))
    first, second = llm.stream([5, 6], GREEDY), llm.stream([7, 8], GREEDY)
    results: dict[str, list[int]] = {}
    for one, other in zip(first, second, strict=True):
        if "third" not in results:
            results["third"] = llm.generate([9], GREEDY)[0].outputs[0].token_ids
        results["first"], results["second"] = one.outputs[0].token_ids, other.outputs[0].token_ids
    assert [results["first"], results["second"], results["third"]] == alone


def test_threads_share_one_llm(llm):
    prompts = [[5 + n, 6, 7] for n in range(6)]
    alone = token_ids(llm.generate(prompts, GREEDY))
    got: dict[int, list[int]] = {}

    def answer(n: int) -> None:
        if n % 2:
            got[n] = llm.generate(prompts[n], GREEDY)[0].outputs[0].token_ids
        else:
            got[n] = list(llm.stream(prompts[n], GREEDY))[-1].outputs[0].token_ids

    threads = [threading.Thread(target=answer, args=(n,)) for n in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert [got[n] for n in range(6)] == alone


def test_a_thread_gets_its_answer_while_another_still_waits_for_a_longer_one(llm, monkeypatch):
    """A call that kept the engine for itself made everyone else wait for its last token."""
    engine = llm._engine._engine
    step, steps, under_way = engine.step, itertools.count(1), threading.Event()

    def slow_step():
        step()
        time.sleep(0.003)
        if next(steps) == 3:
            under_way.set()

    monkeypatch.setattr(engine, "step", slow_step)
    long = SamplingParams(temperature=0, max_tokens=110, ignore_eos=True)
    thread = threading.Thread(target=llm.generate, args=([5, 6], long))
    thread.start()
    assert under_way.wait(60)
    short = llm.generate([[7], [8]], SamplingParams(temperature=0, max_tokens=2, ignore_eos=True))
    assert [len(ids) for ids in token_ids(short)] == [2, 2]
    assert next(steps) < 60
    assert thread.is_alive()
    thread.join(60)


def test_a_forgotten_stream_may_be_collected_in_the_middle_of_a_step(llm, monkeypatch):
    """Its end came as a step within the step when Python collected a cycle that held it."""
    alone = token_ids(llm.generate([[5, 6], [7]], GREEDY))

    class Holder:
        pass

    holder = Holder()
    holder.itself = holder
    holder.stream = llm.stream([9], SamplingParams(max_tokens=100, ignore_eos=True))
    next(holder.stream)
    forgotten = weakref.ref(holder)
    scheduler = llm._engine._engine._scheduler_loop._scheduler
    schedule = scheduler.schedule

    def collect_and_schedule():
        gc.collect()
        return schedule()

    monkeypatch.setattr(scheduler, "schedule", collect_and_schedule)
    gc.disable()
    try:
        del holder
        assert forgotten() is not None
        assert token_ids(llm.generate([[5, 6], [7]], GREEDY)) == alone
    finally:
        gc.enable()
    assert forgotten() is None


def test_a_stream_holds_on_to_its_llm(model):
    """Nothing else does here; the LLM was closed before the first token."""
    outputs = list(
        make_llm(model).stream([5], GREEDY)
    )  # not in the assert, which pytest makes hold on
    assert len(outputs) == 8


def test_text_misses_no_token_that_comes_while_it_is_made(llm):
    """Another thread's step appends; what had come by then and what comes later must meet without a gap."""
    (request,) = llm._engine._engine.prepare([5, 6], GREEDY, prompt=None)
    append, seen = request.answer.append, []

    def append_and_be_overtaken(new, finish):
        seen.extend(new)
        if len(request.token_ids) < 4:
            request.token_ids.append(20 + len(request.token_ids))
        return append(new, finish)

    request.answer.append = append_and_be_overtaken
    request.token_ids.append(19)
    for length in (1, 2, 3):
        output = request.output()
        assert output.outputs[0].token_ids == request.token_ids[:length]
    request.output()
    assert seen == request.token_ids


def test_abort_ends_a_stream_with_its_reason(llm):
    stream = llm.stream([5, 6], SamplingParams(max_tokens=100, ignore_eos=True), request_id="mine")
    next(stream)
    next(stream)
    llm.abort("mine")
    llm.abort("mine")  # nobody there any more: ignored
    last = list(stream)[-1]
    assert last.finished
    assert last.outputs[0].finish_reason == "abort"
    assert 2 <= len(last.outputs[0].token_ids) < 100


def test_a_live_request_id_cannot_be_used_twice(llm):
    stream = llm.stream([5], SamplingParams(max_tokens=50, ignore_eos=True), request_id="mine")
    next(stream)
    with pytest.raises(ValueError, match="request_id 'mine' is in use"):
        next(llm.stream([6], GREEDY, request_id="mine"))
    assert len(next(stream).outputs[0].token_ids) >= 2  # the first one goes on
    stream.close()
    assert len(list(llm.stream([6], GREEDY, request_id="mine"))) == 8


def test_a_made_up_request_id_never_clashes_with_a_given_one(llm):
    """They were request-1, request-2, ...: a caller who numbered as well was in the way of another."""
    first = llm.stream([5], SamplingParams(max_tokens=50, ignore_eos=True))
    made_up = next(first).request_id
    head, _, number = made_up.rpartition("-")
    assert len(head) >= 12
    assert int(number) > 0
    first.close()


@pytest.mark.parametrize(
    ("request_id", "error"), [("", ValueError), ("\ud800", ValueError), (7, TypeError)]
)
def test_a_bad_request_id_is_refused_before_anything_is_queued(llm, request_id, error):
    before = llm.snapshot()
    with pytest.raises(error, match="request_id"):
        llm.stream([5], GREEDY, request_id=request_id)
    assert llm.snapshot() == before


def test_only_requests_of_one_salt_share_a_cached_prefix(model):
    """B06: blocks of 16, 33 tokens; what another salt, or none, has computed is not found."""
    with make_llm(model, block_size=16) as llm:
        prompt = [5 + n % 40 for n in range(33)]
        (alone,) = llm.generate(prompt, GREEDY, cache_salt="other")
        outputs = [
            llm.generate(prompt, GREEDY, cache_salt=salt)[0] for salt in ("a", "b", "a", None, "")
        ]
        assert [output.cached_tokens for output in outputs] == [0, 0, 32, 0, 32]
        assert token_ids(outputs) == token_ids([alone]) * 5
        *_, last = llm.stream(prompt, GREEDY, cache_salt="b")
        assert last.cached_tokens == 32
        counts = llm.snapshot()
        assert (counts["prefix_cache_hits"], counts["prefix_cache_queries"]) == (3 * 32, 7 * 33)
        assert_idle(llm)


def test_without_a_prefix_cache_every_token_is_computed(model):
    with make_llm(model, enable_prefix_caching=False) as llm:
        for _ in range(2):
            assert llm.generate([5] * 40, GREEDY)[0].cached_tokens == 0
        assert llm.snapshot()["prefix_cache_hits"] == 0


def test_the_most_urgent_of_a_list_is_answered_first(model, monkeypatch):
    """With one row: the ends come in the order of urgency, the results in that of the prompts."""
    with make_llm(model, max_num_seqs=1, scheduling_policy="priority") as llm:
        ends: list[int] = []
        take_outputs = llm._engine._engine._take_outputs

        def watch() -> bool:
            before = {r.submit.number for r in llm._engine._engine._requests.values()}
            moved = take_outputs()
            ends.extend(before - {r.submit.number for r in llm._engine._engine._requests.values()})
            return moved

        monkeypatch.setattr(llm._engine._engine, "_take_outputs", watch)
        outputs = llm.generate([[5], [6], [7]], GREEDY, priority=[2, 0, 1])
        assert [output.prompt_token_ids for output in outputs] == [[5], [6], [7]]
        first = min(ends)
        assert ends == [first + 1, first + 2, first]


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("priority", True, TypeError),
        ("priority", 2**31, ValueError),
        ("user", 5, TypeError),
        ("cache_salt", 5, TypeError),
        ("cache_salt", "x" * 257, ValueError),
    ],
)
def test_a_bad_request_option_is_refused_by_its_name(llm, field, value, error):
    for ask in (llm.generate, llm.stream):
        with pytest.raises(error, match=f"^{field} must"):
            ask([5, 6], GREEDY, **{field: value})
    with pytest.raises(error, match=f"^{field} must"):
        llm.chat([{"role": "user", "content": "Hi"}], GREEDY, **{field: value})


def test_a_chat_goes_through_the_models_template(llm):
    messages = [{"role": "user", "content": "hello"}]
    (one,) = llm.chat(messages, GREEDY)
    two = llm.chat([messages, messages], GREEDY)
    text = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert one.prompt_token_ids == llm.generate(text, GREEDY)[0].prompt_token_ids
    assert token_ids(two) == token_ids([one, one])
    assert list(llm.stream_chat(messages, GREEDY))[-1].outputs[0] == one.outputs[0]


def test_a_chats_options_go_to_the_template(model, tmp_path):
    template = (
        "{{ messages[0].content }}{% for t in tools or [] %}{{ t.name }}{% endfor %}{{ mood }}"
        "{% if add_generation_prompt %} he{% endif %}"
    )
    folder = shutil.copytree(model, tmp_path / "options")
    (folder / "chat_template.jinja").write_text(template)
    messages = [{"role": "user", "content": "hello"}]
    with make_llm(folder) as llm:

        def texts(**options) -> set[str]:
            (one,) = llm.chat(messages, GREEDY, **options)
            *_, last = llm.stream_chat(messages, GREEDY, **options)
            return {llm._text.decode(output.prompt_token_ids) for output in (one, last)}

        assert texts() == {"hello he"}
        assert texts(add_generation_prompt=False) == {"hello"}
        assert texts(tools=[{"name": "f"}], chat_template_kwargs={"mood": "!"}) == {"hellof! he"}
        with pytest.raises(ValueError, match=r"^tools must be a list of dicts"):
            texts(tools="f")


def test_without_params_a_model_samples_as_its_folder_recommends(model, tmp_path):
    """top_k 1 makes it greedy; given params are not touched."""
    folder = shutil.copytree(model, tmp_path / "recommends")
    recommended = {"top_k": 1, "top_p": None, "max_new_tokens": 5, "do_sample": False}
    known = json.loads((folder / "generation_config.json").read_text())
    (folder / "generation_config.json").write_text(json.dumps(known | recommended))
    with make_llm(folder) as llm:
        greedy = llm.generate("hello", replace(GREEDY, max_tokens=5, ignore_eos=False))
        assert token_ids(llm.generate("hello")) == token_ids(greedy)
        assert llm.get_default_sampling_params() == SamplingParams(top_k=1, max_tokens=5)
        *_, last = llm.stream("hello")
        assert last.outputs == greedy[0].outputs
        free = llm.generate(["hello"] * 4, SamplingParams(ignore_eos=True))
        assert {len(ids) for ids in token_ids(free)} == {16}
        assert len({tuple(ids) for ids in token_ids(free)}) > 1


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("prompt", "params", "says"),
    [
        ("", {}, "the prompt is empty"),
        ([], {}, "the prompt is empty"),
        ([5] * 128, {}, "the prompt has 128 tokens, max_model_len is 128"),
        ([5] * 500, {}, "the prompt has 500 tokens, max_model_len is 128"),
        ([5, 10_000], {}, "token id 10000 lies outside the vocabulary"),
        ([5, -1], {}, "token id -1 lies outside the vocabulary"),
        ([5], {"stop_token_ids": (10_000,)}, "token id 10000 lies outside the vocabulary"),
        ("half \ud800", {}, "not valid Unicode"),
    ],
)
def test_a_bad_prompt_is_refused_with_its_place_and_nothing_is_queued(llm, prompt, params, says):
    """The good ones before it must not run on either: the caller gets no results to use them with."""
    before = llm.snapshot()
    params = SamplingParams(max_tokens=4, **params)
    with pytest.raises(ValueError, match=says):
        list(llm.stream(prompt, params))
    with pytest.raises(ValueError, match=rf"^prompts\[2\]: .*{says}"):
        llm.generate([[5], [6], prompt, [7]], [GREEDY, GREEDY, params, GREEDY])
    assert llm.snapshot() == before


def test_a_request_larger_than_the_whole_pool_is_refused(model):
    with make_llm(model, kv_cache_memory="6KiB", max_model_len=128) as llm:
        usable = llm.snapshot()["usable_blocks"]
        tokens = usable * 8
        assert 0 < tokens < 100
        with pytest.raises(
            ValueError, match=f"the whole KV pool holds {tokens}; shorten the prompt"
        ):
            llm.generate([5] * (tokens + 1), GREEDY)
        with pytest.raises(ValueError, match=f"the whole pool holds {tokens}; lower max_tokens"):
            llm.generate([5] * tokens, SamplingParams(max_tokens=2))
        assert len(token_ids(llm.generate([5] * tokens, SamplingParams(max_tokens=1)))[0]) == 1
        assert_idle(llm)


def test_a_pool_too_small_for_one_block_says_what_to_raise(model):
    with pytest.raises(ValueError, match="raise --kv-cache-memory"):
        make_llm(model, kv_cache_memory=100)


def test_a_damaged_tokenizer_is_found_before_the_weights_are_read(model, tmp_path):
    """It came as a mistake in prompts[0], after the whole start."""
    folder = shutil.copytree(model, tmp_path / "damaged")
    (folder / "tokenizer.json").write_text("{")
    (folder / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    with pytest.raises(ValueError, match=r"^cannot read .*tokenizer\.json: "):
        make_llm(folder)


@pytest.mark.parametrize("option", ["enforce_eager", "pipeline_parallel_size"])
def test_unknown_options_are_refused(model, option):
    with pytest.raises(TypeError, match=option):
        LLM(model, **{option: 1})


def test_more_prompts_than_the_queue_holds_are_taken_in_turns(model, monkeypatch):
    """The scheduler refuses what its queue cannot hold; a long list is no overload."""
    with make_llm(model) as llm:
        monkeypatch.setattr(llm._engine, "_max_live", 3)
        prompts = [[5 + n % 7] for n in range(20)]
        outputs = llm.generate(prompts, SamplingParams(temperature=0, max_tokens=2))
        assert [output.prompt_token_ids for output in outputs] == prompts
        assert_idle(llm)


# ---------------------------------------------------------------- interruption and failure


def test_ctrl_c_leaves_an_engine_that_goes_on(llm):
    """It waits for the end of a step: in the middle of one the tables would be half changed."""
    alone = token_ids(llm.generate([[5, 6], [7]], GREEDY))
    # Many more tokens than the time allows.
    prompts = [[5 + n % 9] for n in range(500)]
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    with pytest.raises(KeyboardInterrupt):
        llm.generate(prompts, SamplingParams(temperature=0, max_tokens=120, ignore_eos=True))
    timer.join()
    assert_idle(llm)
    assert token_ids(llm.generate([[5, 6], [7]], GREEDY)) == alone
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_while_a_stream_is_queued_leaves_nothing(llm, monkeypatch):
    """The request was in the queue already, and nobody was left to end it."""
    queue = llm._engine._engine.queue

    def queue_interrupted(request):
        queue(request)
        os.kill(os.getpid(), signal.SIGINT)

    stream = llm.stream([5], SamplingParams(max_tokens=100, ignore_eos=True))
    with monkeypatch.context() as patched:
        patched.setattr(llm._engine._engine, "queue", queue_interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(stream)
    assert_idle(llm)
    assert llm._engine._engine.num_live == 0


def test_a_failing_worker_ends_the_engine_with_one_sentence(model, monkeypatch):
    with make_llm(model) as llm:
        runner = llm._engine._engine._runner

        def fail(step, frame):
            raise MemoryError("no memory for 3 blocks")

        monkeypatch.setattr(runner, "execute", fail)
        with pytest.raises(
            RuntimeError, match=r"rank 0 failed: .*no memory for 3 blocks"
        ) as raised:
            llm.generate([[5], [6]], GREEDY)
        assert "\n" not in str(raised.value)
        with pytest.raises(RuntimeError, match="the engine has stopped: rank 0 failed"):
            llm.generate([5], GREEDY)


def test_a_closed_llm_says_so_and_closes_once(model):
    llm = make_llm(model)
    llm.close()
    llm.close()
    with pytest.raises(RuntimeError, match="closed"):
        llm.generate([5], GREEDY)


def test_an_llm_that_nobody_holds_gives_its_memory_back(model):
    """A finalizer that held the LLM itself would keep the weights until the process ends."""
    llm = make_llm(model)
    llm.generate([5], GREEDY)
    runner = weakref.ref(llm._engine._engine._runner)
    del llm
    deadline = time.monotonic() + 5
    while runner() is not None and time.monotonic() < deadline:
        gc.collect()
    assert runner() is None
