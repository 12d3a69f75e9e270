"""An engine on a Ray of its own: started, streamed from, aborted, and gone without a trace."""

from __future__ import annotations

import itertools
import json
import re
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import psutil
import pytest
import ray
from rowcast.cluster import engine
from rowcast.cluster.client import Client, Overloaded
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.cluster.support import Cluster, in_another_process

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


@pytest.fixture(scope="module")
def started(cluster: Cluster) -> Iterator[engine.EngineInfo]:
    info = cluster.start(mailbox_idle_s=3.0)
    yield info
    assert engine._take_down(cluster.name)


@pytest.fixture
def client(started: engine.EngineInfo, cluster: Cluster) -> Iterator[Client]:
    with Client("auto", name=cluster.name) as made:
        yield made


def is_idle(status: dict) -> bool:
    """Every row, block and mailbox entry is back."""
    return (
        status["running"] == status["waiting"] == status["mailbox_requests"] == 0
        and status["free_blocks"] == status["usable_blocks"]
    )


def test_the_stages_are_told_in_order(started: engine.EngineInfo) -> None:
    assert [stage for stage, _ in started.stages] == [
        "reserve resources",
        "start the scheduler",
        "start 2 workers",
        "load tiny on 2 workers",
        "allocate 1 KV group, and warm up",
        "connect workers and front",
    ]
    assert started.status["state"] == "ready"
    assert started.status["usable_blocks"] > 0


def test_a_stream_grows_and_ends_with_the_answer_of_generate(
    client: Client, cluster: Cluster
) -> None:
    outputs = list(client.stream("Hello", GREEDY))
    texts = [output.outputs[0].text for output in outputs]
    counts = [len(output.outputs[0].token_ids) for output in outputs]
    assert counts == sorted(counts)
    assert counts[-1] == 12
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    last = outputs[-1]
    assert (last.finished, last.outputs[0].finish_reason) == (True, "length")
    assert not any(output.finished for output in outputs[:-1])
    assert last.prompt == "Hello"
    assert last.metrics is not None
    assert last.metrics.time_to_first_token_s is not None
    (whole,) = client.generate("Hello", GREEDY)
    assert whole.outputs == last.outputs
    cluster.wait_until(is_idle)


def test_what_a_prompt_may_be(client: Client) -> None:
    (text,) = client.generate("ab", GREEDY)
    (ids,) = client.generate(text.prompt_token_ids, GREEDY)
    assert ids.outputs == text.outputs
    assert (ids.prompt, text.prompt) == (None, "ab")
    messages = [{"role": "user", "content": "Hi"}]
    (chat,) = client.chat(messages, GREEDY)
    assert chat.prompt == "user: Hi\n"
    assert client.generate(chat.prompt, GREEDY)[0].outputs == chat.outputs
    assert list(client.stream_chat(messages, GREEDY))[-1].outputs == chat.outputs
    several = client.generate(["ab", text.prompt_token_ids, "ab"], [GREEDY] * 3)
    assert [output.outputs for output in several] == [text.outputs] * 3


def test_seeds_repeat_and_differ(client: Client) -> None:
    def answer(seed: int | None) -> list[int]:
        params = SamplingParams(temperature=1.0, seed=seed, max_tokens=24, ignore_eos=True)
        return client.generate("Hello", params)[0].outputs[0].token_ids

    assert answer(7) == answer(7)
    assert len({tuple(answer(None)) for _ in range(3)} | {tuple(answer(7))}) == 4


