"""Two steps under way give the tokens of one at a time: greedy and sampled, preempted, chunked, stopped (A-09)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from rowcast import LLM, SamplingParams
from rowcast.tests.worker.generation import random_prompts

SAMPLED = SamplingParams(temperature=1.0, seed=3, max_tokens=12, ignore_eos=True)
KINDS = {
    "greedy": replace(SAMPLED, temperature=0.0),
    "sampled": SAMPLED,
    "another seed": replace(SAMPLED, seed=4),
    "cool": replace(SAMPLED, temperature=0.2),
    "top_k": replace(SAMPLED, top_k=3),
    "top_p": replace(SAMPLED, top_p=0.3),
    "both": replace(SAMPLED, top_k=20, top_p=0.6),
    "one token": replace(SAMPLED, max_tokens=1),
    "to the end": replace(SAMPLED, max_tokens=None),
}
ENGINES = {
    "plain": {"kv_cache_memory": "1MiB"},
    "preempts": {"kv_cache_memory": "48KiB"},
    "chunks": {"kv_cache_memory": "1MiB", "max_num_batched_tokens": 5},
    "chunks in a small pool": {"kv_cache_memory": "36KiB", "max_num_batched_tokens": 7},
    "no prefix cache": {"kv_cache_memory": "48KiB", "enable_prefix_caching": False},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory, tiny_model) -> Path:
    return tiny_model(tmp_path_factory.mktemp("model"))


def answers(model: Path, depth: int, **options) -> tuple[list[tuple[list[int], str]], int]:
    """(tokens, reason) of each kind, on prompts that partly begin alike; and how often someone was preempted."""
    prompts = random_prompts(len(KINDS), vocab_size=250, seed=1, longest=30)
    prompts[3:6] = [prompts[2] + [number] for number in range(3)]
    with LLM(
        model, depth=depth, max_num_seqs=6, block_size=8, num_threads=1, max_model_len=64, **options
    ) as llm:
        plain = llm.generate(prompts, list(KINDS.values()))
        # The third token that each got before ends it now: found one step late when two are under way.
        stops = [
            replace(params, stop_token_ids=(output.outputs[0].token_ids[2],))
            for params, output in zip(KINDS.values(), plain, strict=True)
            if len(output.outputs[0].token_ids) > 2
        ]
        stopped = llm.generate(
            [o.prompt_token_ids for o in plain if len(o.outputs[0].token_ids) > 2], stops
        )
        counts = llm.snapshot()
        assert counts["free_blocks"] == counts["usable_blocks"]
        assert counts["running"] == counts["waiting"] == 0
    told = [
        (list(output.outputs[0].token_ids), str(output.outputs[0].finish_reason))
        for output in [*plain, *stopped]
    ]
    return told, counts["preemptions"]


@pytest.fixture(scope="module")
def reference(model: Path) -> list[tuple[list[int], str]]:
    return answers(model, 1, kv_cache_memory="1MiB")[0]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
def test_results_do_not_depend_on_the_depth(model, reference, engine: str, depth: int):
    """Nor on chunks, batch mates, rows, preemption and cached prefixes: noise follows seed and position (W11)."""
    told, preemptions = answers(model, depth, **ENGINES[engine])
    assert told == reference
    assert preemptions > 0 or engine not in ("preempts", "no prefix cache")


def test_the_reference_shows_what_was_asked(reference):
    """A parameter that is ignored would agree with itself at any depth."""
    tokens, reasons = zip(*reference, strict=True)
    assert len({tuple(token_ids) for token_ids in tokens[: len(KINDS)]}) == len(KINDS)
    assert [len(token_ids) for token_ids in tokens[:7]] == [12] * 7
    assert set(reasons[: len(KINDS)]) == {"length"}
    assert set(reasons[len(KINDS) :]) == {"stop"}
    assert all(1 <= len(token_ids) <= 3 for token_ids in tokens[len(KINDS) :])
