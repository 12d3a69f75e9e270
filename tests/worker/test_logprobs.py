"""Log-probabilities from a rank's part of the logits: against NumPy by hand, a whole worker against transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rowcast.scheduler.agreement import Asked
from rowcast.scheduler.extras import LogprobRows
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.scheduler.logprob_rows import rows_by_hand
from rowcast.tests.worker.fake_ranks import on_ranks
from rowcast.tests.worker.generation import (
    Scored,
    make_llama,
    make_runner,
    random_prompts,
    score,
)
from rowcast.tests.worker.rank_pool import RankPool
from rowcast.worker.backend import select_backend
from rowcast.worker.logprobs import StepScores
from rowcast.worker.parallel import TensorParallelGroup
from rowcast.worker.sampler import candidates
from rowcast.worker.sampler.logprobs import Logprobs, best_keys

BACKEND = select_backend("cpu", "cpu")
ASKED = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3, prompt_logprobs=2)


def on_parts(
    logits: torch.Tensor, sizes: Sequence[int], token_ids: Sequence[int], num_best: int
) -> list[LogprobRows]:
    """The rows that each of some ranks computes, of which each owns so many ids."""
    ends = np.cumsum(sizes).tolist()
    ranges = tuple(range(end - size, end) for end, size in zip(ends, sizes, strict=True))

    def work(group: Any) -> LogprobRows:
        mine = ranges[group.rank]
        part = logits[:, mine.start : mine.stop]
        ids, bits, ranks = (
            Logprobs(ranges, group, BACKEND).of(part, torch.tensor(token_ids), num_best).numpy()
        )
        return LogprobRows(token_ids=ids, logprobs=bits.view(np.float32), ranks=ranks)

    return on_ranks(len(sizes), work)


def assert_close(got: LogprobRows | None, expected: LogprobRows, tolerance: float) -> None:
    """The same ids and ranks, and values as near as that. What is read of the wire holds for both."""
    assert got is not None
    got.check("rows")
    np.testing.assert_array_equal(got.token_ids, expected.token_ids)
    np.testing.assert_array_equal(got.ranks, expected.ranks)
    np.testing.assert_allclose(got.logprobs, expected.logprobs, rtol=0, atol=tolerance)


@pytest.mark.parametrize("sizes", [(41,), (20, 21), (1, 37, 3), (9, 9, 9, 9, 5)])
@pytest.mark.parametrize("num_best", [0, 1, 5, 20])
def test_rows_are_those_by_hand_on_any_ranks(sizes, num_best):
    """SA-13, E-08: also where ids tie across ranks, and where more are wanted than a rank, or the vocabulary, has."""
    random = np.random.default_rng(num_best)
    scores = random.integers(-3, 4, (7, 41)).astype(np.float32)  # nearly everything ties
    scores[0] = 0.0  # everything does
    scores[1, ::2] = -0.0
    scores[2, 5] = 80.0
    scores[3] = random.normal(0, 30, 41)
    token_ids = [40, 1, 0, 17, 5, 40, 21]
    expected = rows_by_hand(scores, token_ids, num_best)
    for rows in on_parts(torch.from_numpy(scores), sizes, token_ids, num_best):
        assert_close(rows, expected, 1e-6)


def test_more_than_the_vocabulary_has_are_all_of_it():
    scores = np.random.default_rng(3).integers(-2, 3, (4, 11)).astype(np.float32)
    expected = rows_by_hand(scores, [0, 10, 5, 5], 11)
    for rows in on_parts(torch.from_numpy(scores), (5, 6), [0, 10, 5, 5], 20):
        assert_close(rows, expected, 1e-6)


def test_an_id_that_cannot_come_is_as_unlikely_as_a_float_says():
    """-inf among the logits: the frame that carries it is not refused, and nothing becomes NaN."""
    scores = torch.zeros(1, 6)
    scores[0, 3:] = float("-inf")  # all that the second rank owns
    for rows in on_parts(scores, (3, 3), [4], 5):
        assert rows.ranks.tolist() == [[6, 3, 3, 3, 6, 6]]
        assert rows.logprobs[0, 0] == np.finfo(np.float32).min
        np.testing.assert_allclose(rows.logprobs[0, 1:4], np.log(1 / 3), rtol=1e-6)
        rows.check("rows")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_logits_are_scored_in_more(dtype):
    scores = torch.randn(3, 50, generator=torch.Generator().manual_seed(1)).to(dtype)
    expected = rows_by_hand(scores.float().numpy(), [3, 4, 5], 4)
    assert_close(on_parts(scores, (25, 25), [3, 4, 5], 4)[1], expected, 1e-6)


def test_a_gpu_finds_the_same_best_without_waiting():
    """Its own way to the best ids, on a CPU: ties to the lowest id, and no candidate where there are no more."""
    scores = torch.randint(-2, 3, (6, 30), generator=torch.Generator().manual_seed(2)).float()
    for width in (1, 7, 30, 40):
        here = [find(scores, width, 100) for find in (best_keys, candidates.best_candidates)]
        one, other = (found.sort(dim=1).values for found in here)
        assert torch.equal(one, other)


# ---------------------------------------------------------------- a whole worker


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_llama(
        tmp_path_factory.mktemp("llama"),
        num_attention_heads=6,
        num_key_value_heads=3,
        hidden_size=48,
    )


PROMPTS = [*random_prompts(6, vocab_size=199, seed=4, longest=40), list(range(13)), [7]]


@pytest.fixture(scope="module")
def logits_after(llama: Path):
    """What transformers' model scores after each token of a text: [length, vocab_size]."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(llama, dtype=torch.float32).eval()

    def of(token_ids: Sequence[int]) -> np.ndarray:
        with torch.inference_mode():
            return model(torch.tensor([list(token_ids)])).logits[0].numpy()

    return of