def test_two_ranks_two_steps_ahead_give_the_tokens_of_one_rank_and_one_step(
    client: Client, cluster: Cluster
) -> None:
    """A-09: sampled and greedy; what ranks and lookahead change must not be seen."""
    from rowcast.launch.llm import LLM

    params = [
        SamplingParams(temperature=t, top_p=p, seed=seed, max_tokens=20, ignore_eos=True)
        for t, p, seed in ((0, 1, 1), (1, 1, 2), (0.7, 0.8, 3), (1, 0.5, 4))
    ]
    prompts = ["Hello", "Hello there", "a", "once upon"]
    with LLM(
        cluster.model, dtype="float32", max_model_len=256, max_num_seqs=8, num_threads=1, depth=1
    ) as llm:
        expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    for _ in range(2):  # the second time with cached prefixes
        outputs = client.generate(prompts, params)
        assert [output.outputs[0].token_ids for output in outputs] == expected


@pytest.mark.parametrize(
    ("prompt", "params", "sentence"),
    [
        ("", GREEDY, "the prompt is empty; give at least one token"),
        ([], GREEDY, "the prompt is empty; give at least one token"),
        ([5, 999], GREEDY, "prompt: token id 999 lies outside the vocabulary [0, 257)"),
        ([1] * 2048, GREEDY, "the prompt has 2048 tokens, max_model_len is 2048"),
        ("x", SamplingParams(stop_token_ids=(300,)), "token id 300 lies outside the vocabulary"),
        ("\ud800", GREEDY, "not valid Unicode"),
        ([5, 999], SamplingParams(n=2), "prompt: token id 999 lies outside the vocabulary"),
    ],
    ids=["empty text", "no ids", "unknown id", "too long", "unknown stop id", "surrogate", "n"],
)
def test_what_cannot_be_served_gets_the_schedulers_sentence(
    client: Client, cluster: Cluster, prompt: str, params: SamplingParams, sentence: str
) -> None:
    with pytest.raises(ValueError, match=r"(?s).*") as caught:
        list(client.stream(prompt, params))
    assert sentence in str(caught.value)
    with pytest.raises(ValueError, match=r"prompts\[1\]: "):
        client.generate(["fine", prompt], [GREEDY, params])
    cluster.wait_until(is_idle)
    assert client.generate("fine", GREEDY)[0].finished


def test_only_requests_of_one_salt_share_a_cached_prefix(client: Client, cluster: Cluster) -> None:
    """B06: a salt that got lost between client and scheduler would isolate nothing, and nobody would see it."""
    prompt = [3 + n % 200 for n in range(33)]
    salts = ["a", "b", "a", None, ""]
    outputs = [client.generate(prompt, GREEDY, cache_salt=salt)[0] for salt in salts]
    assert [output.cached_tokens for output in outputs] == [0, 0, 32, 0, 32]
    assert all(output.outputs == outputs[0].outputs for output in outputs)
    *_, last = client.stream(prompt, GREEDY, cache_salt="b", user="anna")
    assert last.cached_tokens == 32
    with pytest.raises(
        ValueError, match="priority -1 has no effect under the scheduling policy fcfs"
    ):
        client.generate(prompt, GREEDY, priority=-1)
    cluster.wait_until(is_idle)


@pytest.mark.parametrize(
    ("field", "value", "error"),
    [
        ("priority", True, TypeError),
        ("user", "x" * 257, ValueError),
        ("cache_salt", 5, TypeError),
        ("request_id", 12345, TypeError),
        ("request_id", "é" * 129, ValueError),
    ],
)
def test_a_bad_request_option_is_refused_by_its_name(
    client: Client, field: str, value: Any, error: type[Exception]
) -> None:
    """E-03, B06: where the caller stands; an id of 129 letters is 258 bytes, more than the wire takes."""
    with pytest.raises(error, match=f"^{field} must"):
        client.stream([5, 6], GREEDY, **{field: value})


def test_a_second_live_request_of_one_id_is_refused(client: Client, cluster: Cluster) -> None:
    """S12: the first is untouched."""
    first = client.stream("one", LONG, request_id="dup")
    next(first)
    with pytest.raises(ValueError, match="dup"):
        list(client.stream("two", GREEDY, request_id="dup"))
    count = len(next(first).outputs[0].token_ids)
    assert count > 0
    first.close()
    cluster.wait_until(is_idle)
    assert list(client.stream("two", GREEDY, request_id="dup"))[-1].finished


