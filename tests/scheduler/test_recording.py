"""The recording file: what was written is read back, a torn end is told, and no damaged byte passes."""

from __future__ import annotations

import dataclasses
import struct
import zlib
from pathlib import Path
from typing import Any

import msgpack
import pytest
from rowcast.scheduler.kv_groups import AttentionKind, KVGroupSpec
from rowcast.scheduler.recording import (
    MAGIC,
    DamagedRecording,
    Life,
    Recorder,
    Recording,
    RecordKind,
)

GROUPS = (
    KVGroupSpec(block_size=16, num_kv_heads=1, head_dim=8, layers=(0, 2)),
    KVGroupSpec(
        block_size=16,
        num_kv_heads=1,
        head_dim=8,
        layers=(1, 3),
        kind=AttentionKind.SLIDING_WINDOW,
        window=32,
    ),
)


def life(epoch: int = 7) -> Life:
    return Life(
        epoch=epoch,
        version="0.1.0",
        model="tiny",
        world_size=2,
        depth=2,
        vocab_size=101,
        max_num_seqs=4,
        max_num_batched_tokens=32,
        max_model_len=64,
        num_blocks=9,
        groups=GROUPS,
    )


def write(path: Path, epoch: int = 7) -> None:
    recorder = Recorder(path)
    recorder.life(life(epoch))
    recorder.frame(1, b"frame one")
    recorder.frame(2, b"")
    recorder.result(1, b"result one")
    recorder.close()


def test_what_was_recorded_is_read_back_in_order(tmp_path: Path):
    path = tmp_path / "steps.rec"
    write(path)
    begin, *messages = Recording(path)
    assert begin.life == life()
    assert [(r.kind, r.sequence, r.payload) for r in messages] == [
        (RecordKind.FRAME, 1, b"frame one"),
        (RecordKind.FRAME, 2, b""),
        (RecordKind.RESULT, 1, b"result one"),
    ]
    assert path.stat().st_mode & 0o077 == 0, "a recording holds prompts: nobody else may read it"


def test_a_second_engine_appends_its_life(tmp_path: Path):
    path = tmp_path / "steps.rec"
    write(path, epoch=7)
    write(path, epoch=8)
    assert [r.life.epoch for r in Recording(path) if r.life is not None] == [7, 8]


def test_a_torn_end_is_told_and_everything_before_it_is_read(tmp_path: Path):
    path = tmp_path / "steps.rec"
    write(path)
    whole = path.read_bytes()
    for cut in range(1, len(b"result one") + 21):
        path.write_bytes(whole[:-cut])
        recording = Recording(path)
        assert len(list(recording)) == 3
        assert recording.torn == (cut < len(b"result one") + 21)


def test_recording_goes_on_behind_a_torn_end(tmp_path: Path):
    path = tmp_path / "steps.rec"
    write(path)
    path.write_bytes(path.read_bytes()[:-4])
    write(path, epoch=8)
    recording = Recording(path)
    assert [r.life.epoch for r in recording if r.life is not None] == [7, 8]
    assert not recording.torn


def test_every_flipped_byte_is_found_and_named_with_its_step(tmp_path: Path):
    path = tmp_path / "steps.rec"
    write(path)
    whole = path.read_bytes()
    after_life = whole.index(b"frame one") - 21
    for place in range(len(whole)):
        flipped = bytearray(whole)
        flipped[place] ^= 1 << place % 8
        path.write_bytes(flipped)
        with pytest.raises(DamagedRecording) as caught:
            list(Recording(path))
        if place < len(MAGIC):
            assert "not a recording" in str(caught.value)
        elif after_life + 21 <= place < after_life + 30:
            assert "the frame of step 1 is damaged" in str(caught.value)
        elif place >= len(whole) - len(b"result one"):
            assert "the result of step 1 is damaged" in str(caught.value)


def test_what_is_no_recording_is_left_alone(tmp_path: Path):
    path = tmp_path / "letter.txt"
    path.write_text("dear reader")
    with pytest.raises(DamagedRecording, match=r"letter.txt is not a recording.*give another file"):
        Recorder(path)
    assert path.read_text() == "dear reader"


def _forged(kind: int, payload: bytes) -> bytes:
    """A file of one record whose checksums are right."""
    fields = struct.pack("<BQII", kind, 0, len(payload), zlib.crc32(payload))
    return MAGIC + fields + struct.pack("<I", zlib.crc32(fields)) + payload


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"world_size": None}, "world_size must be a whole number, at least 1, got None"),
        ({"num_blocks": 0}, "num_blocks must be a whole number, at least 1, got 0"),
        ({"groups": [{"kind": "spiral"}]}, "spiral"),
        ({"added_later": 1}, "added_later"),
        ({"depth": 2**63}, "depth must be in [1, 64]"),
    ],
)
def test_a_life_in_another_form_is_refused_in_a_sentence(
    tmp_path: Path, changes: dict[str, Any], reason: str
):
    """One that another version wrote ended as an internal error (TypeError)."""
    values = dataclasses.asdict(life()) | {"groups": []} | changes
    path = tmp_path / "steps.rec"
    packed = msgpack.packb(values)
    assert packed is not None
    path.write_bytes(_forged(1, packed))
    with pytest.raises(
        DamagedRecording, match="the beginning of a life is not in the form"
    ) as told:
        list(Recording(path))
    assert reason in str(told.value)


def test_a_record_of_an_unknown_kind_is_refused_in_a_sentence(tmp_path: Path):
    path = tmp_path / "steps.rec"
    path.write_bytes(_forged(9, b""))
    with pytest.raises(DamagedRecording, match="the record after the beginning is of kind 9"):
        list(Recording(path))


def test_two_engines_do_not_share_a_file(tmp_path: Path):
    path = tmp_path / "steps.rec"
    recorder = Recorder(path)
    with pytest.raises(DamagedRecording, match=r"another engine records to .*; give another file"):
        Recorder(path)
    recorder.close()
    Recorder(path).close()


def test_a_full_disk_ends_the_recording_and_not_the_engine():
    recorder = Recorder("/dev/full")  # every write to it fails
    assert recorder.error == "recording to /dev/full stopped: No space left on device"
    recorder.frame(1, b"frame")
    recorder.close()
