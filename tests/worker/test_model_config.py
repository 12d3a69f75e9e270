"""What a model folder says, and each sentence for what rowcast cannot run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rowcast.scheduler.kv_groups import AttentionKind
from rowcast.worker.architectures import QKNorm
from rowcast.worker.layer_groups import group_specs
from rowcast.worker.layer_kinds import LayerKind
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.rope import Rope

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "eos_token_id": 2,
}

# What Gemma 3's early folders say; the rest is transformers' default for the class.
GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 48,
    "intermediate_size": 90,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "sliding_window": 32,
    "sliding_window_pattern": 2,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def folder_with(path: Path, base: dict = LLAMA, generation: dict | None = None, **changes) -> Path:
    values = {key: value for key, value in {**base, **changes}.items() if value != "absent"}
    (path / "config.json").write_text(json.dumps(values))
    if generation is not None:
        (path / "generation_config.json").write_text(json.dumps(generation))
    return path


def test_sizes_and_defaults_come_from_config_json(tmp_path: Path):
    config = ModelConfig.from_folder(folder_with(tmp_path))
    assert (config.num_layers, config.num_heads, config.num_kv_heads) == (2, 6, 3)
    assert config.head_dim == 48 // 6
    assert config.layers == (LayerKind(rope=Rope(theta=10000.0)),) * 2
    assert config.attention_scale == 8**-0.5
    assert config.activation == "silu"
    assert config.embedding_scale == 1.0
    assert config.qk_norm is QKNorm.NONE
    assert (config.pre_norms, config.post_norms, config.offset_norms) == (True, False, False)
    assert not config.tie_word_embeddings
    assert not config.qkv_bias
    assert not config.output_bias
    assert config.torch_dtype == "float32"
    absent = folder_with(
        tmp_path, num_key_value_heads="absent", head_dim=10, torch_dtype="bfloat16"
    )
    config = ModelConfig.from_folder(absent)
    assert (config.num_kv_heads, config.head_dim, config.torch_dtype) == (6, 10, "bfloat16")


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 500.0},
        {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}},
        {"rope_theta": 500.0, "rope_scaling": {"type": "default"}},
        {"rope_theta": 500.0, "rope_scaling": None},
    ],
    ids=str,
)
def test_the_rope_base_is_found_where_old_and_new_configs_put_it(tmp_path: Path, said):
    config = ModelConfig.from_folder(folder_with(tmp_path, **said))
    assert [layer.rope for layer in config.layers] == [Rope(theta=500.0)] * 2


def window(length: int, theta: float = 10_000.0) -> LayerKind:
    return LayerKind(attention=AttentionKind.SLIDING_WINDOW, window=length, rope=Rope(theta=theta))


def test_gemmas_defaults_are_those_of_its_class_in_transformers(tmp_path: Path):
    """Published folders leave keys out: an untied head, or another head_dim, would load and talk nonsense."""
    config = ModelConfig.from_folder(folder_with(tmp_path, GEMMA))
    full = LayerKind(rope=Rope(theta=1e6))
    assert config.layers == (window(32), full) * 2
    assert config.head_dim == 256
    assert config.attention_scale == 256**-0.5
    assert config.embedding_scale == 48**0.5
    assert config.activation == "gelu_pytorch_tanh"
    assert config.tie_word_embeddings
    assert config.qk_norm is QKNorm.HEAD
    assert config.pre_norms
    assert config.post_norms
    assert config.offset_norms
    assert config.eos_token_ids == (1,)
    rare = folder_with(tmp_path, GEMMA, sliding_window="absent", sliding_window_pattern="absent")
    assert ModelConfig.from_folder(rare).layers == (window(4096),) * 4  # each sixth would be full


@pytest.mark.parametrize(
    "said",
    [
        {"rope_theta": 500.0, "rope_local_base_freq": 50.0, "rope_scaling": None},
        {
            "rope_parameters": {
                FULL: {"rope_type": "default", "rope_theta": 500.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            }
        },
        {"rope_theta": 500.0, "rope_parameters": {FULL: None, SLIDING: {"rope_theta": 50.0}}},
    ],
    ids=["old", "new", "mixed"],
)
def test_sliding_layers_have_their_own_rope_base(tmp_path: Path, said):
    types = [FULL, SLIDING, SLIDING, FULL]
    config = ModelConfig.from_folder(
        folder_with(tmp_path, GEMMA, layer_types=types, query_pre_attn_scalar=168, **said)
    )
    full, sliding = LayerKind(rope=Rope(theta=500.0)), window(32, 50.0)
    assert config.layers == (full, sliding, sliding, full)
    assert config.attention_scale == 168**-0.5


def of(architecture: str, **changes) -> dict:
    """LLAMA under another name."""
    return {**LLAMA, "architectures": [f"{architecture}ForCausalLM"], **changes}


@pytest.mark.parametrize(
    ("base", "windows"),
    [
        (of("Mistral"), [4096] * 2),
        (of("Mistral", sliding_window=None), [0] * 2),
        (of("Phi3"), [0] * 2),
        (of("Phi3", sliding_window=9), [9] * 2),
        (of("Qwen2", sliding_window=9, use_sliding_window=False, max_window_layers=0), [0] * 2),
        (of("Qwen2", sliding_window=9, use_sliding_window=True, max_window_layers=1), [0, 9]),
        (of("Qwen2", use_sliding_window=True, max_window_layers=2), [0] * 2),
        (of("Qwen3", use_sliding_window=True, layer_types=[SLIDING, FULL]), [4096, 0]),
        (of("SmolLM3", use_sliding_window=True, sliding_window=5, no_rope_layers=[0, 1]), [5, 0]),
        (of("SmolLM3", sliding_window=5, no_rope_layers=[0, 1]), [0] * 2),
        (of("Gemma2", num_key_value_heads=3), [4096, 0]),
        (of("Gemma2", layer_types=[FULL, FULL], num_key_value_heads=3), [0] * 2),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else str(value),
)
def test_which_layers_see_a_window(tmp_path: Path, base, windows):
    """Qwen2 folders name a window that use_sliding_window turns off; Mistral's and Phi3's is every layer's."""
    config = ModelConfig.from_folder(folder_with(tmp_path, base))
    assert [layer.window for layer in config.layers] == windows


