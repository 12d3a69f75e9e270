"""Text handling gives what transformers gives on the same folder, and streams it without half characters."""

from __future__ import annotations

import json
import random
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rowcast.cluster.text import IncrementalDetokenizer, TextProcessor
from rowcast.scheduler.sampling_params import SamplingParams
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.processors import TemplateProcessing

EMOJI = "🙂"  # F0 9F 99 82
TRICKY = [
    "",
    "hello world",
    "  two  spaces\n\n\tand tab ",
    "한국어 텍스트 🙂👩‍👩‍👧 é ½ ٣",
    "I'm don't 4567.89",
    "<|user|>hi<|end|>",
    "a<|end|>b <unk>",
    "\x00\x7f",
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": " What's <2>? 한국 "},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "And 'x'?"},
]


def save(folder: Path, tokenizer: Tokenizer, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"vocab_size": 400, "eos_token_id": 1}))
    return folder


def byte_level(folder: Path, *, bos: bool = False, **config: Any) -> Path:
    """Every byte is a token, a few merges, two special tokens: as GPT-2, Llama 3 and SmolLM2 are built."""
    specials = ["<|user|>", "<|end|>"]
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("Ġ", "w")]
    tokens = [*specials, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokens += ["".join(pair) for pair in merges]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    if bos:
        tokenizer.post_processor = TemplateProcessing(
            single="<|user|> $A", special_tokens=[("<|user|>", 0)]
        )
    return save(folder, tokenizer, bos_token="<|user|>", eos_token="<|end|>", **config)


def byte_fallback(folder: Path, **config: Any) -> Path:
    """Words with a marker for the space before them, and bytes for the rest: as Llama 2 and Gemma are built."""
    tokens = ["<unk>", "<|end|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += ["▁", *"helowrdtanbiusxy.", "▁w", "he", "ll", "hell", "hello", "▁hello"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("▁", "w"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(Regex(" "), "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken("<|end|>", normalized=False)])
    return save(folder, tokenizer, unk_token="<unk>", eos_token="<|end|>", **config)


