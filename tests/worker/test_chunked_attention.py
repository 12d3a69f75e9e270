"""Layers whose attention stays within its chunk, through decoder, groups and scheduler: no folder says so yet."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rowcast.scheduler.kv_groups import AttentionKind
from rowcast.tests.worker.generation import generate, greedy, make_llama, random_prompts
from rowcast.worker.config import WorkerConfig
from rowcast.worker.layer_kinds import LayerKind
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.model_runner import ModelRunner

FULL = LayerKind()
CHUNK_12 = LayerKind(attention=AttentionKind.CHUNKED, window=12)
CHUNK_16 = LayerKind(attention=AttentionKind.CHUNKED, window=16)
WINDOW_10 = LayerKind(attention=AttentionKind.SLIDING_WINDOW, window=10)

MODELS = {
    "three chunked, one full": (CHUNK_12, CHUNK_12, CHUNK_12, FULL),
    "chunks of two lengths": (CHUNK_16, CHUNK_12),
    "all three kinds": (FULL, WINDOW_10, CHUNK_16, WINDOW_10, CHUNK_16),
}


def visible(kind: LayerKind, length: int) -> torch.Tensor:
    """Which keys (columns) each query (row) sees, straight from the definition."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = key <= query
    if kind.attention is AttentionKind.CHUNKED:
        seen &= key // kind.window == query // kind.window
    elif kind.attention is AttentionKind.SLIDING_WINDOW:
        seen &= query - key < kind.window
    return seen


def expected_tokens(
    folder: Path, kinds: Sequence[LayerKind], prompt: list[int], count: int
) -> list[int]:
    """transformers' Llama with a mask of its own for each layer, the whole sequence anew for every token."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    tokens = list(prompt)
    masks: dict[LayerKind, torch.Tensor] = {}
    for layer, kind in zip(model.model.layers, kinds, strict=True):

        def set_mask(module, args, kwargs, kind=kind):
            return args, {**kwargs, "attention_mask": masks[kind]}

        layer.self_attn.register_forward_pre_hook(set_mask, with_kwargs=True)
    with torch.inference_mode():
        for _ in range(count):
            for kind in kinds:
                hidden = ~visible(kind, len(tokens))
                masks[kind] = hidden.float().mul(torch.finfo(torch.float32).min)[None, None]
            logits = model(torch.tensor([tokens]), use_cache=False).logits[0, -1]
            tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_tokens_of_chunked_layers_equal_those_of_a_mask_for_each_layer(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """A chunk that begins in the middle of a block, prompts of several chunks, and blocks that go back between them."""
    kinds = MODELS[name]
    folder = make_llama(tmp_path, num_hidden_layers=len(kinds))
    read = ModelConfig.from_folder(folder)
    monkeypatch.setattr(ModelConfig, "from_folder", lambda _: replace(read, layers=kinds))
    prompts = random_prompts(4, vocab_size=199, longest=60)
    expected = [expected_tokens(folder, kinds, prompt, 16) for prompt in prompts]
    full = [LayerKind()] * len(kinds)
    assert expected[0] != expected_tokens(folder, full, prompts[0], 16)  # the masks matter
    for options in (
        {"block_size": 8},
        {"block_size": 5, "max_num_batched_tokens": 7},
        {"block_size": 16, "max_num_batched_tokens": 16},
    ):
        config = WorkerConfig(
            model_dir=str(folder), max_model_len=128, device="cpu", max_num_seqs=3, **options
        )
        runner = ModelRunner(config)
        runner.load()
        runner.allocate(runner.max_num_blocks)
        assert {group.kind for group in runner.group_specs} == {kind.attention for kind in kinds}
        # Each prompt twice, the second time out of the prefix cache where it has it.
        assert generate(runner, prompts * 2, greedy(16)) == expected * 2, options
