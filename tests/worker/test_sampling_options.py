"""Every option that a user may set, on a tiny model: it does what it says, and an ignored one would show."""

from __future__ import annotations

import pytest
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_llama,
    make_runner,
    random_prompts,
)
from rowcast.tests.worker.rank_pool import generate_on_rank
from rowcast.worker.model_runner import ModelRunner

MAX_TOKENS = 30
EOS = tuple(range(4, 199, 10))  # a tenth of the vocabulary, so that some request meets one
Tokens = list[list[int]]


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> ModelRunner:
    folder = make_llama(tmp_path_factory.mktemp("llama"), eos_token_id=list(EOS))
    return make_runner(folder, max_num_seqs=34)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return random_prompts(34, vocab_size=199, longest=12)


@pytest.fixture(scope="module")
def plain(runner: ModelRunner, prompts: list[list[int]]) -> Tokens:
    tokens = generate(runner, prompts, greedy(MAX_TOKENS))
    assert {len(outputs) for outputs in tokens} == {MAX_TOKENS}
    return tokens


def cut_behind(outputs: list[int], ends: set[int]) -> list[int]:
    for place, token in enumerate(outputs):
        if token in ends:
            return outputs[: place + 1]
    return outputs


def asked(**options) -> SamplingParams:
    return SamplingParams(
        **{"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **options}
    )


def test_options_that_end_a_request_cut_the_greedy_tokens_where_they_say(runner, prompts, plain):
    """E-08: an end that is ignored gives the plain tokens, one that is late gives some too many."""
    stops = {plain[0][5], plain[1][7]}
    for params, expected in (
        (asked(max_tokens=7), [outputs[:7] for outputs in plain]),
        (asked(stop_token_ids=tuple(stops)), [cut_behind(outputs, stops) for outputs in plain]),
        (asked(ignore_eos=False), [cut_behind(outputs, set(EOS)) for outputs in plain]),
    ):
        assert expected != plain
        assert generate(runner, prompts, params) == expected, params


def test_options_that_choose_a_token_change_the_tokens(runner, prompts, plain):
    """E-08: each of them against the same request without it; what changes nothing was not looked at."""
    hot = generate(runner, prompts, asked(temperature=1.5))
    others = {
        "temperature": generate(runner, prompts, asked(temperature=0.5)),
        "top_k": generate(runner, prompts, asked(temperature=1.5, top_k=3)),
        "top_p": generate(runner, prompts, asked(temperature=1.5, top_p=0.5)),
        "min_p": generate(runner, prompts, asked(temperature=1.5, min_p=0.2)),
        "seed": generate(runner, prompts, asked(temperature=1.5), seeds=range(100, 134)),
    }
    for name, tokens in others.items():
        changed = sum(one != other for one, other in zip(tokens, hot, strict=True))
        assert changed > 17, f"{name} changed {changed} of 34 requests"
    assert hot != plain


ADJUSTED = {
    "presence_penalty": {"presence_penalty": 2.0},
    "frequency_penalty": {"frequency_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.9},
    "logit_bias": {"logit_bias": {7: 3.0, 11: 3.0, 90: -100}},
    "allowed_token_ids": {"allowed_token_ids": range(0, 199, 3)},
    "bad_words": {"bad_words_token_ids": [[token] for token in range(0, 199, 4)] + [[5, 6]]},
    "min_tokens": {"stop_token_ids": tuple(range(0, 199, 5)), "min_tokens": MAX_TOKENS},
}


@pytest.mark.parametrize("name", ADJUSTED)
def test_options_that_adjust_the_logits_change_greedy_tokens(runner, prompts, plain, name):
    """E-08, P-09: most of 34 requests; a penalty alone leaves those that never repeat a token."""
    tokens = generate(runner, prompts, asked(**ADJUSTED[name]))
    changed = sum(one != other for one, other in zip(tokens, plain, strict=True))
    assert changed > 17, f"{name} changed {changed} of 34 requests"


def mixed(count: int) -> list[SamplingParams]:
    """Each option, alone and with others, greedy and not."""
    options = list(ADJUSTED.values())
    params = []
    for number in range(count):
        one, other = options[number % 7], options[(number // 7 + number) % 7]
        rest = {"temperature": 0} if number % 2 else {"temperature": 1.2, "min_p": 0.05}
        params.append(asked(**rest, **(one | other)))
    return params


@pytest.mark.parametrize(
    ("worker", "scheduler"),
    [
        ({}, {"num_blocks": 17}),
        ({"max_num_batched_tokens": 7}, {}),
        ({"max_num_batched_tokens": 48, "depth": 1}, {"num_blocks": 17}),
        ({"max_num_seqs": 3, "depth": 3}, {}),
    ],
    ids=["preempted", "chunked", "preempted in turn", "rows reused"],
)
def test_how_a_request_is_served_changes_nothing_of_what_it_asked(
    runner, prompts, worker, scheduler
):
    """P-09, A-09, W-07, W-11: preempted, in chunks, at other depths, in rows that others had before."""
    expected = generate(runner, prompts, mixed(34))
    other = make_runner(runner.config.model_dir, **{"max_num_seqs": 34, **worker})
    assert generate(other, prompts, mixed(34), **scheduler) == expected


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_that_share_the_vocabulary_choose_what_one_chooses(
    runner, prompts, rank_pool, world_size
):
    """199 ids do not divide, and each rank adjusts its own; all digests are compared in every step."""
    expected = generate(runner, prompts, mixed(34))
    case = ({"max_num_seqs": 34}, prompts, mixed(34))
    folder = runner.config.model_dir
    for tokens in rank_pool.run(world_size, generate_on_rank, folder, [case]):
        assert tokens == [expected]


@pytest.mark.parametrize(
    "options", [{"top_k": 1}, {"top_p": 1e-50}, {"temperature": 1e-6}], ids=str
)
def test_options_that_leave_one_token_give_the_greedy_ones(runner, prompts, plain, options):
    """E-08; and top_p 1e-50 is 0 as float32, which no worker takes."""
    assert generate(runner, prompts, asked(**({"temperature": 1.5} | options))) == plain