def gemma_like(folder: Path, **config: Any) -> Path:
    """As Gemma is built: no space put before the text, runs of spaces and newlines as whole tokens, BOS, bytes."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>"]
    runs = ["\n", "\n\n", "  ", "   ", "\t", "<td>"]
    tokens = [*special, *runs, *(f"<0x{byte:02X}>" for byte in range(256))]
    tokens += [*"▁helowrdtanbiusxy.한é", "▁w", "he", "ll", "hell", "hello", "▁hello"]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    merges = [("▁", "w"), ("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("▁", "hello")]
    tokenizer = Tokenizer(
        models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", vocab["<bos>"])]
    )
    tokenizer.add_tokens(
        [AddedToken(token, normalized=False, special=token in special) for token in special + runs]
    )
    return save(folder, tokenizer, bos_token="<bos>", eos_token="<eos>", **config)


BUILDERS = {
    "byte level": byte_level,
    "with BOS": lambda folder: byte_level(folder, bos=True),
    "BOS in the configuration only": lambda folder: byte_level(folder, add_bos_token=True),
    "BOS but in the configuration": lambda folder: byte_level(
        folder, bos=True, add_bos_token=False
    ),
    "special only in the configuration": lambda folder: byte_level(folder, pad_token="hello"),
    "byte fallback": byte_fallback,
    "as Gemma": gemma_like,
}


@pytest.fixture(params=BUILDERS)
def any_folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return BUILDERS[request.param](tmp_path / "model")


@pytest.fixture
def byte_processor(tmp_path: Path) -> TextProcessor:
    return TextProcessor(byte_level(tmp_path / "bytes"))


def transformers_tokenizer(folder: Path):
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def byte_ids(processor: TextProcessor, data: bytes) -> list[int]:
    """One token for each byte."""
    names = {}
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in shown]
    for byte in range(256):
        names[byte] = chr(byte) if byte in shown else chr(256 + hidden.index(byte))
    tokenizer = Tokenizer.from_file(str(processor.model_dir / "tokenizer.json"))
    return [tokenizer.token_to_id(names[byte]) for byte in data]


# The same as transformers


def test_ids_and_text_are_transformers(any_folder: Path) -> None:
    processor, reference = TextProcessor(any_folder), transformers_tokenizer(any_folder)
    for text in TRICKY:
        ids = processor.encode(text)
        assert ids == reference(text).input_ids, text
        bare = processor.encode(text, add_special_tokens=False)
        assert bare == reference(text, add_special_tokens=False).input_ids
        for skip in (True, False):
            expected = reference.decode(ids, skip_special_tokens=skip)
            assert processor.decode(ids, skip_special_tokens=skip) == expected


def test_the_real_tokenizer_is_transformers(smollm2_dir: Path) -> None:
    processor, reference = TextProcessor(smollm2_dir), transformers_tokenizer(smollm2_dir)
    for text in [*TRICKY, "<|im_start|>user\nhi<|im_end|>", "a 123 4567.89"]:
        assert processor.encode(text) == reference(text).input_ids
        assert processor.decode(processor.encode(text), skip_special_tokens=False) == text
    expected = reference.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)
    assert processor.encode_chat(CHAT) == expected
    assert processor.eos_token_ids == (2, 0)
    assert processor.vocab_size == 49152


TEMPLATES = {
    "plain": "{% for m in messages %}\n    {{ m.role }}: {{ m['content'] }}\n{% endfor %}\n"
    "{% if add_generation_prompt %}\nassistant:{% endif %}",
    "special tokens": "{{ bos_token }}{% for m in messages %}{{ m.content + eos_token }}{% endfor %}",
    "absent tools": "{% if tools is none and documents is none %}none{% endif %}{{ absent }}",
    "loop controls": "{% for m in messages %}{% if loop.index0 == 1 %}{% continue %}{% endif %}"
    "{% if loop.index0 == 3 %}{% break %}{% endif %}{{ m.content | trim }}{% endfor %}",
    "json": "{{ messages | tojson }}{{ messages[1] | tojson(indent=2) }}",
    "generation": "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% generation %}{{ m.content }}{% endgeneration %}{% endif %}{% endfor %}",
    "namespace": "{% set n = namespace(k=0) %}{% for m in messages %}"
    "{% set n.k = n.k + 1 %}{% endfor %}{{ n.k }}",
    "variables": "{{ enable_thinking }} {{ tools | tojson }}",
    "methods": "{{ messages[0].content.split(' ')[0].upper() }}{{ messages[0].items() | list }}",
    "date": "{{ strftime_now('%Y') }}",
}


@pytest.mark.parametrize("name", TEMPLATES)
def test_templates_render_as_in_transformers(name: str, tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model", chat_template=TEMPLATES[name])
    variables: dict[str, Any] = {}
    if name == "variables":
        variables = {"enable_thinking": False, "tools": [{"name": "f<&>", "n": 1.5}]}
    reference = transformers_tokenizer(folder)
    for prompt in (True, False):
        expected = reference.apply_chat_template(
            CHAT, add_generation_prompt=prompt, tokenize=False, **variables
        )
        given = TextProcessor(folder).apply_chat_template(CHAT, prompt, **variables)
        assert given == expected
        assert given or name == "absent tools"


def test_a_null_content_is_as_if_absent_and_reasoning_has_one_name(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.get('content', 'no') }}|{{ m.reasoning_content }}{% endfor %}"
    )
    folder = byte_level(tmp_path / "model", chat_template=template)
    messages = [{"role": "assistant", "content": None, "reasoning": "because"}]
    expected = transformers_tokenizer(folder).apply_chat_template(messages, tokenize=False)
    assert TextProcessor(folder).apply_chat_template(messages) == expected == "no|because"


def test_a_chat_has_one_bos(tmp_path: Path) -> None:
    """The template writes it and the tokenizer adds it: a doubled BOS spoils the answer and no check fails."""
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}"
    folder = byte_level(tmp_path / "model", bos=True, chat_template=template)
    processor = TextProcessor(folder)
    assert processor.encode("hello")[0] == 0
    ids = processor.encode_chat([{"role": "user", "content": "hello"}])
    assert ids == [0, *processor.encode("hello", add_special_tokens=False)]
    reference = transformers_tokenizer(folder)
    assert ids == reference.apply_chat_template(
        [{"role": "user", "content": "hello"}], return_dict=False
    )


def test_where_a_template_may_stand(tmp_path: Path) -> None:
    """The file wins over the configuration; several have names; tools choose theirs."""
    folder = byte_level(tmp_path / "model", chat_template="configured")
    assert TextProcessor(folder).apply_chat_template(CHAT) == "configured"
    (folder / "chat_template.jinja").write_text("file")
    assert TextProcessor(folder).apply_chat_template(CHAT) == "file"
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    processor = TextProcessor(folder)
    assert processor.apply_chat_template(CHAT) == "file"
    assert processor.apply_chat_template(CHAT, tools=[{"name": "f"}]) == "tools"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    folder = byte_level(tmp_path / "named", chat_template=named)
    assert TextProcessor(folder).apply_chat_template(CHAT) == "one"
    assert TextProcessor(folder).apply_chat_template(CHAT, tools=[{"name": "f"}]) == "two"


# One sentence for what cannot be done


@pytest.mark.parametrize(
    ("template", "messages", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", CHAT, "roles must alternate"),
        ("{{ messages[0].content + 1 }}", CHAT, "refused the messages"),
        ("{% for %}", CHAT, "does not compile"),
        ("{{ messages.__class__.__mro__ }}", CHAT, "refused the messages"),
        ("{{ messages.append(1) }}", CHAT, "refused the messages"),
        ("{% for i in range(10**9) %}{% endfor %}", CHAT, "refused the messages"),
        ("x", [], "at least one message"),
        ("x", "hi", "must be a list"),
        ("x", {"role": "user"}, "must be a list"),
        ("x", ["hi"], r"messages\[0\] must be a dict"),
        ("x", [*CHAT, {"content": "hi"}], r"messages\[4\] must be a dict with a 'role'"),
        ("x", [{"role": "user", "content": object()}], "made of text, numbers, lists and dicts"),
    ],
)
def test_what_a_template_refuses(tmp_path: Path, template: str, messages: Any, said: str) -> None:
    processor = TextProcessor(byte_level(tmp_path / "model", chat_template=template))
    with pytest.raises(ValueError, match=said):
        processor.apply_chat_template(messages)


def test_a_model_without_a_template_says_so(byte_processor: TextProcessor) -> None:
    with pytest.raises(ValueError, match="has no chat template"):
        byte_processor.encode_chat(CHAT)


def test_text_that_is_no_text(byte_processor: TextProcessor) -> None:
    with pytest.raises(ValueError, match="not valid Unicode at character 2"):
        byte_processor.encode("ab\ud800")
    with pytest.raises(TypeError, match="must be a str, got bytes"):
        byte_processor.encode(b"ab")  # pyright: ignore[reportArgumentType]


def test_without_a_tokenizer_token_ids_still_work(tmp_path: Path) -> None:
    """A folder of weights alone serves callers who send ids."""
    (tmp_path / "config.json").write_text('{"vocab_size": 50, "eos_token_id": [3, 4]}')
    processor = TextProcessor(tmp_path)
    assert not processor.has_tokenizer
    assert (processor.vocab_size, processor.eos_token_ids) == (50, (3, 4))
    detokenizer = IncrementalDetokenizer(processor, [1, 2])
    assert detokenizer.append([3], finished=True) == ""
    for use in (lambda: processor.encode("a"), lambda: processor.decode([1])):
        with pytest.raises(ValueError, match=r"has no tokenizer\.json.*lists of token ids"):
            use()


def test_a_broken_file_is_named(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*tokenizer\.json"):
        TextProcessor(folder).encode("a")
    (folder / "generation_config.json").write_text("{")
    with pytest.raises(ValueError, match=r"cannot read .*generation_config\.json"):
        _ = TextProcessor(folder).eos_token_ids


@pytest.mark.parametrize(
    ("generation", "config", "expected"),
    [
        ({"eos_token_id": [5, 6]}, {"eos_token_id": 1}, (5, 6, 1)),
        ({"eos_token_id": 0}, {"eos_token_id": [1, 0]}, (0, 1)),
        ({}, {"eos_token_id": 1}, (1,)),
        (None, {"text_config": {"eos_token_id": [7]}}, (7,)),
        (None, {}, ()),
    ],
)
def test_which_tokens_end_an_answer(
    tmp_path: Path, generation: dict | None, config: dict, expected: tuple[int, ...]
) -> None:
    """Those of the worker's config: an end that the text does not know is shown as a part of the answer."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (tmp_path / "generation_config.json").write_text(json.dumps(generation))
    assert TextProcessor(tmp_path).eos_token_ids == expected


