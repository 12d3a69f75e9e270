"""`rowcast replay`: a recording rebuilds the tables, digests are checked, a changed byte is found at its step."""

from __future__ import annotations

import json
import struct
import zlib
from collections import deque
from pathlib import Path

import msgpack
import numpy as np
import pytest
from rowcast.launch.bench.fake_logprobs import fake_extras
from rowcast.launch.cli import run_command
from rowcast.launch.replay import ReplayMismatch, replay
from rowcast.scheduler.agreement import asked_of_step
from rowcast.scheduler.config import SchedulerConfig
from rowcast.scheduler.front_messages import Submit, make_submit_key
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.scheduler.messages import (
    ControlOperation,
    SchedulerOutput,
    StepResult,
    decode_frame,
    encode_control,
    encode_result,
    encode_step,
)
from rowcast.scheduler.recording import Life, Recorder, Recording
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.scheduler.scheduler import Scheduler
from rowcast.worker.state import WorkerState

EPOCH, RANKS, VOCAB = 7, 2, 101
GROUPS = (
    KVGroupSpec(block_size=4, num_kv_heads=1, head_dim=8, layers=(0, 2)),
    KVGroupSpec(
        block_size=4,
        num_kv_heads=1,
        head_dim=8,
        layers=(1, 3),
        kind=AttentionKind.SLIDING_WINDOW,
        window=6,
    ),
)


def record(
    path: Path, *, depth: int = 2, stop: bool = True, **asked: int
) -> tuple[WorkerState, int]:
    """Run 12 requests with random tokens, twice a common prefix, in a pool so small that it preempts.

    asked: further sampling params of every third request.
    Returns: the worker's tables at the end, and the sequence of the last step. Without `stop` the last results are
    missing, as when an engine is killed.
    """
    config = SchedulerConfig(
        vocab_size=VOCAB,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=24,
        depth=depth,
        prefix_caching=True,
    )
    scheduler = Scheduler(config, GROUPS, 22)
    state = WorkerState(
        max_num_seqs=4,
        max_model_len=64,
        groups=GROUPS,
        num_blocks=22,
        vocab_size=VOCAB,
        depth=depth,
    )
    random = np.random.default_rng(0)
    common = random.integers(0, VOCAB, 12, np.int32)
    for number in range(12):
        own = random.integers(0, VOCAB, int(random.integers(1, 9)), np.int32)
        scheduler.add(
            b"front",
            Submit(
                number=number,
                submit_key=make_submit_key(bytes(16), number),
                request_id=f"[request] {number}",
                prompt_token_ids=np.concatenate((common, own)) if number % 2 else own,
                seed=number,
                params=SamplingParams(
                    max_tokens=int(random.integers(1, 20)),
                    ignore_eos=True,
                    **(asked if number % 3 == 0 else {}),
                ),
            ),
        )
    recorder = Recorder(path)
    recorder.life(Life.of(scheduler, epoch=EPOCH, model="tiny", world_size=RANKS))
    sequence, frames = 0, deque()
    while True:
        while len(frames) < depth and (step := scheduler.schedule()) is not None:
            sequence += 1
            frame = encode_step(step, epoch=EPOCH, sequence=sequence)
            recorder.frame(sequence, frame)
            scheduler.digests.end(frame)
            frames.append((sequence, frame))
        if not frames or (not stop and sequence > 20):
            break
        number, frame = frames.popleft()
        body = decode_frame(frame).body
        assert isinstance(body, SchedulerOutput)
        plan = state.apply(body)
        value = state.digests.end(frame)
        tokens = np.where(plan.samples, random.integers(0, VOCAB, plan.num_reqs), -1)
        tokens = tokens.astype(np.int32)
        held = state.requests
        wanted = asked_of_step(held.asking, held.token_ids, held.num_prompt_tokens, plan)
        extras = fake_extras(wanted, tokens, plan.seq_lens, VOCAB)
        state.commit(plan, tokens)
        digests = struct.pack("<Q", value) * RANKS if plan.samples.any() else b""
        result = encode_result(
            StepResult(tokens=tokens, digests=digests, extras=extras), epoch=EPOCH, sequence=number
        )
        recorder.result(number, result)
        scheduler.settle(tokens, extras)
    if stop:
        assert scheduler.num_preemptions > 0, "the recording should show preemptions"
        assert scheduler.cache.stats.hits > 0, "the recording should show prefix-cache hits"
        sequence += 1
        frame = encode_control(ControlOperation.STOP, epoch=EPOCH, sequence=sequence)
        recorder.frame(sequence, frame)
    recorder.close()
    return state, sequence


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    path = tmp_path_factory.mktemp("recording") / "steps.rec"
    _, last = record(path)
    return path, last


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_replay_checks_every_digest_and_ends_with_the_engines_tables(tmp_path: Path, depth: int):
    state, last = record(tmp_path / "steps.rec", depth=depth)
    (summary,) = replay(Recording(tmp_path / "steps.rec"))
    assert summary.last_sequence == last
    assert summary.num_steps == last - 1  # the last frame is the stop
    assert summary.num_requests >= 12
    assert summary.num_digests > 20 * RANKS
    assert summary.num_unsettled == 0
    assert not state.requests.live.any()


