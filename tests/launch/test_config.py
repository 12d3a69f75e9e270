"""Options at the door: what is refused before a model, torch or Ray is touched, and what the parts get."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from rowcast.launch.config import EngineOptions, Environment, parse_bytes, plan_engine

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_act": "silu",
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": [2, 0],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder as far as the door looks: its config, and a safetensors file that holds nothing."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    (tmp_path / "model.safetensors").write_bytes((2).to_bytes(8, "little") + b"{}")
    return tmp_path


@pytest.fixture
def environment(tmp_path: Path) -> Environment:
    return Environment(cache_home=tmp_path / "cache", state_home=tmp_path / "state")


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [
        ("512MiB", 512 * 2**20),
        ("2GiB", 2 * 2**30),
        ("2gib", 2 * 2**30),
        ("1.5G", 3 * 2**29),
        ("64k", 64 * 2**10),
        ("1GB", 10**9),
        ("10 MB", 10 * 10**6),
        ("4096", 4096),
        (4096, 4096),
        ("1TiB", 2**40),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_people_write_them(text, num_bytes):
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize(
    "text", ["", "MiB", "12 apples", "-1", "0", "0.1", "1e9", "nan", "1MiBs", True]
)
def test_other_sizes_are_refused(text):
    with pytest.raises(ValueError, match=r"^kv_cache_memory must be"):
        parse_bytes(text, name="kv_cache_memory")


@pytest.mark.parametrize(
    ("option", "value", "says"),
    [
        ("block_size", 0, "block_size must be a whole number, at least 1, got 0"),
        ("block_size", "16", "block_size must be"),
        ("block_size", True, "block_size must be"),
        ("max_num_batched_tokens", 0, "max_num_batched_tokens must be"),
        (
            "max_num_batched_tokens",
            2**31 - 1,
            "max_num_batched_tokens must be a whole number, at most 1048576",
        ),
        ("max_num_seqs", -1, "max_num_seqs must be"),
        ("max_num_seqs", 2**31 - 1, "max_num_seqs must be a whole number, at most 65536"),
        ("max_model_len", 0, "max_model_len must be"),
        ("max_model_len", 1, "max_model_len must be a whole number, at least 2, got 1"),
        ("max_model_len", 16.0, "max_model_len must be"),
        ("tensor_parallel_size", 0, "tensor_parallel_size must be"),
        ("num_threads", 0, "num_threads must be"),
        ("gpu_memory_utilization", 0.0, "gpu_memory_utilization must be"),
        ("gpu_memory_utilization", 1.5, "gpu_memory_utilization must be"),
        ("gpu_memory_utilization", float("nan"), "gpu_memory_utilization must be"),
        ("kv_cache_memory", "lots", "kv_cache_memory must be"),
        ("depth", 0, "depth must be a whole number, at least 1, got 0"),
        ("depth", 65, "depth must be a whole number, at most 64, got 65"),
        ("long_prefill_token_threshold", -1, "long_prefill_token_threshold must be a whole number"),
        ("enable_prefix_caching", 1, "enable_prefix_caching must be True or False, got 1"),
        (
            "scheduling_policy",
            "lottery",
            "scheduling_policy must be one of fcfs, priority, fair, got 'lottery'",
        ),
        ("dtype", "int3", "dtype must be one of auto, float32, bfloat16, float16"),
        ("quantization", "int8", "quantization 'int8' is not supported yet"),
        ("quantization", "awq", "quantization 'awq' is not supported yet"),
        ("kernel_backend", "magic", "kernel_backend must be one of"),
        ("device", "tpu", "device must be one of"),
        ("name", "../up", "name must be"),
        ("name", 7, "name must be"),
        ("model", "", "model must be"),
        ("model", None, "model must be"),
    ],
)
def test_an_option_out_of_range_is_refused_by_its_name(option, value, says):
    with pytest.raises(ValueError, match="^" + says.replace("[", r"\[")):
        EngineOptions(**{"model": "m", option: value})


def test_numpys_numbers_are_numbers():
    """They were refused as "must be a whole number, got np.int64(4)"."""
    options = EngineOptions(
        model="m", max_num_seqs=np.int64(4), gpu_memory_utilization=np.float32(0.5)
    )
    assert (options.max_num_seqs, options.gpu_memory_utilization) == (4, 0.5)
    assert type(options.max_num_seqs) is int
    assert type(options.gpu_memory_utilization) is float


def test_tables_beyond_the_machines_memory_are_refused(folder, environment):
    """The kernel killed the process half-way through making them, and nobody said why."""
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2**31 - 1}))
    with pytest.raises(
        ValueError, match=r"^256 requests of 2147483647 tokens need tables of \d+ GiB"
    ):
        plan_engine(EngineOptions(model=str(folder)), environment)
    assert plan_engine(EngineOptions(model=str(folder), max_model_len=128), environment)


def test_an_unknown_option_is_refused():
    """A setting that silently has no effect costs an evening."""
    with pytest.raises(TypeError, match="enforce_eager"):
        EngineOptions(model="m", enforce_eager=True)  # type: ignore[call-arg]


def test_every_part_gets_what_was_said(folder, environment):
    options = EngineOptions(
        model=str(folder),
        tensor_parallel_size=3,
        max_num_seqs=5,
        max_num_batched_tokens=33,
        max_model_len=100,
        block_size=8,
        kv_cache_memory="3MiB",
        dtype="float32",
        num_threads=1,
        enable_prefix_caching=False,
        scheduling_policy="fair",
        long_prefill_token_threshold=7,
        depth=3,
        name="one",
    )
    plan = plan_engine(options, environment)
    assert (plan.scheduler.max_num_seqs, plan.scheduler.max_num_batched_tokens) == (5, 33)
    assert (plan.scheduler.vocab_size, plan.scheduler.max_model_len) == (96, 100)
    assert sorted(plan.scheduler.eos_token_ids) == [0, 2]
    assert (plan.scheduler.prefix_caching, plan.scheduler.scheduling_policy) == (False, "fair")
    assert plan.scheduler.long_prefill_token_threshold == 7
    assert plan.scheduler.depth == plan.worker.depth == 3
    spec = plan.engine_spec
    assert (spec.cluster.name, spec.cluster.tensor_parallel_size) == ("one", 3)
    assert spec.worker["kv_cache_memory"] == 3 * 2**20
    assert spec.worker["block_size"] == 8
    assert spec.worker["num_threads"] == 1
    assert spec.worker["model_dir"] == spec.model_dir == str(folder)
    assert "rank" not in spec.worker
    assert "world_size" not in spec.worker


def test_one_prompt_takes_half_of_a_step_unless_told_otherwise(folder, environment):
    """S19: with no cap a request of 100 tokens waits behind one of 100,000."""

    def cap(**options) -> int:
        plan = plan_engine(EngineOptions(model=str(folder), **options), environment)
        return plan.scheduler.long_prefill_token_threshold

    assert cap() == 1024
    assert cap(max_num_batched_tokens=65) == 32
    assert cap(long_prefill_token_threshold=0) == 0


def test_the_model_decides_its_length_when_nobody_else_does(folder, environment):
    plan = plan_engine(EngineOptions(model=str(folder)), environment)
    assert plan.worker.max_model_len == plan.scheduler.max_model_len == 128


def test_a_length_beyond_the_models_is_refused(folder, environment):
    """Positions past the trained ones give fluent nonsense, not an error."""
    with pytest.raises(ValueError, match=r"^max_model_len must be at most 128"):
        plan_engine(EngineOptions(model=str(folder), max_model_len=129), environment)


def test_a_stretched_rope_is_used_beyond_the_models_length_only_when_asked(folder, environment):
    """Dynamic RoPE turns otherwise from that length on, also for short prompts: nobody gets that unasked."""
    scaled = {**CONFIG, "rope_scaling": {"type": "dynamic", "factor": 2.0}}
    (folder / "config.json").write_text(json.dumps(scaled))
    plan = plan_engine(EngineOptions(model=str(folder)), environment)
    assert plan.worker.max_model_len == 128
    plan = plan_engine(EngineOptions(model=str(folder), max_model_len=256), environment)
    assert plan.worker.max_model_len == plan.scheduler.max_model_len == 256
    with pytest.raises(ValueError, match=r"^max_model_len must be at most 256"):
        plan_engine(EngineOptions(model=str(folder), max_model_len=257), environment)


def test_more_ranks_than_heads_are_refused(folder, environment):
    with pytest.raises(ValueError, match=r"^tensor_parallel_size must be in \[1, 4\], got 5"):
        plan_engine(EngineOptions(model=str(folder), tensor_parallel_size=5), environment)


def test_an_unknown_model_is_refused(environment):
    with pytest.raises(ValueError, match=r"^unknown model 'gpt-17'"):
        plan_engine(EngineOptions(model="gpt-17"), environment)


def test_the_environment_follows_the_xdg_rules():
    environment = Environment.read(
        {"XDG_CACHE_HOME": "/c", "XDG_STATE_HOME": "relative", "RAY_ADDRESS": ""}
    )
    assert environment.cache_home == Path("/c")
    assert environment.state_home == Path.home() / ".local" / "state"
    assert environment.ray_address is None