def test_abort_in_decode_and_after_the_end(client: Client, cluster: Cluster) -> None:
    stream = client.stream("abc", LONG, request_id="mine")
    next(stream)
    client.abort("mine")
    last = list(stream)[-1]
    assert last.outputs[0].finish_reason == "abort"
    assert 0 < len(last.outputs[0].token_ids) < 1900
    client.abort("mine")
    client.abort("nobody's")
    cluster.wait_until(is_idle)


def test_abort_while_waiting_and_in_prefill(client: Client, cluster: Cluster) -> None:
    """8 rows, prompts of 8 steps: of 12 requests some are in prefill and four wait when all are aborted."""
    streams = [client.stream([1 + i] * 2000, LONG, request_id=f"r{i}") for i in range(12)]
    ends: dict[int, str | None] = {}

    def drain(index: int) -> None:
        for output in streams[index]:
            ends[index] = output.outputs[0].finish_reason

    threads = [threading.Thread(target=drain, args=(i,)) for i in range(12)]
    for thread in threads:
        thread.start()
    cluster.wait_until(lambda status: status["waiting"] > 0)
    for index in range(12):
        client.abort(f"r{index}")
    for thread in threads:
        thread.join(10)
    assert set(ends.values()) <= {"abort", "length"}
    assert list(ends.values()).count("abort") >= 8
    cluster.wait_until(is_idle)


def test_leaving_a_stream_aborts_it(client: Client, cluster: Cluster) -> None:
    for output in client.stream("abc", LONG):
        if len(output.outputs[0].token_ids) > 2:
            break
    cluster.wait_until(is_idle)


