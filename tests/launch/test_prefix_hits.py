"""Prefix hits through the whole embedded engine on Gemma-3-270m: one group that sees everything, five of a window."""

from __future__ import annotations

from pathlib import Path

import rowcast
from rowcast import LLM, SamplingParams
from tokenizers import Tokenizer

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True)


def test_a_prompt_of_three_windows_hits_in_all_six_groups_and_says_the_same(gemma_dir: Path):
    """H-01, H-02: a hit needs the window's last blocks of the prefix and nothing left of them, in every group."""
    license_text = (Path(rowcast.__file__).parent / "LICENSE").read_text()
    book = Tokenizer.from_file(str(gemma_dir / "tokenizer.json")).encode(license_text).ids
    with LLM(gemma_dir, max_model_len=1600, max_num_batched_tokens=512, num_threads=1) as llm:
        prompt, fork = book[:1500], book[:600] + book[1500:1520]

        def ask(prompt: list[int], salt: str | None = None) -> tuple[list[int], int]:
            (output,) = llm.generate([prompt], GREEDY, cache_salt=salt)
            return output.outputs[0].token_ids, output.cached_tokens

        first, cached = ask(prompt)
        assert cached == 0
        assert ask(prompt) == (first, 1499 // 16 * 16)
        # Another end behind 600 common tokens: the window's blocks there went back long ago, but kept their names.
        forked, cached = ask(fork)
        assert cached == 600 // 16 * 16
        assert forked != first
        assert ask(fork, salt="computed anew") == (forked, 0)
        counts = llm.snapshot()
        assert counts["free_blocks"] == counts["usable_blocks"]
