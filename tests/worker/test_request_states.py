"""The request table: a row is filled whole and cleared whole."""

from __future__ import annotations

import numpy as np
from rowcast.scheduler.messages import Features
from rowcast.tests.worker.steps import admissions, i32, request
from rowcast.worker.request_states import RequestStates
from rowcast.worker.sampling_inputs import needs_tokens

BIASED = Features(bias_ids=i32(3), bias=np.array([1.5], np.float32), logprobs=2, prompt_logprobs=0)


def test_a_row_holds_what_its_admission_said():
    states = RequestStates(max_num_seqs=4, max_model_len=8)
    states.add(
        admissions(
            request(2, [5, 6, 7], [1], prompt=2, cached=1, temperature=0.5, top_p=0.9, top_k=3,
                    seed=2**62, request_id="chat-17", min_p=0.25, presence_penalty=-1.5,
                    frequency_penalty=0.5, repetition_penalty=1.25, features=BIASED),
            request(0, [9], [2]),
        )
    )  # fmt: skip
    assert states.live.tolist() == [True, False, True, False]
    assert states.num_tokens.tolist() == [1, 0, 3, 0]
    assert states.num_prompt_tokens.tolist() == [1, 0, 2, 0]
    assert states.num_computed_tokens.tolist() == [0, 0, 1, 0]
    assert states.token_ids[2].tolist() == [5, 6, 7, 0, 0, 0, 0, 0]
    assert states.token_ids[0].tolist() == [9] + 7 * [0]
    assert states.temperature[2] == np.float32(0.5)
    assert states.top_p[2] == np.float32(0.9)
    assert (states.top_k[2], states.seeds[2]) == (3, 2**62)
    assert states.min_p.tolist() == [0, 0, 0.25, 0]
    assert states.presence_penalty.tolist() == [0, 0, -1.5, 0]
    assert states.frequency_penalty.tolist() == [0, 0, 0.5, 0]
    assert states.repetition_penalty.tolist() == [1, 0, 1.25, 0]
    assert states.features == states.asking == {2: BIASED}
    assert states.feature_checksums.tolist() == [0, 0, BIASED.checksum, 0]
    assert states.penalized == {2}
    assert states.request_ids == ["request-0", None, "chat-17", None]
    assert states.describe(2) == "row 2 (request 'chat-17')"
    assert states.describe(1) == "row 1 (free)"


def test_a_cleared_row_is_like_one_never_used():
    """Row reuse with stale values is the classic fault of persistent tables (W01)."""
    used = RequestStates(max_num_seqs=4, max_model_len=8)
    used.add(
        admissions(
            request(
                1,
                [1, 2, 3, 4],
                [1],
                temperature=1.5,
                top_p=0.1,
                top_k=1,
                seed=42,
                min_p=0.5,
                presence_penalty=2.0,
                repetition_penalty=1.5,
                features=BIASED,
            )
        )
    )
    used.remove(i32(1))
    fresh = RequestStates(max_num_seqs=4, max_model_len=8)
    assert not used.columns.words.any()
    for name, value in vars(fresh).items():
        if name != "columns":
            assert np.array_equal(getattr(used, name), value), name


def test_who_asks_for_log_probabilities_alone_has_nothing_adjusted():
    """Or the host would wait, in every step, for tokens that nobody needs."""
    states = RequestStates(max_num_seqs=4, max_model_len=8)
    asked = Features(logprobs=0)
    states.add(admissions(request(1, [1], [1], features=asked)))
    assert (states.features, states.asking) == ({}, {1: asked})
    assert states.feature_checksums[1] == asked.checksum
    assert not needs_tokens(states)


def test_an_admission_replaces_what_a_row_asked_for():
    """W-07: whatever was left in it, also by a row that was never cleared."""
    states = RequestStates(max_num_seqs=4, max_model_len=8)
    states.add(admissions(request(1, [1], [1], frequency_penalty=1.0, features=BIASED)))
    states.add(admissions(request(1, [1], [1])))
    assert (states.features, states.asking, states.penalized) == ({}, {}, set())
    assert states.feature_checksums.tolist() == [0, 0, 0, 0]