def check(logits_after, prompts, scored: Sequence[Scored], params: SamplingParams) -> None:
    """Every row is that of transformers' own logits, one a token."""
    for prompt, got in zip(prompts, scored, strict=True):
        logits = logits_after([*prompt, *got.tokens])
        if params.logprobs is not None:
            expected = rows_by_hand(logits[len(prompt) - 1 : -1], got.tokens, params.logprobs)
            assert_close(got.logprobs, expected, 1e-4)
        else:
            assert got.logprobs is None
        if params.prompt_logprobs is not None and len(prompt) > 1:
            of_prompt = logits[: len(prompt) - 1]
            expected = rows_by_hand(of_prompt, prompt[1:], params.prompt_logprobs)
            assert_close(got.prompt, expected, 1e-4)
        else:
            assert got.prompt is None


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, {}),
        ({"max_num_batched_tokens": 7, "depth": 1}, {"logprobs": 0}),
        ({"max_num_batched_tokens": 5, "block_size": 4}, {"logprobs": None}),
        ({"kernel_backend": "triton", "max_num_batched_tokens": 16}, {"prompt_logprobs": 0}),
    ],
)
def test_rows_are_those_of_transformers(llama, logits_after, options, asked):
    """SA-13, B15: however prompts are cut, with the tokens on the host or, by the triton backend, behind a mirror."""
    import dataclasses

    params = dataclasses.replace(ASKED, **asked)
    prompts = PROMPTS[-2:] if "kernel_backend" in options else PROMPTS
    if "kernel_backend" in options:
        params = dataclasses.replace(params, max_tokens=3)
    runner = make_runner(llama, **options)
    check(logits_after, prompts, score(runner, prompts, params), params)
    if "block_size" in options:  # few blocks: rows give way, and are computed again
        scored = score(runner, prompts, params, num_blocks=16)
        check(logits_after, prompts, scored, params)


def score_on_rank(group: TensorParallelGroup, folder: str, prompts, params) -> list[Scored]:
    return score(make_runner(folder, parallel=group, max_num_batched_tokens=16), prompts, params)


def test_three_ranks_report_the_rows_of_one(llama, logits_after, rank_pool: RankPool):
    """Each owns a third of the vocabulary; all come to the same rows, those that rank 0 reports."""
    of_ranks = rank_pool.run(3, score_on_rank, str(llama), PROMPTS, ASKED)
    for scored in of_ranks:
        check(logits_after, PROMPTS, scored, ASKED)
    for scored in of_ranks[1:]:
        for one, other in zip(of_ranks[0], scored, strict=True):
            assert (one.logprobs, one.prompt) == (other.logprobs, other.prompt)


