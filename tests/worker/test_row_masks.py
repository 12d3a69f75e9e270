"""Structured output at the worker: what a mask leaves of the logits, and whole steps that wait for theirs."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from rowcast.scheduler.grammars import bits_of
from rowcast.scheduler.messages import Features, Mask, ProtocolError
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.scheduler.fake_forms import allowed_ids, form
from rowcast.tests.worker.generation import generate, make_llama, make_runner, random_prompts
from rowcast.tests.worker.rank_pool import generate_on_rank
from rowcast.tests.worker.steps import i32
from rowcast.worker.sampler.adjustments import Adjustments, RowFeatures
from rowcast.worker.sampler.row_masks import RowMasks
from rowcast.worker.step_checks import check_mask

NONE = float("-inf")


def masks_of(*allowed: list[int], rows: tuple[int, ...], vocab_size: int) -> RowMasks:
    words = -(-vocab_size // 32)
    return RowMasks(rows=np.array(rows), bits=np.array([bits_of(ids, words) for ids in allowed]))


@pytest.mark.parametrize("vocab_size", [1, 31, 32, 33, 64, 97])
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_each_rank_keeps_what_the_mask_allows_of_its_own_part(vocab_size: int, num_ranks: int):
    """A part begins and ends anywhere in a word, and may be empty."""
    rng = np.random.default_rng(vocab_size)
    logits = torch.from_numpy(rng.normal(size=(4, vocab_size)).astype(np.float32))
    ids = [np.flatnonzero(rng.random(vocab_size) < 0.4).tolist() or [0] for _ in range(2)]
    masks = masks_of(*ids, rows=(1, 3), vocab_size=vocab_size)
    expected = logits.clone()
    for row, allowed in zip((1, 3), ids, strict=True):
        expected[row] = NONE
        expected[row, allowed] = logits[row, allowed]
    borders = np.linspace(0, vocab_size, num_ranks + 1).astype(int).tolist()
    parts = []
    for start, stop in pairwise(borders):
        part = logits[:, start:stop].clone()
        masks.keep(part, range(start, stop))
        parts.append(part)
    assert torch.equal(torch.cat(parts, dim=1), expected)


def test_the_example_of_the_docstring():
    logits = torch.zeros(2, 2)
    masks_of([0, 2], rows=(1,), vocab_size=4).keep(logits, range(2, 4))
    assert logits.tolist() == [[0, 0], [0, NONE]]


@pytest.mark.parametrize(
    ("features", "left"),
    [
        (Features(allowed=i32(2, 4, 5)), [2, 4]),
        (Features(allowed=i32(5, 6)), [1, 2, 3, 4]),  # nothing in common: the list is let go
        (Features(bad_words=(i32(2), i32(7))), [1, 3, 4]),
        (Features(bad_words=tuple(i32(i) for i in (1, 2, 3, 4))), [1, 2, 3, 4]),
        (Features(min_tokens=1, min_tokens_ids=i32(4, 6)), [1, 2, 3]),
        (Features(allowed=i32(4, 5), min_tokens=1, min_tokens_ids=i32(4)), [4]),
        (Features(allowed=i32(5), min_tokens=1, min_tokens_ids=i32(4)), [1, 2, 3]),
    ],
)
def test_a_mask_prevails_and_something_is_always_left(features: Features, left: list[int]):
    """A set without an id has no best one: the choice would be any id, and no answer of its form."""
    for ids_here in (range(0, 8), range(0, 3), range(3, 8)):
        logits = torch.zeros(1, len(ids_here))
        asked = RowFeatures(row=0, features=features, outputs=i32())
        masks = masks_of([1, 2, 3, 4], rows=(0,), vocab_size=8)
        Adjustments(features=[asked], masks=masks).apply(logits, ids_here, 8)
        kept = [ids_here[column] for column in np.flatnonzero(logits[0] == 0).tolist()]
        assert kept == [id_ for id_ in left if id_ in ids_here]


def test_a_mask_that_does_not_fit_its_step_is_refused():
    good = Mask(step_sequence=1, rows=i32(3, 1), bits=np.full((2, 2), -1, np.int32))
    good.bits[:, 1] = 1  # a vocabulary of 33
    check_mask(good, i32(3, 1), 33)
    none, beyond = good.bits.copy(), good.bits.copy()
    none[1] = 0
    beyond[1, 1] = 2
    for wrong, rows, vocab_size, sentence in (
        (good, i32(1, 3), 33, r"rows must be the step's masked_rows \[1, 3\], got \[3, 1\]"),
        (good, i32(3), 33, r"masked_rows \[3\], got \[3, 1\]"),
        (good, i32(3, 1), 32, "words_per_row must be 1 for a vocabulary of 32 ids, got 2"),
        (replace(good, bits=none), i32(3, 1), 33, "row 1 must allow at least one id"),
        (replace(good, bits=beyond), i32(3, 1), 33, r"row 1 allows ids beyond .* \[0, 33\)"),
    ):
        with pytest.raises(ProtocolError, match=sentence):
            check_mask(wrong, rows, vocab_size)
    whole = Mask(step_sequence=1, rows=i32(3), bits=np.full((1, 1), -1, np.int32))
    check_mask(whole, i32(3), 32)


# ---------------------------------------------------------------- whole steps

PROMPTS = random_prompts(6, vocab_size=199, longest=12)
FORMS = [form(3, 9), None, form(1, 1), form(7, 14), form(2, 20), None]
PARAMS = [
    SamplingParams(temperature=temperature, max_tokens=12, structured_outputs=one, ignore_eos=True)
    for one, temperature in zip(FORMS, (0, 0, 1, 1, 0, 1), strict=True)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(
        make_llama(
            tmp_path_factory.mktemp("llama"),
            num_key_value_heads=3,
            num_attention_heads=3,
            hidden_size=48,
        )
    )


@pytest.fixture(scope="module")
def expected(folder: str) -> list[list[int]]:
    return generate(make_runner(folder, depth=1), PROMPTS, PARAMS)


def test_answers_have_their_form_and_the_others_are_what_they_were(folder: str, expected):
    for one, outputs in zip(FORMS, expected, strict=True):
        if one is None:
            assert len(outputs) == 12
            continue
        for place, token in enumerate(outputs):
            assert token in allowed_ids(one.regex, outputs[:place], 199, ())
    assert [len(outputs) for outputs in expected] == [9, 12, 1, 12, 12, 12]
    free = [replace(params, structured_outputs=None) for params in PARAMS]
    unmasked = generate(make_runner(folder, depth=1), PROMPTS, free)
    assert [a == b for a, b in zip(expected, unmasked, strict=True)] == [
        one is None for one in FORMS
    ]


@pytest.mark.parametrize("depth", [2, 3])
def test_steps_ahead_change_no_token(folder: str, expected, depth: int):
    """Few blocks and a small budget: rows are preempted while a step of theirs waits for its mask."""
    runner = make_runner(folder, depth=depth, max_num_batched_tokens=16, max_num_seqs=4)
    assert generate(runner, PROMPTS, PARAMS, num_blocks=6) == expected


def test_a_device_mirror_changes_no_token(folder: str, expected):
    """The forward pass is launched, then the mask comes, and the tokens never pass the host before the next step."""
    runner = make_runner(folder, kernel_backend="triton", depth=2, max_num_seqs=3, max_model_len=32)
    some = [0, 1, 3]
    params = [replace(PARAMS[index], max_tokens=4) for index in some]
    tokens = generate(runner, [PROMPTS[index] for index in some], params, seeds=some)
    assert tokens == [expected[index][:4] for index in some]


@pytest.mark.parametrize("world_size", [2, 3])
def test_several_ranks_choose_the_same(rank_pool, folder: str, expected, world_size: int):
    cases = [({"depth": 2}, PROMPTS, PARAMS)]
    for (tokens,) in rank_pool.run(world_size, generate_on_rank, folder, cases):
        assert tokens == expected
