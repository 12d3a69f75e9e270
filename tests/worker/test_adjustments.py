"""What rows ask to be done to their logits: exact numbers, out of a real request table, on any number of ranks."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
import torch
from rowcast.scheduler.messages import Features
from rowcast.tests.worker.fake_ranks import on_ranks
from rowcast.tests.worker.sampling import sampler_of
from rowcast.tests.worker.steps import i32, make_state, request, step
from rowcast.worker.sampler.bad_words import forbidden
from rowcast.worker.sampling_inputs import adjustments, sampling_rows
from rowcast.worker.state import WorkerState

VOCAB_SIZE = 1024
INF = float("inf")


def state_of(*requests: dict) -> tuple[WorkerState, object]:
    """Tables in which each request runs its whole prompt now, and the plan of that step. Row i holds requests[i]."""
    state = make_state(max_model_len=4096, num_blocks=5000, vocab_size=VOCAB_SIZE, max_num_seqs=40)
    run, grown = {}, 0
    for entry in requests:
        length = len(entry["tokens"])
        grown += -(-length // 16)
        if length > 1:
            run[entry["rows"]] = length
    plan = state.apply(step(*requests, run=run, grow=[range(1, grown + 1)]))
    return state, plan


def adjusted(logits: torch.Tensor, *requests: dict, cuts: tuple[int, ...] = ()) -> torch.Tensor:
    """The logits of rows 0, 1, 2, ... after all that the requests ask for; cuts split the vocabulary between ranks."""
    state, plan = state_of(*requests)
    asked = adjustments(state.requests, plan)
    borders = (0, *cuts, logits.shape[1])
    by_batch = logits[torch.from_numpy(plan.index_mapping.astype(np.int64))]
    parts = []
    for start, stop in pairwise(borders):
        part = by_batch[:, start:stop].clone()
        if asked is not None:
            asked.apply(part, range(start, stop), logits.shape[1])
        parts.append(part)
    out = torch.empty_like(logits)
    out[torch.from_numpy(plan.index_mapping.astype(np.int64))] = torch.cat(parts, dim=1)
    return out


def flat(rows: int = 1) -> torch.Tensor:
    return torch.full((rows, VOCAB_SIZE), 0.01)


# ---------------------------------------------------------------- penalties (SA-09, W-11)


def test_penalties_to_the_last_digit():
    """SA-09: repetition 2.0 makes 1.0 of 2.0 and -4.0 of -2.0; frequency 0.5 three times -1.5; presence 0.5 once."""
    logits = torch.zeros(1, VOCAB_SIZE)
    logits[0, 7], logits[0, 8] = 2.0, -2.0
    tokens = [7, 8, 3, 5, 5, 5]  # of which three are the prompt
    (row,) = adjusted(logits, request(0, tokens, prompt=3, repetition_penalty=2.0))
    assert row[[7, 8, 3, 9]].tolist() == [1.0, -4.0, 0.0, 0.0]
    (row,) = adjusted(logits, request(0, tokens, prompt=3, frequency_penalty=0.5))
    assert row[[7, 8, 3, 5]].tolist() == [2.0, -2.0, 0.0, -1.5]
    (row,) = adjusted(logits, request(0, tokens, prompt=3, presence_penalty=0.5))
    assert row[[7, 8, 3, 5]].tolist() == [2.0, -2.0, 0.0, -0.5]
    logits[0, 5] = 4.0
    (row,) = adjusted(
        logits,
        request(0, tokens, prompt=3, repetition_penalty=2.0, frequency_penalty=0.5,
                presence_penalty=0.25),
    )  # fmt: skip
    assert row[5].item() == 4.0 / 2.0 - 3 * 0.5 - 0.25  # in this order


@pytest.mark.parametrize("count", [1, 2, 32])
def test_penalties_of_flat_logits(count: int):
    """SA-09: which id becomes the lowest and which the highest, in every row of a batch."""
    rng = np.random.default_rng(count)
    tokens, prompts = [], []
    for _ in range(count):
        outputs = rng.integers(0, VOCAB_SIZE, 20).tolist()
        prompts.append(rng.integers(0, VOCAB_SIZE, 10).tolist())
        tokens.append(prompts[-1] + outputs + [outputs[3]] * 3)  # one is the most frequent

    def lowest_and_highest(**penalty) -> list[tuple[int, int]]:
        rows = adjusted(
            flat(count), *(request(i, t, prompt=10, **penalty) for i, t in enumerate(tokens))
        )
        return list(zip(rows.argmin(dim=1).tolist(), rows.argmax(dim=1).tolist(), strict=True))

    for sign in (1, -1):
        for row, ends in enumerate(lowest_and_highest(presence_penalty=2.0 * sign)):
            low, high = ends[::sign]
            assert low in tokens[row][10:]
            assert high not in tokens[row][10:]
        for row, ends in enumerate(lowest_and_highest(frequency_penalty=2.0 * sign)):
            assert ends[::sign][0] == tokens[row][-1]
    for row, (low, high) in enumerate(lowest_and_highest(repetition_penalty=1.9)):
        assert low in tokens[row]
        assert high not in tokens[row]
    for row, (low, high) in enumerate(lowest_and_highest(repetition_penalty=0.1)):
        assert low not in tokens[row]
        assert high in tokens[row]


def test_a_replay_of_2048_tokens_counts_only_its_outputs():
    """W-11: 1,024 of them are prompt: seen by repetition, never by presence and frequency."""
    tokens = [*range(1024), *range(1024)]
    state, plan = state_of(request(0, tokens, prompt=1024, frequency_penalty=1.0))
    logits = torch.zeros(1, VOCAB_SIZE)
    adjustments(state.requests, plan).apply(logits, range(VOCAB_SIZE), VOCAB_SIZE)
    assert (logits == -1.0).all()
    half = [*range(512)] * 2 + [*range(512, 1024)] * 2
    (row,) = adjusted(
        torch.ones(1, VOCAB_SIZE), request(0, half, prompt=1024, presence_penalty=1.0)
    )
    assert (row[:512] == 1.0).all()
    assert (row[512:] == 0.0).all()
    (row,) = adjusted(
        torch.ones(1, VOCAB_SIZE), request(0, half, prompt=1024, repetition_penalty=2)
    )
    assert (row == 0.5).all()


def test_a_tiny_repetition_penalty_stays_finite():
    logits = torch.full((1, VOCAB_SIZE), 30.0)
    (row,) = adjusted(logits, request(0, [5], repetition_penalty=2.0**-126))
    assert torch.isfinite(row / 1e-5).all()
    assert row[5] == row.max()


# ---------------------------------------------------------------- bias, allow-list (SA-11)


def test_a_bias_is_added_to_its_ids_alone():
    """SA-11: +1.2 and -0.1 on 0.01."""
    bias = Features(bias_ids=i32(4, 900), bias=np.array([1.2, -0.1], np.float32))
    rows = adjusted(flat(2), request(0, [1], features=bias), request(1, [1]))
    assert rows[0, [4, 900]].tolist() == pytest.approx([1.21, -0.09])
    rows[0, [4, 900]] = 0.01
    assert torch.equal(rows, flat(2))


def test_only_allowed_ids_are_left():
    """SA-11: allowed_token_ids [10] leaves 10, with the logit that it had."""
    rows = adjusted(flat(2), request(0, [1], features=Features(allowed=i32(10))), request(1, [1]))
    assert rows[0, 10] == flat()[0, 10]
    assert (rows[0] == -INF).sum() == VOCAB_SIZE - 1
    assert torch.equal(rows[1], flat()[0])


# ---------------------------------------------------------------- bad words (SA-12)


@pytest.mark.parametrize(
    ("word", "ids"),
    [([10, 11, 60], [60]), ([11, 11, 50], []), ([7], [7]), ([5, 10, 11, 9], []), ([11, 8], [8])],
)
def test_a_word_forbids_its_last_id_where_the_outputs_end_in_the_others(word, ids):
    """SA-12: outputs [10, 11] after prompt [5], which does not count."""
    assert forbidden([i32(*word)], i32(10, 11)).tolist() == ids
    features = Features(bad_words=(i32(*word),))
    rows = adjusted(flat(2), request(0, [5, 10, 11], prompt=1, features=features), request(1, [5]))
    assert torch.nonzero(rows[0] == -INF).flatten().tolist() == ids
    assert torch.equal(rows[1], flat()[0])


@pytest.mark.parametrize("lengths", [(1,), (1, 3), (2, 2)])
def test_words_of_several_lengths(lengths):
    """SA-12: each that the outputs have begun is forbidden to end, and no other."""
    outputs = [20, 21, 22]
    words = [i32(*outputs[len(outputs) - n + 1 :], 100 + n) for n in lengths]
    strangers = [i32(*([30] * (n - 1)), 200 + n) for n in lengths if n > 1]
    features = Features(bad_words=(*words, *strangers))
    (row,) = adjusted(flat(), request(0, [20, *outputs], prompt=1, features=features))
    assert set(torch.nonzero(row == -INF).flatten().tolist()) == {100 + n for n in lengths}


# ---------------------------------------------------------------- min_tokens (SA-10)


def test_ends_are_forbidden_before_min_tokens():
    features = Features(min_tokens=3, min_tokens_ids=i32(2, 42))
    for num_outputs in range(5):
        tokens = [5, *([6] * num_outputs)]
        (row,) = adjusted(flat(), request(0, tokens, prompt=1, features=features))
        expected = [2, 42] if num_outputs < 3 else []
        assert torch.nonzero(row == -INF).flatten().tolist() == expected


def test_what_would_leave_nothing_is_let_go():
    """A row of -inf alone has no token to choose, and NaN for probabilities."""
    both = Features(allowed=i32(2, 9), bad_words=(i32(9),), min_tokens=5, min_tokens_ids=i32(2))
    one = Features(allowed=i32(2, 9), bad_words=(i32(9),))
    rows = adjusted(flat(2), request(0, [5], features=both), request(1, [5], features=one))
    assert torch.nonzero(rows[0] > -INF).flatten().tolist() == [2, 9]
    assert torch.nonzero(rows[1] > -INF).flatten().tolist() == [2]
    everything = Features(bad_words=tuple(i32(token) for token in range(8)))
    assert torch.equal(
        adjusted(torch.zeros(1, 8), request(0, [5], features=everything))[0], torch.zeros(8)
    )


# ---------------------------------------------------------------- all of them


def a_request(rng: np.random.Generator, row: int) -> dict:
    """W-08's ranges: a few options of many, and a few tokens of which some repeat."""
    length = int(rng.integers(2, 60))
    ids = np.sort(rng.choice(VOCAB_SIZE, 30, replace=False)).astype(np.int32)
    tokens = rng.choice(ids, length).tolist()
    features = None
    if rng.random() < 0.6:
        words = [i32(tokens[-1], int(ids[0])), i32(int(ids[1])), i32(3, 4, 5)]
        features = Features(
            bias_ids=ids[:5],
            bias=rng.uniform(-100, 100, 5).astype(np.float32),
            allowed=ids[:20] if rng.random() < 0.4 else None,
            bad_words=tuple(words[: rng.integers(1, 4)]),
            min_tokens=int(rng.integers(1, 10)),
            min_tokens_ids=ids[10 : 10 + rng.integers(1, 9)],
        )
    penalties = {}
    if rng.random() < 0.6:
        penalties = {
            "presence_penalty": rng.uniform(-2, 2),
            "frequency_penalty": rng.uniform(-2, 2),
            "repetition_penalty": rng.uniform(0.05, 2),
        }
    return request(
        row, tokens, prompt=int(rng.integers(1, length)), features=features, **penalties,
        temperature=float(rng.choice([0, 0.7, 1])), top_k=int(rng.choice([0, 5])),
        min_p=float(rng.choice([0, 0.1])), top_p=float(rng.choice([1, 0.9])), seed=row,
    )  # fmt: skip