def test_layers_without_rope_are_each_fourth_or_those_that_are_named(tmp_path: Path):
    base = of("SmolLM3", num_hidden_layers=5)
    turns = [
        layer.rope is not None
        for layer in ModelConfig.from_folder(folder_with(tmp_path, base)).layers
    ]
    assert turns == [True, True, True, False, True]
    named = folder_with(tmp_path, base, no_rope_layers=[0, 1, 1, 0, 0])
    turns = [layer.rope is not None for layer in ModelConfig.from_folder(named).layers]
    assert turns == [False, True, True, False, False]


def test_gemmas_first_folders_mean_the_tanh_approximation(tmp_path: Path):
    config = ModelConfig.from_folder(folder_with(tmp_path, of("Gemma", hidden_act="gelu")))
    assert config.activation == "gelu_pytorch_tanh"


def test_biases_scales_and_caps_are_where_each_architecture_has_them(tmp_path: Path):
    qwen = ModelConfig.from_folder(folder_with(tmp_path, of("Qwen2")))
    assert (qwen.qkv_bias, qwen.output_bias) == (True, False)
    qwen3 = ModelConfig.from_folder(folder_with(tmp_path, of("Qwen3", attention_bias=True)))
    assert (qwen3.qkv_bias, qwen3.output_bias, qwen3.head_dim) == (True, True, 128)
    stable = of("StableLm", use_qkv_bias=True, qk_layernorm=True, layer_norm_eps=0.25)
    stablelm = ModelConfig.from_folder(folder_with(tmp_path, stable))
    assert (stablelm.qkv_bias, stablelm.output_bias) == (True, False)
    assert (stablelm.qk_norm, stablelm.norm_eps) == (QKNorm.EACH_HEAD, 0.25)
    assert stablelm.layers[0].rope == Rope(rotary_fraction=0.25)
    gemma = ModelConfig.from_folder(folder_with(tmp_path, of("Gemma2", num_key_value_heads=3)))
    assert (gemma.attention_softcap, gemma.logits_softcap) == (50.0, 30.0)
    assert gemma.attention_scale == 256**-0.5
    granite = ModelConfig.from_folder(folder_with(tmp_path, of("Granite", logits_scaling=8)))
    assert (granite.attention_scale, granite.logits_divisor) == (1.0, 8.0)
    olmo = ModelConfig.from_folder(folder_with(tmp_path, of("Olmo2")))
    assert (olmo.pre_norms, olmo.post_norms, olmo.qk_norm) == (False, True, QKNorm.ALL_HEADS)