@pytest.mark.parametrize("rows_at_once", [1, 3, 4, 1024])
def test_a_prompt_scored_in_pieces_has_the_same_rows(llama, logits_after, rows_at_once):
    """SA-13: 13 tokens give 12 rows, whatever the pieces whose logits are in memory at a time."""
    runner = make_runner(llama)
    assert runner._scorer is not None
    runner._scorer.rows_at_once = rows_at_once
    most = 0
    logits_of = runner._decoder.logits

    def spy(hidden, indices):
        nonlocal most
        most = max(most, len(indices))
        return logits_of(hidden, indices)

    runner._decoder.logits = spy
    scored = score(runner, [list(range(13))], ASKED)
    assert scored[0].prompt is not None
    assert len(scored[0].prompt) == 12
    assert most == min(rows_at_once, 12)
    check(logits_after, [list(range(13))], scored, ASKED)


class Table:
    """A decoder whose logits are given: those behind each flat token."""

    def __init__(self, logits: torch.Tensor) -> None:
        self._logits = logits

    def logits(self, hidden: torch.Tensor, logits_indices: torch.Tensor) -> torch.Tensor:
        return self._logits[logits_indices]


@pytest.mark.parametrize("rows_at_once", [3, 4, 1024])
def test_pieces_of_given_logits_have_identical_rows(rows_at_once):
    """SA-13: to the last bit, of two prompts in one step; behind a matrix product only its rounding may differ."""
    table = Table(torch.randn(21, 50, generator=torch.Generator().manual_seed(3)))
    targets = np.arange(12, dtype=np.int32), np.arange(30, 37, dtype=np.int32)
    asked = [
        Asked(batch_index=b, row=b, num_best=None, targets=t, flat_token=f, num_prompt_best=n)
        for b, t, f, n in ((0, targets[0], 0, 2), (2, targets[1], 13, 5))
    ]
    plan: Any = SimpleNamespace(samples=np.zeros(3, bool))

    def rows(at_once: int) -> dict[int, Any]:
        scores = StepScores(
            asked, plan, Logprobs((range(50),), TensorParallelGroup.alone(), BACKEND),
            rows_at_once=at_once,
        )  # fmt: skip
        scores.score_prompts(table, torch.zeros(21, 1))  # type: ignore[arg-type]
        return {b: one.prompt_logprobs for b, one in scores.extras().items()}

    found = rows(rows_at_once)
    assert found == rows(1)
    by_hand = rows_by_hand(table._logits[13:20].numpy(), targets[1].tolist(), 5)
    assert_close(found[2], by_hand, 1e-6)
    assert found[0].num_best == 2


def test_what_changes_the_choice_changes_no_log_probability(llama, logits_after):
    """SA-13: values are the model's own, before temperature, penalties, bias and lists, and name the sampled token."""
    params = [
        SamplingParams(temperature=0, max_tokens=6, logprobs=2, ignore_eos=True, **options)
        for options in (
            {"repetition_penalty": 2.0, "presence_penalty": 1.5},
            {"logit_bias": {5: 100.0}},
            {"allowed_token_ids": (11, 12)},
            {"min_tokens": 6},
        )
    ]
    params.append(
        SamplingParams(temperature=1.7, top_k=50, seed=1, max_tokens=6, logprobs=2, ignore_eos=True)
    )
    prompts = [PROMPTS[0]] * len(params)
    scored = score(make_runner(llama), prompts, params)
    for prompt, got, asked in zip(prompts, scored, params, strict=True):
        check(logits_after, [prompt], [got], asked)
    assert set(scored[1].tokens) == {5}
    assert set(scored[2].tokens) <= {11, 12}


def test_nobody_pays_for_what_nobody_asks(llama, monkeypatch):
    """Neither a row of logits nor a collective more, where a neighbour asks in other steps alone."""
    runner = make_runner(llama, max_num_batched_tokens=64)
    calls = []
    of = Logprobs.of
    monkeypatch.setattr(Logprobs, "of", lambda *args: calls.append(len(args[1])) or of(*args))
    plain = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)
    asked = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, prompt_logprobs=0)
    tokens = [one.tokens for one in score(runner, PROMPTS[:2], plain)]
    assert calls == []
    again = score(runner, PROMPTS[:2], [plain, asked])
    assert [one.tokens for one in again] == tokens
    assert sum(calls) == len(PROMPTS[1]) - 1


def test_scores_that_are_no_numbers_are_said_to_be_none(llama):
    runner = make_runner(llama)
    logits_of = runner._decoder.logits
    runner._decoder.logits = lambda hidden, indices: logits_of(hidden, indices) * float("nan")
    with pytest.raises(RuntimeError, match="NaN instead of scores"):
        score(runner, [[1, 2, 3]], ASKED)