def test_a_call_that_is_broken_off_leaves_nothing(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a prompt is on its way: the front has it, this side does not know."""
    link = client._link
    call = link._call

    def broken_off(*arguments: Any) -> None:
        call(*arguments)
        monkeypatch.setattr(link, "_call", call)
        raise KeyboardInterrupt

    monkeypatch.setattr(link, "_call", broken_off)
    with pytest.raises(KeyboardInterrupt):
        client.generate("abc", LONG)
    cluster.wait_until(is_idle)
    assert client.generate("fine", GREEDY)[0].finished


def test_many_prompts_go_in_batches(client: Client, cluster: Cluster) -> None:
    """R10: more than one call's worth, and more than the 72 that run and wait: the rest is held back, not refused."""
    prompts = [[1 + i % 200] * 60 for i in range(300)]
    params = SamplingParams(temperature=0, max_tokens=2, ignore_eos=True)
    outputs = client.generate(prompts, params)
    assert [output.prompt_token_ids for output in outputs] == prompts
    assert all(len(output.outputs[0].token_ids) == 2 for output in outputs)
    cluster.wait_until(is_idle)


def test_a_full_queue_answers_at_once(client: Client, cluster: Cluster) -> None:
    """8 run and 64 wait: of 80 at once some are refused, in words, and the others are not touched."""
    refused: list[str] = []
    reasons: list[str | None] = []

    def drain(index: int) -> None:
        try:
            outputs = list(client.stream([1 + index] * 60, LONG, request_id=f"q{index}"))
            reasons.append(outputs[-1].outputs[0].finish_reason)
        except Overloaded as error:
            refused.append(str(error))

    threads = [threading.Thread(target=drain, args=(i,)) for i in range(80)]
    for thread in threads:
        thread.start()
    cluster.wait_until(lambda status: bool(refused))
    for index in range(80):
        client.abort(f"q{index}")
    for thread in threads:
        thread.join(10)
    assert len(refused) + len(reasons) == 80
    assert len(refused) <= 8
    assert all("64" in text for text in refused)
    assert set(reasons) <= {"abort", "length"}
    cluster.wait_until(is_idle)


# ---------------------------------------------------------------- stop strings, n answers


def test_a_stop_string_ends_a_request_at_the_front_and_in_the_scheduler(
    client: Client, cluster: Cluster
) -> None:
    """O-02: asked for 1,900 tokens, it is idle long before; what is streamed is never taken back."""
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    text = client.generate("Hello", params)[0].outputs[0].text
    stop = next(c for c in text[8:] if c.isascii() and c.isprintable())
    expected = text[: text.index(stop)]
    stopped = replace(LONG, stop=["never said", stop])
    before = cluster.status()["steps"]
    (answer,) = client.generate("Hello", stopped)[0].outputs
    assert (answer.text, answer.finish_reason, answer.stop_reason) == (expected, "stop", stop)
    assert 0 < len(answer.token_ids) <= 64
    cluster.wait_until(is_idle)
    assert cluster.status()["steps"] - before < 200
    seen = list(client.stream("Hello", stopped))
    assert all(expected.startswith(output.outputs[0].text) for output in seen)
    assert seen[-1].outputs == [answer]
    included = replace(stopped, include_stop_str_in_output=True)
    assert client.generate("Hello", included)[0].outputs[0].text == expected + stop
    cluster.wait_until(is_idle)


def test_a_chats_options_go_to_the_template(client: Client) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    text = "user: Hi\n"
    (plain,) = client.chat(messages, GREEDY)
    assert plain.prompt == text
    more: dict[str, Any] = {"tools": [{"name": "f"}], "chat_template_kwargs": {"mood": "!"}}
    (output,) = client.chat(messages, GREEDY, add_generation_prompt=False, **more)
    assert output.prompt == text + "f!-"
    *_, last = client.stream_chat(messages, GREEDY, **more)
    assert last.prompt == text + "f!"
    with pytest.raises(ValueError, match=r"^chat_template_kwargs must be a dict"):
        client.chat(messages, chat_template_kwargs=3)  # type: ignore[arg-type]


def test_without_params_the_models_recommendation_counts(client: Client) -> None:
    """generation_config.json says max_new_tokens 7 and top_k 1, which is greedy; given params are not touched."""
    greedy = SamplingParams(temperature=0, max_tokens=7)
    (expected,) = client.generate("Hello", greedy)[0].outputs
    assert client.generate("Hello")[0].outputs == [expected]
    *_, last = client.stream("Hello")
    assert last.outputs == [expected]
    (given,) = client.generate("Hello", SamplingParams(ignore_eos=True))[0].outputs
    assert len(given.token_ids) == 16


def test_without_detokenizing_ids_come_alone(client: Client) -> None:
    (with_text,) = client.generate("Hello", GREEDY)[0].outputs
    (ids_alone,) = client.generate("Hello", replace(GREEDY, detokenize=False))[0].outputs
    assert with_text.text
    assert ids_alone == replace(with_text, text="")


def test_two_ranks_score_what_a_client_asks_for(client: Client, cluster: Cluster) -> None:
    """SA-13: an entry a token, of prompt and answers, in a stream as well; text is made where the tokenizer is."""
    params = SamplingParams(
        seed=5, n=2, max_tokens=12, ignore_eos=True, logprobs=1, prompt_logprobs=0
    )
    scored, plain = client.generate(["Hello", "Hello"], [params, GREEDY])
    assert (plain.prompt_logprobs, plain.outputs[0].logprobs) == (None, None)
    assert scored.prompt_logprobs is not None
    ids = [None if entry is None else list(entry) for entry in scored.prompt_logprobs]
    assert ids == [None, *([token_id] for token_id in scored.prompt_token_ids[1:])]
    for answer in scored.outputs:
        assert answer.logprobs is not None
        assert len(answer.logprobs) == len(answer.token_ids) == 12
        for token_id, entry in zip(answer.token_ids, answer.logprobs, strict=True):
            assert next(iter(entry)) == token_id
            assert entry[token_id].decoded_token is not None
            assert len(entry) == 1 + (entry[token_id].rank > 1)
        own = [e[i].logprob for e, i in zip(answer.logprobs, answer.token_ids, strict=True)]
        assert answer.cumulative_logprob == pytest.approx(sum(own))
    for seen in client.stream("Hello", params):
        for answer, whole in zip(seen.outputs, scored.outputs, strict=True):
            assert answer.logprobs == (whole.logprobs or [])[: len(answer.token_ids)]
        if seen.outputs[0].token_ids:
            assert seen.prompt_logprobs == scored.prompt_logprobs
    cluster.wait_until(is_idle)


def test_two_ranks_give_an_answer_the_form_that_a_client_asks_for(
    client: Client, cluster: Cluster
) -> None:
    """Compiled in the scheduler's process, which wakes its loop. E-04: a form that is none ends its own request."""
    form = {"regex": "[0-9]{3}(,[0-9]{3}){2}"}
    params = SamplingParams(seed=5, n=2, max_tokens=40, structured_outputs=form)
    shaped, plain = client.generate(["Hello", "Hello"], [params, GREEDY])
    for answer in shaped.outputs:
        assert re.fullmatch(form["regex"], answer.text)
        assert answer.finish_reason == "stop"
    assert len(plain.outputs[0].token_ids) == 12
    stream = client.stream("Hello", replace(params, n=1))
    assert list(stream)[-1].outputs[0] == shaped.outputs[0]
    bad = replace(GREEDY, structured_outputs={"regex": "a("})
    with pytest.raises(
        ValueError, match=r"^prompts\[1\]: structured_outputs: the regex .*unclosed"
    ):
        client.generate(["Hello", "Hello"], [GREEDY, bad])
    cluster.wait_until(is_idle)
    assert cluster.status()["compiling"] == 0


def test_n_answers_have_the_seeds_from_the_given_one_on(client: Client, cluster: Cluster) -> None:
    """SA-04, and the last seed's successor is 0. One prompt is one output, in a stream as well."""
    last = 2**63 - 1
    params = SamplingParams(seed=last, max_tokens=16, ignore_eos=True)
    alone = [
        client.generate("Hello", replace(params, seed=seed))[0].outputs[0].token_ids
        for seed in (last, 0, 1)
    ]
    three, one = client.generate(["Hello", "World"], [replace(params, n=3), params])
    assert [answer.token_ids for answer in three.outputs] == alone
    assert [answer.index for answer in three.outputs] == [0, 1, 2]
    assert (three.finished, three.prompt, len(one.outputs)) == (True, "Hello", 1)
    seen = list(client.stream("Hello", replace(params, n=3)))
    assert seen[-1].outputs == three.outputs
    assert {len(output.outputs) for output in seen} == {3}
    assert [output.finished for output in seen[:-1]] == [False] * (len(seen) - 1)
    free = client.generate("Hello", replace(params, n=3, seed=None))[0].outputs
    assert len({tuple(answer.token_ids) for answer in free}) == 3
    cluster.wait_until(is_idle)


def test_aborting_a_request_ends_all_of_its_answers(client: Client, cluster: Cluster) -> None:
    """O-07."""
    params = SamplingParams(max_tokens=1900, ignore_eos=True, n=2)
    stream = client.stream("abc", params, request_id="two")
    next(stream)
    client.abort("two")
    last = list(stream)[-1]
    assert [answer.finish_reason for answer in last.outputs] == ["abort", "abort"]
    assert last.finished
    cluster.wait_until(is_idle)
    for _ in client.stream("abc", params):
        break
    cluster.wait_until(is_idle)


def test_each_of_n_answers_takes_a_place_in_the_queue(client: Client, cluster: Cluster) -> None:
    """8 run and 64 wait: 80 at once do not fit, and none of them is left; a list is taken in turns."""
    params = SamplingParams(max_tokens=2, ignore_eos=True, n=80)
    with pytest.raises(Overloaded, match="64"):
        list(client.stream([7] * 60, replace(params, max_tokens=1900)))
    cluster.wait_until(is_idle)
    (output,) = client.generate([7] * 60, params)
    assert [len(answer.token_ids) for answer in output.outputs] == [2] * 80
    cluster.wait_until(is_idle)


def test_ten_clients_at_once(started: engine.EngineInfo, cluster: Cluster) -> None:
    answers: list[list[int]] = []

    def one() -> None:
        with Client(name=cluster.name) as client:
            answers.append(client.generate("Hello", GREEDY)[0].outputs[0].token_ids)

    threads = [threading.Thread(target=one) for _ in range(10)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert len(answers) == 10
    assert len({tuple(answer) for answer in answers}) == 1


STREAM_SCRIPT = """
import json, sys, rowcast
client = rowcast.Client(sys.argv[1], name="t")
params = rowcast.SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
grown = [o.outputs[0].text for o in client.stream("Hello", params)]
stream = client.stream("abc", rowcast.SamplingParams(max_tokens=1900, ignore_eos=True), request_id="r")
next(stream)
client.abort("r")
reason = list(stream)[-1].outputs[0].finish_reason
(answer,) = client.generate("Hello", params)
asked = rowcast.SamplingParams(temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1)
scored = repr([(o.outputs, o.prompt_logprobs) for o in client.stream("Hello", asked)][-1])
client.close()
heavy = [m for m in ("torch", "transformers") if m in sys.modules]
print(json.dumps([grown, reason, answer.outputs[0].text, scored, heavy]))
"""


def test_a_ray_client_in_another_process_streams_and_aborts(
    client: Client, cluster: Cluster
) -> None:
    """Through ray://, with nothing on stderr and no torch."""
    params = SamplingParams(temperature=0, max_tokens=400, ignore_eos=True)
    output = in_another_process(STREAM_SCRIPT, cluster.client_address)
    grown, reason, whole, scored, heavy = json.loads(output)
    assert len(grown) > 1
    assert grown[-1] == whole == client.generate("Hello", params)[0].outputs[0].text
    assert reason == "abort"
    asked = SamplingParams(
        temperature=0, max_tokens=5, ignore_eos=True, logprobs=2, prompt_logprobs=1
    )
    here = client.generate("Hello", asked)[0]
    assert scored == repr((here.outputs, here.prompt_logprobs))
    assert heavy == []
    cluster.wait_until(is_idle)


LOST_SCRIPT = """
import sys, ray, rowcast
from rowcast.cluster.engine import EngineFailed
client = rowcast.Client(sys.argv[1], name="t")
stream = client.stream("abc", rowcast.SamplingParams(max_tokens=1900, ignore_eos=True))
next(stream)
print(ray.util.client.ray.get_context().client_worker._reconnect_grace_period)
ray.shutdown()
for use in (lambda: list(stream), lambda: client.generate("abc"), client.close):
    try:
        use()
    except EngineFailed as error:
        print(error)
"""


def test_a_connection_that_was_lost_is_a_sentence(
    started: engine.EngineInfo, cluster: Cluster
) -> None:
    """Ray Client went on for 30 s when its cluster was gone, and then raised a plain Exception at each call."""
    lines = in_another_process(LOST_SCRIPT, cluster.client_address).splitlines()
    assert lines[0] == "5"
    assert len(lines) == 3
    assert all("engine 't' is gone: its front cannot be reached" in line for line in lines[1:])


VANISH_SCRIPT = """
import os, sys, rowcast
client = rowcast.Client(sys.argv[1], name="t")
stream = client.stream("abc", rowcast.SamplingParams(max_tokens=1900, ignore_eos=True))
next(stream)
print("going", flush=True)
os._exit(0)
"""


def test_a_client_that_vanishes_leaves_nothing(
    started: engine.EngineInfo, cluster: Cluster
) -> None:
    """R10: its mailbox is not polled, expires (3 s here), and its requests are aborted."""
    clients = cluster.status()["clients"]
    assert in_another_process(VANISH_SCRIPT, cluster.client_address) == "going\n"
    cluster.wait_until(lambda s: is_idle(s) and s["clients"] <= clients, timeout_s=15)


def test_waits_for_the_end_that_were_given_up_hold_nothing(
    started: engine.EngineInfo, cluster: Cluster
) -> None:
    """Each kept one of the scheduler's 16 threads: `rowcast status` hung after a quarter of an hour of `serve`."""
    for _ in range(20):
        assert engine.wait_engine(cluster.name, 0.02) is None
    assert cluster.status()["state"] == "ready"


def test_no_torch_in_the_scheduler_and_the_front(
    started: engine.EngineInfo, cluster: Cluster
) -> None:
    for actor in ("scheduler", "front-0"):
        handle = ray.get_actor(f"{cluster.name}/{actor}", namespace="rowcast")
        modules = ray.get(handle.loaded_modules.remote(), timeout=10)
        heavy = {"torch", "triton", "numba", "transformers"} & set(modules)
        assert not heavy, f"{actor} loaded {heavy}"
        assert "rowcast.scheduler.door" in modules, "this is the process that was meant"


def test_an_engine_of_a_name_that_is_taken_is_refused(client: Client, cluster: Cluster) -> None:
    """R09: at once, naming the option, and the first one lives on."""
    with pytest.raises(ValueError, match="--name") as caught:
        cluster.start()
    assert "'t'" in str(caught.value)
    assert client.generate("fine", GREEDY)[0].finished


def test_two_starts_at_once_settle_on_one(
    client: Client, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R09: the second start looked before the first had made anything; it takes nothing down that is not its own."""
    monkeypatch.setattr(engine, "_refuse_second", lambda name: None)
    with pytest.raises(ValueError, match="--name"):
        cluster.start()
    assert client.generate("fine", GREEDY)[0].finished


def test_an_unknown_engine_is_told_with_those_that_there_are(
    started: engine.EngineInfo, cluster: Cluster
) -> None:
    with pytest.raises(ValueError, match="no engine named 'other'"):
        Client(cluster.session.address, name="other")
    with pytest.raises(ValueError, match="there is t"):
        engine.engine_status("other", cluster.session.address)


def test_sockets_of_the_engine_listen_on_loopback_alone(
    started: engine.EngineInfo, cluster: Cluster
) -> None:
    """R16: on one node nobody else has to reach them."""
    pids = cluster.status()["pids"]
    ours = {
        (who, connection.laddr)
        for who, pid in pids.items()
        for connection in psutil.Process(pid).net_connections("tcp")
        if connection.status == psutil.CONN_LISTEN
        and not 10_002 <= connection.laddr.port < 20_000  # Ray's own
    }
    assert {who for who, _ in ours} == {"scheduler", "worker-0"}
    assert len(ours) == 4, "PUB, PULL and ROUTER, and the ranks' meeting place"
    assert {address.ip for _, address in ours} == {"127.0.0.1"}


def test_an_idle_engine_does_not_spin(client: Client, cluster: Cluster) -> None:
    """R07: less than 2 s of CPU a minute and process; 0.1 s in 3 s with room for Ray's own heartbeats."""
    client.generate("warm", GREEDY)
    pids = cluster.status()["pids"]
    processes = {name: psutil.Process(pid) for name, pid in pids.items()}
    assert set(processes) == {"scheduler", "front-0", "worker-0", "worker-1"}

    def used() -> dict[str, float]:
        times = {name: process.cpu_times() for name, process in processes.items()}
        return {name: t.user + t.system for name, t in times.items()}

    before = used()
    time.sleep(3)
    after = used()
    spun = {name: after[name] - before[name] for name in after if after[name] - before[name] > 0.3}
    assert not spun, f"CPU seconds in 3 s of nothing: {spun}"
