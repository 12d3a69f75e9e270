"""Options that change a greedy answer, on a real model: as transformers' own logits processors change it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rowcast import LLM, SamplingParams

PROMPTS = ["The capital of France is", "Once upon a time there was a cat. The cat"]
MAX_TOKENS = 12
MODEL_ENDS = (0, 2)


@pytest.fixture(scope="module")
def llm(smollm2_dir: Path) -> Iterator[LLM]:
    with LLM(smollm2_dir, dtype="float32", num_threads=1, max_num_seqs=8, max_model_len=128) as llm:
        yield llm


@pytest.fixture(scope="module")
def plain(llm: LLM) -> list[list[int]]:
    return generate(llm)


@pytest.fixture(scope="module")
def reference(smollm2_dir: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(smollm2_dir, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    return model, AutoTokenizer.from_pretrained(smollm2_dir)


def generate(llm: LLM, prompts: list[str] = PROMPTS, **options: Any) -> list[list[int]]:
    asked = {"temperature": 0, "max_tokens": MAX_TOKENS, "ignore_eos": True, **options}
    return [
        output.outputs[0].token_ids for output in llm.generate(prompts, SamplingParams(**asked))
    ]


def of_transformers(reference: tuple[Any, Any], **options: Any) -> list[list[int]]:
    import torch

    model, tokenizer = reference
    asked = {"max_new_tokens": MAX_TOKENS, "do_sample": False, "pad_token_id": 2, **options}
    answers = []
    with torch.inference_mode():
        for prompt in PROMPTS:  # one by one: its repetition penalty counts padding too
            ids = torch.tensor([tokenizer.encode(prompt)])
            answers.append(model.generate(ids, **asked)[0, ids.shape[1] :].tolist())
    return answers


def test_a_repetition_penalty_gives_the_tokens_of_transformers(llm, plain, reference):
    tokens = generate(llm, repetition_penalty=1.3)
    assert tokens != plain
    assert tokens == of_transformers(reference, repetition_penalty=1.3)


def test_a_bias_gives_the_tokens_of_transformers(llm, plain, reference):
    first = plain[0][0]
    tokens = generate(llm, logit_bias={first: -100, 30: 2.5, 28: 1})
    assert tokens != plain
    sequences = {(first,): -100.0, (30,): 2.5, (28,): 1.0}
    assert tokens == of_transformers(reference, sequence_bias=sequences)


def test_bad_words_give_the_tokens_of_transformers_and_do_not_appear(llm, plain, reference):
    """SA-12, end to end: the first words of each answer, and one of several tokens, bare and after a space."""
    _, tokenizer = reference
    words = [tokenizer.decode(answer[:2]).strip() for answer in plain]
    words += [tokenizer.decode(answer[4:7]).strip() for answer in plain]
    tokens = generate(llm, bad_words=words)
    assert all(one != other for one, other in zip(tokens, plain, strict=True))
    ids = [
        tokenizer.encode(spelled, add_special_tokens=False)
        for word in words
        for spelled in (word, f" {word}")
    ]
    assert any(len(sequence) > 1 for sequence in ids)
    assert tokens == of_transformers(reference, bad_words_ids=ids)
    for answer in tokens:
        assert not any(f" {word}" in tokenizer.decode(answer) for word in words)


def test_min_tokens_gives_the_tokens_of_transformers(llm, plain, reference):
    """SA-10, S-12: the end that comes first without it is put off, and the request runs on to another."""
    eos = plain[0][2]  # a token that comes soon, for an end
    early = generate(llm, stop_token_ids=(eos,))
    assert len(early[0]) == 3
    late = generate(llm, stop_token_ids=(eos,), min_tokens=8)
    assert all(eos not in answer[:8] for answer in late)
    # min_tokens keeps the model's own ends away too; rowcast goes on past them, transformers ends there.
    expected = of_transformers(reference, min_new_tokens=8, eos_token_id=[eos, *MODEL_ENDS])
    for answer, other in zip(late, expected, strict=True):
        assert len(other) > 8
        assert answer[: len(other)] == other


def test_a_finish_comes_at_min_tokens_and_not_before(llm, plain):
    """S18's ids: ended at the first end after it, or by length; min_tokens never delays that."""
    eos = plain[0][2]
    asked = {
        "temperature": 0,
        "stop_token_ids": (eos,),
        "logit_bias": {eos: 100},
        "ignore_eos": True,
    }
    for count in (0, 1, 5):
        (output,) = llm.generate(
            PROMPTS[0], SamplingParams(**asked, min_tokens=count, max_tokens=MAX_TOKENS)
        )
        answer = output.outputs[0]
        assert (len(answer.token_ids), answer.finish_reason) == (count + 1, "stop")
        assert answer.stop_reason == eos
    (output,) = llm.generate(PROMPTS[0], SamplingParams(**asked, min_tokens=5, max_tokens=5))
    assert (len(output.outputs[0].token_ids), output.outputs[0].finish_reason) == (5, "length")


@pytest.mark.parametrize(
    "options",
    [
        {"presence_penalty": 1.5},
        {"frequency_penalty": 1.0},
        {"allowed_token_ids": [30, 28, 260, 281]},
    ],
    ids=str,
)
def test_what_transformers_has_not_changes_the_answer_too(llm, plain, options):
    tokens = generate(llm, **options)
    assert tokens[1] != plain[1]  # it repeats itself without
    allowed = options.get("allowed_token_ids")
    assert allowed is None or {token for answer in tokens for token in answer} <= set(allowed)


def test_min_p_keeps_what_transformers_keeps():
    import torch
    from rowcast.worker.sampler import min_p
    from transformers import MinPLogitsWarper

    scores = torch.randn(20, 5_000, generator=torch.Generator().manual_seed(0)) * 3
    for least in (1.0, 0.3, 0.02, 1e-4):
        lowest = min_p.lowest_kept(scores.amax(dim=1), torch.full((20,), least))
        kept = scores >= lowest.unsqueeze(1)
        assert torch.equal(kept, MinPLogitsWarper(least)(torch.zeros(20, 1), scores).isfinite())


def test_ids_of_bad_words_are_no_users_field(llm):
    with pytest.raises(ValueError, match="made from bad_words; give the words themselves"):
        llm.generate(PROMPTS[0], SamplingParams(bad_words_token_ids=[[5]]))


def test_a_refused_option_leaves_the_engine_as_it_was(llm, plain):
    """SA-11, F06: zero steps, and the next request is served."""
    steps = llm.snapshot()["steps"]
    for options in ({"logit_bias": {49_152: 1}}, {"allowed_token_ids": [10_000_000]}):
        with pytest.raises(ValueError, match="lies outside the vocabulary"):
            generate(llm, **options)
    assert llm.snapshot()["steps"] == steps
    assert generate(llm) == plain
