"""A base model (no chat template) from a .gguf file: it continues text, and a conversation is refused in a sentence."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from rowcast import LLM, SamplingParams
from rowcast.launch.convert_gguf import convert_gguf
from rowcast.tests.launch.tiny_gemma import TinyGemma

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
CHAT = [{"role": "user", "content": "the world"}]
NO_CHAT = r"has no chat template \(a base model continues text and does not chat\); send the prompt as text"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("gemma")
    convert_gguf(TinyGemma().write(folder / "tiny.gguf"), folder / "tiny")
    return folder / "tiny"


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with LLM(folder, max_num_seqs=2, kv_cache_memory="2MiB", num_threads=1) as made:
        yield made


def test_text_goes_on_as_transformers_says(llm: LLM, folder: Path) -> None:
    """Prompt and answer are longer than the window of 4; bytes, runs and words come out as one text."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in ("the world", "  abc\n\n<td>中🙂 the"):
        ids = tokenizer(prompt, return_tensors="pt")
        expected = model.generate(
            **ids, do_sample=False, max_new_tokens=12, min_new_tokens=12, eos_token_id=None
        )
        answer = expected[0, ids["input_ids"].shape[1] :].tolist()
        (output,) = llm.generate(prompt, GREEDY)
        assert output.outputs[0].token_ids == answer


def test_a_conversation_is_refused_before_anything_runs(llm: LLM) -> None:
    assert not llm.has_chat_template
    for chat in (llm.chat, llm.stream_chat):
        with pytest.raises(ValueError, match=NO_CHAT) as caught:
            chat(CHAT, GREEDY)
        assert "\n" not in str(caught.value)
    assert len(llm.generate("the world", GREEDY)[0].outputs[0].token_ids) == 12


def test_run_continues_the_text_and_refuses_a_chat(command_line, llm: LLM, folder: Path) -> None:
    text = llm.generate("the world", GREEDY)[0].outputs[0].text
    options = ["-p", "the world", "--max-tokens", "12", "--ignore-eos", "--temperature", "0"]
    done = command_line.run("run", str(folder), *options)
    assert done.returncode == 0, done.stderr
    assert done.stdout == text + "\n"
    done = command_line.run("run", str(folder), *options, "--chat")
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    last = done.stderr.splitlines()[-1]
    assert "has no chat template" in last
    assert "Traceback" not in done.stderr


def test_a_front_rejects_a_clients_conversation(folder: Path) -> None:
    """`Client.chat` sends the conversation as it is: the front has the template, or has none."""
    from rowcast.cluster.chat_options import ChatOptions
    from rowcast.cluster.front import ChatPrompt, Front, FrontConfig, FrontRequest, Rejected
    from rowcast.scheduler.config import SchedulerConfig
    from rowcast.scheduler.front_messages import RefusalReason
    from rowcast.scheduler.kv_groups import KVGroupSpec

    front = Front(
        FrontConfig(
            engine_name="engine",
            front_name="front-0",
            model_name="tiny",
            model_dir=str(folder),
            scheduler_address="ipc:///never-used",
            scheduler=SchedulerConfig(vocab_size=300, max_model_len=64),
            groups=(KVGroupSpec(block_size=16, num_kv_heads=1, head_dim=32, layers=(0,)),),
            num_blocks=9,
            mailbox_idle_s=1.0,
        )
    )
    prompt = ChatPrompt(messages=[dict(m) for m in CHAT], options=ChatOptions())
    request = FrontRequest(counter=0, request_id="a", prompt=prompt, params=GREEDY, seed=1)
    (answer,) = asyncio.run(front.submit(b"client", [request]))
    assert isinstance(answer, Rejected)
    assert answer.reason is RefusalReason.INVALID
    assert "has no chat template (a base model" in answer.text
    assert front.mailboxes.num_requests == 0
