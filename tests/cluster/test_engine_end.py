"""How engines end: a rank that dies, a start that is broken off, a stop, and a Ray that was there before."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import ray
from rowcast.cluster import engine, placement
from rowcast.cluster.client import Client
from rowcast.cluster.state_file import EngineRecord, read_record, state_folder, write_record
from rowcast.scheduler.sampling_params import SamplingParams
from rowcast.tests.cluster.support import Cluster, in_another_process, spec_of

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = SamplingParams(temperature=0, max_tokens=1900, ignore_eos=True)


@pytest.fixture(autouse=True)
def taken_down(cluster: Cluster) -> Iterator[None]:
    """A test that fails leaves nothing to the next one."""
    yield
    for name in (cluster.name, "guest", "half", "far"):
        engine._take_down(name)


def nothing_is_left(cluster: Cluster, pids: dict[str, int]) -> None:
    """No actor, no placement group, no reserved CPU, no process of the engine."""
    assert engine._actor_names(cluster.name) == []
    assert placement.find_group(cluster.name) is None
    deadline = time.monotonic() + 10
    while any(psutil.pid_exists(pid) for pid in pids.values()):
        assert time.monotonic() < deadline, "processes of the engine are left"
        time.sleep(0.05)
    while ray.available_resources().get("CPU") != ray.cluster_resources()["CPU"]:
        assert time.monotonic() < deadline, f"reserved still: {ray.available_resources()}"
        time.sleep(0.1)


def test_a_killed_rank_ends_every_request_with_a_sentence(cluster: Cluster) -> None:
    """R05: within 10 s, naming rank and cause; the other rank, blocked in a collective, is killed, not joined."""
    cluster.start()
    pids = cluster.status()["pids"]
    client = Client(name=cluster.name)
    stream = client.stream("abc", LONG)
    next(stream)
    os.kill(pids["worker-1"], signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(engine.EngineFailed, match="rank 1 failed: its process died"):
        list(stream)
    with pytest.raises(engine.EngineFailed, match="rank 1 failed"):
        client.generate("more", GREEDY)
    assert time.monotonic() - began < 10
    status = cluster.wait_until(lambda s: not psutil.pid_exists(pids["worker-0"]))
    assert status["state"] == "failed"
    assert "rank 1 failed" in status["error"]
    assert "rank 1" in (engine.wait_engine(cluster.name, 5) or "")
    client.close()
    engine._take_down(cluster.name)
    nothing_is_left(cluster, pids)


def test_a_rank_that_is_frozen_is_named_past_the_steps_deadline(cluster: Cluster) -> None:
    """T08: its peer waits for it in a collective, and answers when it is asked over Ray; the frozen one does not."""
    cluster.start(step_deadline_s=3.0)
    pids = cluster.status()["pids"]
    with Client(name=cluster.name) as client:
        stream = client.stream("abc", LONG)
        next(stream)
        os.kill(pids["worker-1"], signal.SIGSTOP)
        began = time.monotonic()
        with pytest.raises(
            engine.EngineFailed, match=r"no result after 3 s; rank 1 does not answer"
        ):
            list(stream)
        assert time.monotonic() - began < 12
    engine._take_down(cluster.name)
    nothing_is_left(cluster, pids)


def test_a_killed_scheduler_ends_every_request(cluster: Cluster) -> None:
    """R05: nobody waits for ever; stop clears the rest."""
    cluster.start(ranks=1)
    pids = cluster.status()["pids"]
    with Client(name=cluster.name) as client:
        stream = client.stream("abc", LONG)
        next(stream)
        os.kill(pids["scheduler"], signal.SIGKILL)
        with pytest.raises(engine.EngineFailed, match="the scheduler of engine 't' died"):
            list(stream)
    engine._take_down(cluster.name)
    nothing_is_left(cluster, pids)


def test_an_engine_that_cannot_be_noted_is_taken_down(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was left running on a Ray of others when its file could not be written: a full disk, a read-only home."""

    def refuse(record: EngineRecord) -> None:
        raise ValueError("the disk is full")

    monkeypatch.setattr(engine, "write_record", refuse)
    with pytest.raises(ValueError, match="the disk is full"):
        cluster.start(ranks=1)
    nothing_is_left(cluster, {})


def test_a_killed_front_ends_the_engine(cluster: Cluster) -> None:
    """It stayed `ready`, with requests that ran for nobody, and `rowcast serve` went on waiting."""
    cluster.start(ranks=1)
    pids = cluster.status()["pids"]
    with Client(name=cluster.name) as client:
        stream = client.stream("abc", LONG)
        next(stream)
        os.kill(pids["front-0"], signal.SIGKILL)
        with pytest.raises(engine.EngineFailed, match="its front cannot be reached"):
            list(stream)
    assert "the front of engine 't' is gone" in (engine.wait_engine(cluster.name, 10) or "")
    engine._take_down(cluster.name)
    nothing_is_left(cluster, pids)


