"""The acceptance of log-probabilities: prompts on two real models, against transformers' own logits, to 1e-3.

ROWCAST_LOGPROB_PROMPTS=20 takes all prompts; a suite that everyone waits for takes a few.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from rowcast import LLM, Logprob, RequestOutput, SamplingParams

TOLERANCE = 1e-3
NUM_PROMPTS = int(os.environ.get("ROWCAST_LOGPROB_PROMPTS", "5"))
PROMPTS = [
    "The capital of France is",
    "Once upon a time, in a village by the sea,",
    "def fibonacci(n):\n",
    "a",
    "Äpfel, naïve café, 東京 and 🙂:",
    "1, 2, 3, 4, 5, 6, 7,",
    "Q: Why is the sky blue?\nA:",
    "The quick brown fox",
    "<html><body>",
    "To be, or not to be",
    "Water boils at",
    "SELECT name FROM users WHERE",
    "E = mc",
    "Dear Sir or Madam,",
    "¿Dónde está la biblioteca?",
    "0x7fff",
    "The opposite of hot is",
    "\n\n\n",
    "Roses are red,",
    "import numpy as np\nx = np.",
]


def expected_of(logits, token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """All ids' log-probabilities [n, vocab_size], and the rank of each token [n]."""
    scores = logits.double().log_softmax(dim=-1).numpy()
    own = scores[np.arange(len(token_ids)), list(token_ids)]
    return scores, (scores >= own[:, None]).sum(axis=1)


def check_rows(
    rows: Sequence[dict[int, Logprob] | None], logits, token_ids: Sequence[int], num_best: int
) -> float:
    """SA-13, E-08: the token and the best ids, no other, with their values; returns the largest difference."""
    scores, ranks = expected_of(logits, token_ids)
    largest = 0.0
    for row, values, token_id, rank in zip(rows, scores, token_ids, ranks, strict=True):
        assert row is not None
        assert next(iter(row)) == token_id
        assert len(row) in (num_best, num_best + 1)
        for other, given in row.items():
            assert np.isfinite(given.logprob)
            assert given.logprob <= 0
            largest = max(largest, abs(given.logprob - values[other]))
        assert abs(row[token_id].rank - rank) <= max(1, rank // 100)  # among near ties
        best = [one for one in row.values() if one.rank <= num_best]
        assert len(best) == num_best
        left_out = np.delete(values, list(row))
        assert left_out.max() <= min(one.logprob for one in best) + TOLERANCE
    return largest


@pytest.mark.parametrize("model", ["smollm2", "gemma"])
def test_log_probabilities_are_those_of_transformers(request, model: str):
    """Of the prompts and of what follows, and the text is the same."""
    import torch
    from tokenizers import Tokenizer
    from transformers import AutoModelForCausalLM

    folder: Path = request.getfixturevalue(f"{model}_dir")
    asked = SamplingParams(
        temperature=0, max_tokens=6, ignore_eos=True, logprobs=4, prompt_logprobs=2
    )
    with LLM(
        folder, dtype="float32", num_threads=1, max_num_seqs=20, max_model_len=64,
        max_num_batched_tokens=64,
    ) as llm:  # fmt: skip
        outputs = llm.generate(PROMPTS[:NUM_PROMPTS], asked)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    largest = 0.0
    for output in outputs:
        largest = max(largest, check_output(output, reference, tokenizer))
    print(f"{model}: {len(outputs)} prompts, at most {largest:.1e} apart")
    assert largest < TOLERANCE


def check_output(output: RequestOutput, reference, tokenizer) -> float:
    import torch

    prompt, answer = output.prompt_token_ids, output.outputs[0]
    assert output.prompt_logprobs is not None
    assert answer.logprobs is not None
    with torch.inference_mode():
        logits = reference(torch.tensor([[*prompt, *answer.token_ids]])).logits[0]
    # Greedy: each token is the best of its place, so `generate` says the same.
    after = logits[len(prompt) - 1 : -1]
    assert after.argmax(dim=-1).tolist() == answer.token_ids
    assert answer.text == tokenizer.decode(answer.token_ids, skip_special_tokens=True)
    assert len(output.prompt_logprobs) == len(prompt)
    assert output.prompt_logprobs[0] is None
    of_prompt = check_rows(output.prompt_logprobs[1:], logits[: len(prompt) - 1], prompt[1:], 2)
    of_answer = check_rows(answer.logprobs, after, answer.token_ids, 4)
    own = [row[i].logprob for row, i in zip(answer.logprobs, answer.token_ids, strict=True)]
    assert answer.cumulative_logprob == pytest.approx(sum(own))
    for row, token_id in zip(answer.logprobs, answer.token_ids, strict=True):
        assert row[token_id].decoded_token == tokenizer.decode(
            [token_id], skip_special_tokens=False
        )
    return max(of_prompt, of_answer)