def by_hand(logits: np.ndarray, entry: dict) -> np.ndarray:
    """The same in plain loops."""
    row = logits.astype(np.float32).copy()
    prompt, tokens = entry["num_prompt_tokens"], entry["tokens"]
    outputs, features = tokens[prompt:], entry["features"]
    banned, bias = set(), {}
    if features is not None:
        if len(outputs) < features.min_tokens:
            banned |= set(features.min_tokens_ids.tolist())
        for word in features.bad_words:
            *others, last = word.tolist()
            if outputs[len(outputs) - len(others) :] == others and len(others) <= len(outputs):
                banned.add(last)
        bias = dict(zip(features.bias_ids.tolist(), features.bias, strict=True))
        if features.allowed is not None:
            allowed = set(features.allowed.tolist())
            banned = set() if allowed <= banned else banned
            banned |= set(range(len(row))) - allowed
    for token in banned:
        row[token] = -INF
    for token, value in bias.items():
        row[token] += value
    for token in set(tokens):
        factor = np.float32(entry["repetition_penalty"])
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
    for token in set(outputs):
        row[token] -= np.float32(entry["frequency_penalty"]) * np.float32(outputs.count(token))
        row[token] -= np.float32(entry["presence_penalty"])
    return row


@pytest.mark.parametrize("count", [1, 2, 32])
def test_every_option_of_every_row_as_by_hand_on_any_rank_count(count: int):
    rng = np.random.default_rng(count)
    logits = torch.from_numpy(rng.standard_normal((count, VOCAB_SIZE)).astype(np.float32) * 3)
    entries = [a_request(rng, row) for row in range(count)]
    whole = adjusted(logits, *entries)
    for row, entry in enumerate(entries):
        expected = by_hand(logits[row].numpy(), entry)
        np.testing.assert_allclose(whole[row].numpy(), expected, rtol=1e-6, atol=1e-6)
    for cuts in ((500,), (1, 2, 3), (341, 683)):
        assert torch.equal(adjusted(logits, *entries, cuts=cuts), whole)