@pytest.mark.parametrize(
    ("base", "named"),
    [
        (of("Mistral", layer_types=[FULL, SLIDING]), 'layer_types has "full_attention"'),
        (of("Mistral", attention_bias=True), "attention_bias = true"),
        (of("Qwen2", layer_types=[FULL, SLIDING]), 'layer_types has "sliding_attention"'),
        (of("Qwen2", query_pre_attn_scalar=4), "query_pre_attn_scalar = 4"),
        (of("Qwen3", max_window_layers=-1, use_sliding_window=True), "max_window_layers must be"),
        (of("SmolLM3", no_rope_layers=[1, 2]), "no_rope_layers must be a list of 2 numbers 0 or 1"),
        (of("SmolLM3", no_rope_layers=[1]), "no_rope_layers must be a list of 2 numbers 0 or 1"),
        (of("Granite", attention_multiplier=0), "attention_multiplier must be a number above 0"),
        (of("Gemma2", attn_logit_softcapping=-1.0), "attn_logit_softcapping must be a number"),
        (of("Phi3", partial_rotary_factor=1.5), "must give an even number in [2, 8], got 12"),
        (of("StableLm", partial_rotary_factor=0.2), "must give an even number in [2, 8], got 1"),
        (of("Olmo2", clip_qkv=8.0), "clip_qkv = 8.0"),
        (of("Olmo3", sliding_window_pattern=2), "sliding_window_pattern = 2"),
        (of("Olmo3", rope_local_base_freq=50.0), "rope_local_base_freq = 50.0"),
        (of("Llama", use_parallel_residual=True), "use_parallel_residual = true"),
        (of("Llama", use_sliding_window=True), "use_sliding_window = true"),
    ],
    ids=lambda value: value["architectures"][0] if isinstance(value, dict) else value,
)
def test_what_an_architecture_does_not_compute_is_refused_by_name(tmp_path: Path, base, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        ModelConfig.from_folder(folder_with(tmp_path, base))
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)