def test_what_a_folder_recommends_for_sampling(tmp_path: Path) -> None:
    """What it does not name, or names as null, is left to rowcast's own defaults."""
    folder = byte_level(tmp_path / "model")
    assert TextProcessor(folder).sampling_defaults == {}
    recommended = {
        "do_sample": False, "temperature": 0.6, "top_k": 20, "top_p": None, "min_p": 0.1,
        "repetition_penalty": 1.05, "max_new_tokens": 256, "num_beams": 4,
    }  # fmt: skip
    (folder / "generation_config.json").write_text(json.dumps(recommended))
    defaults = TextProcessor(folder).sampling_defaults
    assert SamplingParams(**defaults) == SamplingParams(
        temperature=0.6, top_k=20, min_p=0.1, repetition_penalty=1.05, max_tokens=256
    )


def test_a_training_runs_limits_do_not_cut_prompts(tmp_path: Path) -> None:
    """tokenizer.json may carry truncation and padding; a prompt must be neither cut nor padded."""
    folder = byte_level(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=64)
    tokenizer.save(str(folder / "tokenizer.json"))
    assert len(TextProcessor(folder).encode("abcdefgh")) == 8


def test_threads_share_one_processor(tmp_path: Path) -> None:
    processor = TextProcessor(
        byte_level(tmp_path / "model", chat_template="{{ messages[0].content }}")
    )
    barrier = threading.Barrier(8)
    wrong: list[object] = []

    def work(number: int) -> None:
        text = f"hello {number} 한국어 " * 20
        barrier.wait()  # all meet the first, lazy load
        for _ in range(20):
            ids = processor.encode_chat([{"role": "user", "content": text}])
            if processor.decode(ids) != text:
                wrong.append(ids)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_text_loads_no_torch_ray_or_transformers(tmp_path: Path) -> None:
    folder = byte_level(tmp_path / "model", chat_template="{{ messages[0].content }}")
    script = (
        "import sys; from rowcast.cluster.text import TextProcessor\n"
        "p = TextProcessor(sys.argv[1]); p.decode(p.encode_chat([{'role': 'user', 'content': 'a'}]))\n"
        "assert not {'torch', 'transformers', 'ray', 'numba'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script, folder], check=True)


# Streaming: case F04


def test_an_emoji_in_pieces_comes_as_one(byte_processor: TextProcessor) -> None:
    ids = byte_ids(byte_processor, b"\xf0\x9f\x98\x80")
    detokenizer = IncrementalDetokenizer(byte_processor, byte_processor.encode("hello"))
    pieces = [detokenizer.append(part, finished=False) for part in (ids[:2], ids[2:3], ids[3:])]
    assert pieces == ["", "", "\U0001f600"]
    assert detokenizer.append([], finished=True) == ""


def test_an_emoji_cut_by_max_tokens_ends_as_the_whole_decode_does(
    byte_processor: TextProcessor,
) -> None:
    ids = byte_ids(byte_processor, b"hi\xf0\x9f")
    detokenizer = IncrementalDetokenizer(byte_processor, [])
    pieces = [detokenizer.append([i], finished=n == 3) for n, i in enumerate(ids)]
    assert pieces == ["h", "i", "", "\ufffd"]
    assert "".join(pieces) == byte_processor.decode(ids)


def test_the_prompts_unfinished_character_comes_whole_and_alone(
    byte_processor: TextProcessor,
) -> None:
    """The prompt ends with E1 8E: the first piece is the finished character, not the prompt's text or U+FFFD."""
    prompt = byte_ids(byte_processor, b"secret \xe1\x8e")
    detokenizer = IncrementalDetokenizer(byte_processor, prompt)
    first, second = byte_ids(byte_processor, b"\x80!")
    assert detokenizer.append([first], finished=False) == b"\xe1\x8e\x80".decode()
    assert detokenizer.append([second], finished=True) == "!"


@pytest.mark.parametrize(("output", "expected"), [(b"A", "A"), (b"\x8e", ""), (b"\x8eA", "A")])
def test_the_prompts_broken_character_stays_the_prompts(
    byte_processor: TextProcessor, output: bytes, expected: str
) -> None:
    detokenizer = IncrementalDetokenizer(byte_processor, byte_ids(byte_processor, b"x\xe1"))
    assert detokenizer.append(byte_ids(byte_processor, output), finished=True) == expected


def test_a_real_replacement_character_is_not_held_for_ever(byte_processor: TextProcessor) -> None:
    """The model may talk about U+FFFD; the text before it must flow."""
    ids = byte_ids(byte_processor, ("ab" + "\ufffd" * 40 + "c").encode())
    detokenizer = IncrementalDetokenizer(byte_processor, byte_ids(byte_processor, b"\xef\xbf\xbd"))
    pieces = [detokenizer.append([token_id], finished=False) for token_id in ids]
    assert "".join(pieces) == "ab" + "\ufffd" * 40 + "c"
    assert len("".join(pieces[:60])) > 10


def test_characters_that_end_inside_tokens_do_not_wait_for_each_other(tmp_path: Path) -> None:
    """Tokens 'last bytes of one character + first byte of the next': the text always ends in an unfinished one."""
    folder = byte_level(tmp_path / "model")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    processor = TextProcessor(folder)
    syllable = tokenizer.encode("가").tokens  # EA B0 80
    state = json.loads(tokenizer.to_str())
    new_id = len(state["model"]["vocab"])
    state["model"]["vocab"][syllable[2] + syllable[0]] = new_id
    state["model"]["merges"].append([syllable[2], syllable[0]])
    (folder / "tokenizer.json").write_text(json.dumps(state))
    first, second, last = byte_ids(processor, "가".encode())
    detokenizer = IncrementalDetokenizer(processor, [])
    text = detokenizer.append([first, second], finished=False)
    for _ in range(100):
        piece = detokenizer.append([new_id, second], finished=False)
        assert piece == "가"
        text += piece
    text += detokenizer.append([last], finished=True)
    assert text == "가" * 101


def test_special_tokens_give_no_text_unless_asked(byte_processor: TextProcessor) -> None:
    ids = [*byte_processor.encode("hello"), 1]
    assert IncrementalDetokenizer(byte_processor, [0]).append(ids, finished=True) == "hello"
    shown = IncrementalDetokenizer(byte_processor, [0], skip_special_tokens=False)
    assert shown.append(ids, finished=True) == "hello<|end|>"


def test_ids_without_a_name_give_no_text(byte_processor: TextProcessor) -> None:
    """A model's embedding may have more rows than its tokenizer has tokens."""
    ids = [*byte_processor.encode("hello"), 399, *byte_processor.encode(" w")]
    assert IncrementalDetokenizer(byte_processor, [399]).append(ids, finished=True) == "hello w"


def test_a_space_before_a_word_survives_streaming(tmp_path: Path) -> None:
    """A byte-fallback decoder strips the first word's space: each word must be decoded after another."""
    processor = TextProcessor(byte_fallback(tmp_path / "model"))
    text = "hello hello  w. " * 30 + "end"
    prompt, output = processor.encode("hello"), processor.encode(" " + text)[1:]
    detokenizer = IncrementalDetokenizer(processor, prompt)
    given = "".join(detokenizer.append([token_id], finished=False) for token_id in output)
    given += detokenizer.append([], finished=True)
    assert processor.decode(prompt) + given == processor.decode(prompt + output)


def in_chunks(ids: list[int], rng: random.Random) -> list[list[int]]:
    chunks, start = [], 0
    while start < len(ids):
        size = rng.choice([1, 1, 1, 2, 3, 30])
        chunks.append(ids[start : start + size])
        start += size
    return chunks


def test_a_byte_fallback_model_without_a_prefix_keeps_its_first_space(tmp_path: Path) -> None:
    """Gemma's output begins with the space before its first word, whatever the prompt ended with, or without one."""
    processor = TextProcessor(gemma_like(tmp_path / "model"))
    for prompt_text in ("", "hello", "hello ", "hello\n\n", "한🙂"):
        prompt = processor.encode(prompt_text)
        for text in (" hello w", "  hello", "\n hello", "   \n\n\n", " "):
            output = processor.encode(text, add_special_tokens=False)
            detokenizer = IncrementalDetokenizer(processor, prompt)
            pieces = [detokenizer.append([token_id], finished=False) for token_id in output]
            assert pieces == [processor.decode([token_id]) for token_id in output]
            assert "".join(pieces) == text
            assert detokenizer.append([], finished=True) == ""


def test_half_a_character_in_byte_tokens_is_held(tmp_path: Path) -> None:
    processor = TextProcessor(gemma_like(tmp_path / "model"))
    first = 4 + 6  # the id of <0x00>
    emoji = [first + byte for byte in EMOJI.encode()]
    detokenizer = IncrementalDetokenizer(processor, processor.encode("hello"))
    pieces = [detokenizer.append([token_id], finished=False) for token_id in [*emoji, *emoji]]
    assert pieces == ["", "", "", EMOJI] * 2
    # Cut by max_tokens: told as broken only at the end.
    pieces = [detokenizer.append([token_id], finished=False) for token_id in emoji[:3]]
    assert pieces == ["", "", ""]
    assert detokenizer.append([], finished=True) == "\ufffd"
    # The prompt ends inside a character: the answer begins with that character, whole.
    detokenizer = IncrementalDetokenizer(processor, [*processor.encode("he"), *emoji[:2]])
    assert [detokenizer.append([i], finished=False) for i in emoji[2:]] == ["", EMOJI]


@pytest.mark.parametrize("builder", [byte_fallback, gemma_like])
def test_broken_bytes_take_nothing_with_them(builder, tmp_path: Path) -> None:
    """A byte-fallback decoder prints a whole run of bytes as U+FFFD when one is wrong, even characters given before."""
    processor = TextProcessor(builder(tmp_path / "model"))
    rng = random.Random(8)
    prompt = processor.encode("he")
    hello = processor.encode("he hello", add_special_tokens=False)[-1:]
    assert processor.decode([*prompt, *hello]).endswith("he hello")
    for _ in range(300):
        output: list[int] = []
        data = b""
        for _ in range(rng.randrange(1, 14)):
            if rng.random() < 0.3:
                output += hello
                data += b" hello"
                continue
            part = rng.choice(["🙂".encode(), "글".encode(), b"A", b"\xe4\xb8", b"\xff", b"\x80"])
            output += [processor.tokens_of_bytes[byte] for byte in part]
            data += part
        detokenizer = IncrementalDetokenizer(processor, prompt)
        text = "".join(
            detokenizer.append(chunk, finished=False) for chunk in in_chunks(output, rng)
        )
        text += detokenizer.append([], finished=True)
        assert text == data.decode(errors="replace")


@pytest.mark.parametrize("builder", [byte_level, byte_fallback, gemma_like])
def test_valid_text_streams_exactly(builder, tmp_path: Path) -> None:
    """Random texts in bytes and words: the pieces add up and no U+FFFD shows, at any chunking."""
    processor = TextProcessor(builder(tmp_path / "model"))
    rng = random.Random(5)
    alphabet = ["hello", " ", " w", "한", "글", "é", "🙂", "👩‍👧", "\n", ".", "x", "  "]
    for _ in range(150):
        prompt_text, text = (
            "".join(rng.choice(alphabet) for _ in range(rng.randrange(low, high)))
            for low, high in ((1, 12), (0, 90))
        )
        prompt = processor.encode(prompt_text)
        output = processor.encode(prompt_text + text)[len(prompt) :]
        if processor.decode(prompt).endswith("\ufffd") or not processor.decode(prompt):
            continue
        if processor.encode(prompt_text + text)[: len(prompt)] != prompt:
            continue  # the prompt's last token would be another one
        detokenizer = IncrementalDetokenizer(processor, prompt)
        pieces = [detokenizer.append(chunk, finished=False) for chunk in in_chunks(output, rng)]
        pieces.append(detokenizer.append([], finished=True))
        assert processor.decode(prompt) + "".join(pieces) == processor.decode(prompt + output)
        assert "\ufffd" not in "".join(pieces)


def test_broken_text_streams_as_the_whole_decode(byte_processor: TextProcessor) -> None:
    """Random bytes after random bytes: what callers read is the decode of everything, less the prompt's part."""
    rng = random.Random(9)
    for _ in range(400):
        prompt, output = ([rng.randrange(0, 263) for _ in range(rng.randrange(n))] for n in (9, 90))
        detokenizer = IncrementalDetokenizer(byte_processor, prompt)
        text = "".join(
            detokenizer.append(chunk, finished=False) for chunk in in_chunks(output, rng)
        )
        text += detokenizer.append([], finished=True)
        before, whole = byte_processor.decode(prompt), byte_processor.decode(prompt + output)
        completed = before.endswith("\ufffd") and whole == before[:-1] + text
        assert completed or whole == before + text


def test_a_token_costs_the_same_however_long_the_output(
    byte_processor: TextProcessor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Counts decoded tokens: decoding everything again makes a long answer quadratic."""
    decoded: list[int] = []
    real = TextProcessor.decode

    def counting(self: TextProcessor, token_ids, skip_special_tokens: bool = True) -> str:
        token_ids = list(token_ids)
        decoded.append(len(token_ids))
        return real(self, token_ids, skip_special_tokens)

    monkeypatch.setattr(TextProcessor, "decode", counting)
    valid = byte_ids(byte_processor, "글 hello 🙂 ".encode() * 100)
    broken = byte_ids(byte_processor, b"\x80" * 2000)
    ends = [1] * 2000  # an answer that goes on past its end token, as with ignore_eos
    for ids in (valid, broken, ends):
        decoded.clear()
        detokenizer = IncrementalDetokenizer(byte_processor, valid)
        for token_id in ids:
            detokenizer.append([token_id], finished=False)
        assert max(decoded) <= 64
        assert len(decoded) <= 2.2 * len(ids)


def test_the_real_gemma_tokenizer_streams_exactly(gemma_dir: Path) -> None:
    """Runs are tokens, rare characters are bytes: each text comes back whole, in pieces without half characters."""
    processor = TextProcessor(gemma_dir)
    rng = random.Random(6)
    alphabet = [
        " hello",
        "  ",
        " ",
        "\n",
        "\n\n",
        "    ",
        "\t",
        "中国",
        "한국어",
        "é",
        "🙂",
        "🫩",
        "👩‍👧",
        "<td>",
        "x",
    ]
    for _ in range(40):
        texts = ["".join(rng.choice(alphabet) for _ in range(size)) for size in (5, 40)]
        prompt = processor.encode(texts[0])
        output = processor.encode(texts[1], add_special_tokens=False)
        detokenizer = IncrementalDetokenizer(processor, prompt)
        pieces = [detokenizer.append([token_id], finished=False) for token_id in output]
        assert "".join(pieces) == texts[1]
        assert "\ufffd" not in "".join(pieces)
        assert detokenizer.append([], finished=True) == ""