def test_the_tables_of_any_step_are_those_that_the_worker_had(recorded: tuple[Path, int]):
    path, _ = recorded
    seen = []
    list(
        replay(
            Recording(path),
            lambda life: (
                lambda state, sequence, step, plan: seen.append(
                    (sequence, state.requests.live.sum(), plan.num_reqs)
                )
            ),
        )
    )
    assert [sequence for sequence, _, _ in seen] == list(range(1, len(seen) + 1))
    assert max(live for _, live, _ in seen) == 4


def test_an_engine_that_was_killed_leaves_a_recording_that_replays(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    _, last = record(tmp_path / "steps.rec", stop=False)
    path = tmp_path / "steps.rec"
    path.write_bytes(path.read_bytes()[:-3])
    recording = Recording(path)
    (summary,) = replay(recording)
    assert recording.torn
    assert summary.num_unsettled == 1
    assert summary.last_sequence == last - 1
    assert run_command(["replay", str(path)]) == 0
    said = capsys.readouterr().out
    assert "the last step has no result: the engine ended there" in said
    assert "the file ends in the middle of a record" in said


def records_of(data: bytes) -> list[tuple[int, int, int]]:
    """(kind, start, end) of each record's payload."""
    found, place = [], data.index(b"\n") + 1
    while place < len(data):
        kind, _, length, _, _ = struct.unpack("<BQIII", data[place : place + 21])
        found.append((kind, place + 21, place + 21 + length))
        place += 21 + length
    return found


def with_payload(data: bytes, start: int, payload: bytes) -> bytes:
    """Replace a payload, with checksums that are right for the new one."""
    kind, sequence, length, _, _ = struct.unpack("<BQIII", data[start - 21 : start])
    assert length == len(payload)
    fields = struct.pack("<BQII", kind, sequence, length, zlib.crc32(payload))
    header = fields + struct.pack("<I", zlib.crc32(fields))
    return data[: start - 21] + header + payload + data[start + length :]


def test_a_flipped_byte_is_found_at_its_step(recorded: tuple[Path, int], tmp_path: Path):
    data = recorded[0].read_bytes()
    for kind, start, end in records_of(data)[1::7]:
        flipped = bytearray(data)
        flipped[(start + end) // 2] ^= 0x10
        path = tmp_path / "flipped.rec"
        path.write_bytes(flipped)
        sequence = struct.unpack("<Q", data[start - 20 : start - 12])[0]
        name = {2: "frame", 3: "result"}[kind]
        with pytest.raises(ValueError, match=f"the {name} of step {sequence} is damaged"):
            list(replay(Recording(path)))


def test_digests_find_what_checksums_cannot(recorded: tuple[Path, int], tmp_path: Path):
    """A token changed with care: its own step is consistent, the digest two steps later is not."""
    data = recorded[0].read_bytes()
    results = [(start, end) for kind, start, end in records_of(data) if kind == 3]
    start, end = results[10]
    payload = bytearray(data[start:end])
    assert payload[-1] == 0xC0  # extras: nil, right behind the tokens
    payload[-5] ^= 1
    path = tmp_path / "forged.rec"
    path.write_bytes(with_payload(data, start, bytes(payload)))
    with pytest.raises(
        ReplayMismatch, match=r"step 13: digest [0-9a-f]{16} is not the scheduler's"
    ):
        list(replay(Recording(path)))


def test_a_token_outside_the_vocabulary_is_found_at_its_step(
    recorded: tuple[Path, int], tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """It ended as an internal error: the worker's tables assert what the scheduler's check keeps out."""
    data = recorded[0].read_bytes()
    start, end = [(start, end) for kind, start, end in records_of(data) if kind == 3][10]
    payload = bytearray(data[start:end])
    payload[-3] ^= 1  # the third of a token's four bytes
    path = tmp_path / "forged.rec"
    path.write_bytes(with_payload(data, start, bytes(payload)))
    assert run_command(["replay", str(path)]) == 1
    said = capsys.readouterr().err
    assert "step 11: the result carries token" in said
    assert said.count("\n") == 1


def test_a_result_without_what_its_step_was_asked_for_is_found(tmp_path: Path):
    """Log-probabilities are in the file, and what they must be of follows from it: the digests do not cover them."""
    path = tmp_path / "asked.rec"
    _, last = record(path, logprobs=1, prompt_logprobs=0)
    (summary,) = replay(Recording(path))
    assert summary.last_sequence == last
    data = path.read_bytes()
    results = [(start, end) for kind, start, end in records_of(data) if kind == 3]
    payloads = [
        (start, msgpack.unpackb(data[start:end], strict_map_key=False)) for start, end in results
    ]
    # A step in which one of several requests asks: its rows are now another's.
    start, values = next((s, v) for s, v in payloads if v[-1] and len(v[5]) > 4 * len(v[-1]))
    extras, num_reqs = values[-1], len(values[5]) // 4
    other = next(index for index in range(num_reqs) if index not in extras)
    extras[other] = extras.pop(min(extras))
    path.write_bytes(with_payload(data, start, msgpack.packb(values)))
    with pytest.raises(ReplayMismatch, match=f"step {values[3]}: the result carries extras of"):
        list(replay(Recording(path)))


def test_missing_records_are_found(recorded: tuple[Path, int], tmp_path: Path):
    data = recorded[0].read_bytes()
    path = tmp_path / "cut.rec"
    for kind, sentence in ((2, "frames are missing"), (3, "records are missing")):
        _, start, end = [r for r in records_of(data) if r[0] == kind][5]
        path.write_bytes(data[: start - 21] + data[end:])
        with pytest.raises(ReplayMismatch, match=sentence):
            list(replay(Recording(path)))


def test_the_command_says_what_it_checked(
    recorded: tuple[Path, int], capsys: pytest.CaptureFixture[str]
):
    path, last = recorded
    assert run_command(["replay", str(path), "--json"]) == 0
    *lines, numbers = capsys.readouterr().out.splitlines()
    (life,) = json.loads(numbers)["lives"]
    assert life["steps"] == last - 1
    assert f"{last - 1} steps" in lines[0]
    assert f"all {life['digests']} digests hold" in lines[0]


def test_a_step_is_shown_as_tables(recorded: tuple[Path, int], capsys: pytest.CaptureFixture[str]):
    path, _ = recorded
    assert run_command(["replay", str(path), "--until", "9", "--explain", "--json"]) == 0
    out = capsys.readouterr().out
    picture = json.loads(out.splitlines()[-1])
    assert picture["step"] == 9
    names = picture["request_ids"]
    assert names
    assert all(name in out for name in names)  # the brackets of an id are no markup
    assert "block table of KV group 1 (sliding window of 6 tokens, block_size 4" in out
    for group, slots in enumerate(picture["slot_mapping"]):
        for position, slot, batch_index in zip(
            picture["positions"],
            slots,
            np.repeat(np.arange(len(names)), np.diff(picture["query_start_loc"])),
            strict=True,
        ):
            table = picture["input_block_tables"][group][batch_index]
            assert slot == table[position // 4] * 4 + position % 4


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["no-such.rec"], "no recording no-such.rec; make one with"),
        (["."], ". is a folder; give the file that was recorded to"),
        (["FILE", "--until", "0"], "--until counts from 1, got 0"),
        (["FILE", "--until", "99999"], "has no step 99999 to stop at; its last step is"),
        (["FILE", "--explain"], "--explain shows one step; say which with --until STEP"),
        (["FILE", "--life", "1"], "--life says which life --until means"),
        (["FILE", "--life", "2", "--until", "3"], "life 2 of"),
        ([__file__], "is not a recording of rowcast"),
    ],
)
def test_a_mistake_costs_a_sentence(
    recorded: tuple[Path, int],
    arguments: list[str],
    sentence: str,
    capsys: pytest.CaptureFixture[str],
):
    given = [str(recorded[0]) if argument == "FILE" else argument for argument in arguments]
    assert run_command(["replay", *given]) == 2
    said = capsys.readouterr().err
    assert sentence in said
    assert said.count("\n") == 1