def test_rows_that_stay_are_adjusted_as_in_tables_of_their_own():
    """W-07, W-08: rows are freed and reused at random; what is left in the table asks for what it asked for."""
    rng = np.random.default_rng(8)
    state = make_state(max_model_len=64, num_blocks=1000, vocab_size=VOCAB_SIZE, max_num_seqs=32)
    held: dict[int, dict] = {}
    for turn in range(12):
        free = [row for row in held if rng.random() < 0.4]
        for row in free:
            del held[row]
        new = [row for row in range(32) if row not in held and rng.random() < 0.5]
        admitted = [a_request(rng, row) for row in new]
        held |= dict(zip(new, admitted, strict=True))
        run = {entry["rows"]: len(entry["tokens"]) for entry in admitted}
        blocks = sum(-(-length // 16) for length in run.values())
        others = [row for row in held if row not in new]
        plan = state.apply(
            step(*admitted, free=free, run=run, pause=others, grow=[range(1, blocks + 1)])
        )
        logits = torch.from_numpy(rng.standard_normal((plan.num_reqs, VOCAB_SIZE)).astype("f4"))
        asked = adjustments(state.requests, plan)
        got = logits.clone()
        if asked is not None:
            asked.apply(got, range(VOCAB_SIZE), VOCAB_SIZE)
        for place, row in enumerate(plan.index_mapping.tolist()):
            expected = by_hand(logits[place].numpy(), held[row])
            np.testing.assert_allclose(got[place].numpy(), expected, rtol=1e-6, atol=1e-6)
        tokens = rng.integers(0, VOCAB_SIZE, plan.num_reqs).astype(np.int32)
        state.commit(plan, tokens)
        for row, token in zip(plan.index_mapping.tolist(), tokens.tolist(), strict=True):
            held[row]["tokens"].append(token)
        assert set(state.requests.features) == {
            row for row, entry in held.items() if entry["features"] is not None
        }, turn


def test_nobody_is_looked_at_when_nobody_asks():
    state, plan = state_of(request(0, [1, 2]), request(1, [3]))
    assert adjustments(state.requests, plan) is None


def test_every_rank_chooses_the_same_token_of_adjusted_rows():
    """Whole parts of the vocabulary may be forbidden on one rank: that must not become NaN."""
    count = 24
    rng = np.random.default_rng(3)
    logits = torch.from_numpy(rng.standard_normal((count, VOCAB_SIZE)).astype(np.float32) * 3)
    entries = [a_request(rng, row) for row in range(count)]
    entries[0]["features"] = Features(allowed=i32(10))
    entries[1]["features"] = Features(allowed=i32(3, 1020))
    for entry in entries[:2]:
        entry |= {"temperature": 1.0, "top_k": 0, "top_p": 0.9}
    state, plan = state_of(*entries)
    rows, asked = sampling_rows(state.requests, plan), adjustments(state.requests, plan)

    def tokens(cuts: tuple[int, ...]) -> list[list[int]]:
        ranks = tuple(range(a, b) for a, b in pairwise((0, *cuts, VOCAB_SIZE)))

        def work(group):
            mine = ranks[group.rank]
            part = logits[:, mine.start : mine.stop].clone()
            return sampler_of(ranks, group).sample(part, rows, asked).tokens.tolist()

        return on_ranks(len(ranks), work)

    alone = sampler_of((range(VOCAB_SIZE),))
    expected = alone.sample(logits.clone(), rows, asked).tokens.tolist()
    places = {row: place for place, row in enumerate(plan.index_mapping.tolist())}
    assert expected[places[0]] == 10
    assert expected[places[1]] in (3, 1020)
    for cuts in ((500,), (100, 700), (20, 21, 1000)):
        assert all(chosen == expected for chosen in tokens(cuts))
