"""Token for token what transformers' `generate` gives on the same weights: the whole embedded path, on a real model."""

from __future__ import annotations

import pytest
from rowcast import LLM, SamplingParams

PARAMS = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)


@pytest.mark.parametrize(
    ("max_num_batched_tokens", "block_size", "depth"),
    [(2048, 16, 1), (7, 8, 2), (16, 16, 2), (48, 8, 1)],
)
def test_embedded_gives_the_tokens_of_transformers(
    greedy, smollm2_dir, max_num_batched_tokens, block_size, depth
):
    """A budget of 7 cuts every prompt into chunks and pauses rows in turn; 48 mixes prefill with decode."""
    with LLM(
        smollm2_dir,
        dtype="float32",
        num_threads=1,
        max_num_seqs=32,
        max_model_len=256,
        max_num_batched_tokens=max_num_batched_tokens,
        block_size=block_size,
        depth=depth,
    ) as llm:
        outputs = llm.generate(greedy.prompts, PARAMS)
        assert [output.outputs[0].token_ids for output in outputs] == greedy.token_ids
        assert [output.outputs[0].text for output in outputs] == greedy.texts
        assert {output.outputs[0].finish_reason for output in outputs} == {"length"}


def test_a_pool_too_small_for_all_preempts_and_gives_the_same_tokens(greedy, smollm2_dir):
    """Preempted requests are computed again from the tokens they have."""
    # 46,080 bytes a token in float32 (30 layers, K and V, 3 heads of 64): 30 blocks of 16 tokens. The longest request
    # alone needs 12 of them.
    memory = 31 * 16 * 46_080
    with LLM(
        smollm2_dir,
        dtype="float32",
        num_threads=1,
        max_num_seqs=20,
        max_model_len=256,
        kv_cache_memory=memory,
    ) as llm:
        outputs = llm.generate(greedy.prompts, PARAMS)
        assert llm.snapshot()["preemptions"] > 0
        assert [output.outputs[0].token_ids for output in outputs] == greedy.token_ids


def test_a_chat_stops_at_the_models_own_end(smollm2_dir):
    with LLM(smollm2_dir, dtype="float32", num_threads=1, max_num_seqs=2, max_model_len=256) as llm:
        (output,) = llm.chat(
            [{"role": "user", "content": "What is the capital of France?"}],
            SamplingParams(temperature=0, max_tokens=32),
        )
    answer = output.outputs[0]
    assert answer.text == "The capital of France is Paris."
    assert (answer.finish_reason, answer.stop_reason) == ("stop", None)
    assert answer.token_ids[-1] in (0, 2)