def test_eos_ids_are_those_of_both_files(tmp_path: Path):
    """A chat model's end of turn is often in generation_config.json alone, and the text ran on past it."""
    folder = folder_with(tmp_path, generation={"eos_token_id": [7, 2]}, eos_token_id=2)
    assert ModelConfig.from_folder(folder).eos_token_ids == (7, 2)
    folder = folder_with(tmp_path, generation={}, eos_token_id=[5, 6])
    assert ModelConfig.from_folder(folder).eos_token_ids == (5, 6)
    folder = folder_with(tmp_path, generation={}, eos_token_id=None)
    assert ModelConfig.from_folder(folder).eos_token_ids == ()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architecture MambaForCausalLM is not"),
        ({"architectures": "absent"}, "architecture nothing"),
        (
            {"rope_scaling": {"rope_type": "proportional", "factor": 8.0}},
            'rope_scaling asks for RoPE type "proportional"; rowcast supports default, linear',
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, 'asks for RoPE type ["yarn"]'),
        (
            {"rope_parameters": {"rope_type": "yarn"}},
            "rope_parameters: factor must be a number above 0, got nothing",
        ),
        (
            {"rope_scaling": {"type": "linear", "factor": 2.0, "mrope_section": [1]}},
            "rope_scaling has mrope_section, which rowcast does not compute in RoPE type linear",
        ),
        (
            {
                "rope_scaling": {"type": "linear", "factor": 2.0},
                "rope_parameters": {"rope_theta": 5.0},
            },
            "rope_scaling and rope_parameters say different things",
        ),
        (
            {
                "rope_scaling": {
                    "type": "llama3",
                    "factor": 8.0,
                    "low_freq_factor": 4.0,
                    "high_freq_factor": 4.0,
                }
            },
            "low_freq_factor 4 must be below high_freq_factor 4",
        ),
        (
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [1.0]}},
            "long_factor must be a list of 4 numbers above 0, got [1.0]",
        ),
        (
            {
                "original_max_position_embeddings": 8,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 8.0,
                    "original_max_position_embeddings": 16,
                },
            },
            "rope_scaling has original_max_position_embeddings 16, beside it stands 8",
        ),
        ({"rope_scaling": {"factor": 8.0}}, "rope_scaling has factor and no rope_type"),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "yarn", "factor": 4.0}}},
            "rope_parameters has full_attention and no rope_type",
        ),
        ({"compression_config": {"format": "int4"}}, "quantized (compressed-tensors)"),
        ({"compression_config": 4}, "compression_config = 4"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor = 0.5"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor = 0.25"),
        ({"sliding_window": 4096}, "sliding_window = 4096"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, 'layer_types has "sliding_att'),
        ({"hidden_act": "gelu"}, 'hidden_act = "gelu"'),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantized (gptq, 4 bits)"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantized (awq)"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantized (fp8)"),
        (
            {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {}}},
            "quantized (compressed-tensors)",
        ),
        ({"quantization_config": {"config_groups": {}}}, "quantized (compressed-tensors)"),
        ({"quantization_config": {"quant_method": "bitsandbytes"}}, "quantized (bitsandbytes)"),
        ({"quantization_config": {"load_in_8bit": True}}, "quantized (bitsandbytes)"),
        ({"quantization_config": {}}, "quantization_config = {}"),
        ({"num_local_experts": 8}, "num_local_experts = 8"),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"logits_scaling": 8.0}, "logits_scaling = 8.0"),
        ({"num_key_value_heads": 4}, "num_attention_heads 6 must be a multiple"),
        ({"hidden_size": 49}, "head_dim is missing"),
        ({"head_dim": 7}, "head_dim must be even"),
        ({"vocab_size": 0}, "vocab_size must be an integer, at least 1, got 0"),
        ({"vocab_size": 2**31}, "vocab_size must be below 2**31, got 2147483648"),
        ({"rms_norm_eps": 10**400}, "rms_norm_eps must be a number above 0, got 1000"),
        ({"vocab_size": "absent"}, "vocab_size must be an integer, at least 1, got nothing"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, at least 1, got true"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number above 0"),
        ({"attention_bias": "yes"}, "attention_bias must be true or false"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype must be one of float32, bfloat16, float16"),
        ({"eos_token_id": 100}, "eos_token_id must name ids in [0, 100), got 100"),
        ({"eos_token_id": [1, -1]}, "eos_token_id must name ids in [0, 100), got -1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_be_ignored_is_refused_by_name(tmp_path: Path, changes, named):
    """A feature of config.json that is silently left out gives plausible wrong text."""
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        ModelConfig.from_folder(folder_with(tmp_path, **changes))
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"layer_types": [FULL, SLIDING, "chunked_attention", FULL]}, 'layer_types has "chunked_'),
        (
            {"layer_types": [FULL, SLIDING]},
            "layer_types must name all 4 layers of num_hidden_layers",
        ),
        ({"layer_types": SLIDING}, 'layer_types has "sliding_attention"'),
        ({"sliding_window": None}, "sliding_window must be an integer, at least 1, got nothing"),
        ({"sliding_window": 0}, "sliding_window must be an integer, at least 1, got 0"),
        ({"sliding_window_pattern": 0}, "sliding_window_pattern must be an integer, at least 1"),
        ({"hidden_activation": "gelu"}, 'hidden_activation = "gelu"'),
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping = 30.0"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping = 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention = true"),
        ({"query_pre_attn_scalar": 0}, "query_pre_attn_scalar must be a number above 0"),
        ({"rope_local_base_freq": -1}, "rope_local_base_freq must be a number above 0, got -1"),
        (
            {"rope_parameters": {FULL: {"rope_type": "linear"}}},
            "rope_parameters.full_attention: factor must be a number above 0, got nothing",
        ),
        (
            {"rope_parameters": {SLIDING: {"factor": 8.0}}},
            "rope_parameters.sliding_attention has factor and no rope_type",
        ),
        (
            {"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}},
            "rope_parameters must hold one object for each of full_attention, sliding_attention",
        ),
        ({"rope_parameters": {SLIDING: 5}}, "rope_parameters: sliding_attention must be an object"),
        ({"rope_parameters": [1]}, "rope_parameters must be an object, got [1]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_gemma_may_not_say_is_refused_by_name(tmp_path: Path, changes, named):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is compared below
        ModelConfig.from_folder(folder_with(tmp_path, GEMMA, **changes))
    assert named in str(caught.value)
    assert "config.json" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("file", "method"),
    [
        ("quantize_config.json", "gptq"),
        ("quant_config.json", "awq"),
        ("hf_quant_config.json", "modelopt"),
    ],
)
def test_a_file_beside_config_json_says_it_too(tmp_path: Path, file: str, method: str):
    """Older folders of quantized weights have an ordinary config.json, and tensors that it does not speak of."""
    folder = folder_with(tmp_path)
    (folder / file).write_text("{}")
    with pytest.raises(ValueError, match=rf"{file}: the weights are quantized \({method}\)"):
        ModelConfig.from_folder(folder)


KEYS = sorted(
    {*LLAMA, *GEMMA}
    | {"layer_types", "head_dim", "rope_theta", "rope_local_base_freq", "rope_scaling", "dtype"}
    | {"rope_parameters", "hidden_activation", "query_pre_attn_scalar", "tie_word_embeddings"}
    | {"sliding_window", "quantization_config", "final_logit_softcapping", "mlp_bias"}
)
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-2, 40)
    | st.floats()
    | st.sampled_from([10**400, -(10**400), "", "silu", "default", FULL, SLIDING])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from([FULL, SLIDING, "rope_type", "type", "rope_theta", "factor"]), inner
        )
    ),
    max_leaves=4,
)


@settings(max_examples=300, deadline=None)
@given(base=st.sampled_from([LLAMA, GEMMA]), changes=st.dictionaries(st.sampled_from(KEYS), VALUES))
def test_whatever_a_key_holds_is_taken_or_refused_in_one_line(tmp_path_factory, base, changes):
    """A list where a number stood once ended in a TypeError of Python's."""
    folder = folder_with(tmp_path_factory.mktemp("model"), base, **changes)
    refusal = None
    try:
        config = ModelConfig.from_folder(folder)
    except ValueError as error:
        refusal = str(error)
    if refusal is not None:
        assert "config.json" in refusal
        assert "\n" not in refusal
    else:
        assert len(config.layers) == config.num_layers >= 1
        assert config.num_heads % config.num_kv_heads == 0
        assert 0 < config.attention_scale < float("inf")
        assert group_specs(config, 16)


@pytest.mark.parametrize(
    ("text", "named"),
    [(None, "cannot read"), ("{", "is not JSON"), ("[1]", "must hold a JSON object, got list")],
)
def test_a_missing_or_garbled_config_gets_a_sentence(tmp_path: Path, text, named):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_folder(tmp_path)