def test_a_model_that_cannot_be_loaded_is_the_users_to_mend(
    cluster: Cluster, tmp_path: Path
) -> None:
    broken = tmp_path / "model"
    broken.mkdir()
    (broken / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        engine.start_engine(spec_of(broken, cluster.name), cluster.session)
    nothing_is_left(cluster, {})


def test_too_few_resources_are_named_and_given_back(cluster: Cluster) -> None:
    """R01: what is needed, what is there, who holds it; not silence."""
    waits: list[str] = []
    spec = spec_of(cluster.model, cluster.name, placement_timeout_s=5.0)
    spec.worker["device"] = "cuda"
    with pytest.raises(
        TimeoutError, match=r"needs 2 bundles of 1 GPU; the cluster has 0 free of 0"
    ):
        engine.start_engine(spec, cluster.session, on_wait=waits.append)
    assert waits
    assert waits[0].startswith("waiting: needs 2 bundles of 1 GPU")
    nothing_is_left(cluster, {})


def test_a_start_that_waits_names_the_holder_and_goes_on_by_itself(cluster: Cluster) -> None:
    """R01: who holds what is missing; when that one leaves, the start continues."""
    half = placement.create("half", device="cpu", num_ranks=1, timeout_s=10)
    waits: list[str] = []

    def word(sentence: str) -> None:
        waits.append(sentence)
        placement.remove_group(half.group)

    spec = spec_of(cluster.model, cluster.name)
    cores = ray.cluster_resources()["CPU"]
    if cores > 2:
        pytest.skip(f"{cores:g} cores are enough for both")
    info = engine.start_engine(spec, cluster.session, on_wait=word)
    assert info.status["state"] == "ready"
    (sentence,) = waits
    assert "needs 2 bundles of 1 CPU" in sentence
    assert "half/workers holds 1" in sentence
    engine._take_down(cluster.name)
    nothing_is_left(cluster, info.status["pids"])


@pytest.mark.parametrize(
    "stage",
    ["reserve resources", "start the scheduler", "start 2 workers", "load tiny on 2 workers"],
)
def test_ctrl_c_at_a_stage_takes_everything_down(cluster: Cluster, stage: str) -> None:
    def interrupt(done: str, seconds: float) -> None:
        if done == stage:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        engine.start_engine(spec_of(cluster.model, cluster.name), cluster.session, interrupt)
    nothing_is_left(cluster, {})


def test_a_name_is_free_again_at_once(cluster: Cluster) -> None:
    """R09: the late clean-up of the old actor does not take the new one's name."""
    pids = cluster.start(ranks=1).status["pids"]
    engine._take_down(cluster.name)
    cluster.start(ranks=1)
    time.sleep(1.0)
    with Client(name=cluster.name) as client:
        assert client.generate("fine", GREEDY)[0].finished
    engine._take_down(cluster.name)
    nothing_is_left(cluster, pids)
    assert not engine._take_down(cluster.name), "twice is fine"


STOP_SCRIPT = """
import sys
from rowcast.cluster import engine
print(engine.stop_engine(sys.argv[1], sys.argv[2] or None), engine.stop_engine(sys.argv[1], sys.argv[2] or None))
"""


def test_a_cluster_that_was_there_is_left_running(cluster: Cluster) -> None:
    """Attached by address under another name: stop ends the engine, and nothing else."""
    session = engine.connect(cluster.session.address, name="guest")
    assert not session.started_by_us
    engine.start_engine(spec_of(cluster.model, "guest", ranks=1), session)
    record = read_record("guest")
    assert record is not None
    assert record.head is None
    assert in_another_process(STOP_SCRIPT, "guest", "") == "True False\n"
    assert not (state_folder() / "guest.json").exists()
    assert ray.nodes()[0]["Alive"]
    assert read_record(cluster.name) is not None, "the head's own record"
    nothing_is_left(cluster, {})


START_SCRIPT = """
import pathlib, sys, rowcast
from rowcast.cluster import engine
from rowcast.tests.cluster.support import spec_of
session = engine.connect(sys.argv[1], name="far")
spec = spec_of(pathlib.Path(sys.argv[2]), "far", ranks=1)
spec.worker["device"] = "auto"
engine.start_engine(spec, session)
with rowcast.Client(sys.argv[1], name="far") as client:
    (answer,) = client.generate("Hello", rowcast.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True))
print(engine.engine_status("far")["state"], engine.stop_engine("far"), len(answer.outputs[0].token_ids))
"""


def test_an_engine_whose_ray_is_gone_is_told_and_cleared(cluster: Cluster) -> None:
    """Its file names an address; the sentence spoke of "the address given", though none was."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    write_record(EngineRecord(name="lost", address=f"127.0.0.1:{port}"))
    with pytest.raises(
        ValueError, match=f"nothing answers at 127.0.0.1:{port}, where engine 'lost' ran"
    ):
        engine.engine_status("lost")
    assert engine.stop_engine("lost")
    assert read_record("lost") is None


def test_an_engine_is_started_and_stopped_through_ray_client(cluster: Cluster) -> None:
    """R02: from a machine that is no node of the cluster."""
    output = in_another_process(START_SCRIPT, cluster.client_address, str(cluster.model))
    assert output == "ready True 12\n"


def test_a_half_started_engine_is_cleared_by_stop(cluster: Cluster) -> None:
    """A driver killed in the middle leaves actors without a file: the names are enough."""
    group = placement.create("half", device="cpu", num_ranks=1, timeout_s=10)
    assert group is not None
    assert in_another_process(STOP_SCRIPT, "half", cluster.session.address) == "True False\n"
    assert placement.find_group("half") is None
    nothing_is_left(cluster, {})
