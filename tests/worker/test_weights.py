"""Reading a shard: what is read, and each sentence for what is missing, damaged or would be ignored."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rowcast.tests.worker.generation import (
    generate,
    greedy,
    make_llama,
    make_runner,
    random_prompts,
    transformers_tokens,
)
from rowcast.worker.model_config import ModelConfig
from rowcast.worker.models.decoder import load_decoder
from rowcast.worker.models.weights import Checkpoint
from rowcast.worker.parallel import TensorParallelGroup
from safetensors import safe_open
from safetensors.torch import load_file, save_file


class Rank(TensorParallelGroup):
    """A rank that only loads: no process group behind it."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank = rank
        self.world_size = world_size


def load(folder: Path, rank: int = 0, world_size: int = 1, progress=None) -> int:
    """Load one rank's part; the bytes it read."""
    with Checkpoint(folder) as checkpoint:
        load_decoder(
            ModelConfig.from_folder(folder),
            checkpoint,
            parallel=Rank(rank, world_size),
            max_model_len=32,
            dtype=torch.float32,
            device=torch.device("cpu"),
            progress=progress,
        )
        return checkpoint.bytes_read


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_llama(tmp_path, num_hidden_layers=3, attention_bias=True)


def rewrite(folder: Path, change) -> None:
    """Change the tensors of a one-file checkpoint."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def split_into(folder: Path, num_files: int) -> None:
    """The same checkpoint in several files with an index, as large models come."""
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for part in range(num_files):
        names = sorted(tensors)[part::num_files]
        file = f"model-{part + 1:05}-of-{num_files:05}.safetensors"
        save_file({name: tensors[name] for name in names}, folder / file)
        weight_map.update(dict.fromkeys(names, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_ranks_read_their_share_and_no_more(folder: Path):
    """Reading whole tensors and cutting them afterwards costs every rank the whole model's bytes."""
    whole = load(folder)
    with safe_open(folder / "model.safetensors", "pt") as file:
        stored = sum(file.get_tensor(name).nbytes for name in file.keys())  # noqa: SIM118
        replicated = sum(
            file.get_tensor(name).nbytes
            for name in file.keys()  # noqa: SIM118
            if "norm" in name or name.endswith("o_proj.bias")
        )
    assert whole == stored
    for world_size in (2, 3):
        read = [load(folder, rank, world_size) for rank in range(world_size)]
        # 2 KV heads on 3 ranks: one is held twice, its K and V rows and their biases
        shared = 0 if world_size == 2 else 3 * 2 * 16 * (64 + 1) * 4
        assert sum(read) == stored + (world_size - 1) * replicated + shared
        assert max(read) - min(read) <= 2 * 64 * 4 * 2


def test_progress_grows_to_one(folder: Path):
    shares: list[float] = []
    load(folder, progress=shares.append)
    assert shares == sorted(shares)
    assert shares[0] > 0
    assert shares[-1] == 1.0
    assert len(shares) > 3


def test_a_checkpoint_in_several_files_loads_as_one(folder: Path):
    prompts = random_prompts(3, vocab_size=199)
    expected = generate(make_runner(folder), prompts, greedy(6))
    split_into(folder, 4)
    assert generate(make_runner(folder), prompts, greedy(6)) == expected
    (folder / "model.safetensors.index.json").unlink()  # the files say themselves what they hold
    assert generate(make_runner(folder), prompts, greedy(6)) == expected


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit_checkpoints_are_widened(tmp_path: Path, dtype: torch.dtype):
    folder = make_llama(tmp_path)

    def narrowed(tensors):
        for name in tensors:
            tensors[name] = tensors[name].to(dtype)

    rewrite(folder, narrowed)
    narrow = generate(make_runner(folder), [[1, 2, 3]], greedy(6))

    def to_float32(tensors):
        for name in tensors:
            tensors[name] = tensors[name].float()

    rewrite(folder, to_float32)
    assert generate(make_runner(folder), [[1, 2, 3]], greedy(6)) == narrow


def test_a_missing_tensor_is_named(folder: Path):
    rewrite(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ValueError, match=r"lack the tensor model\.layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_of_another_shape_is_named_with_both_shapes(folder: Path):
    def cut(tensors):
        name = "model.layers.2.self_attn.k_proj.weight"
        tensors[name] = tensors[name][:-1].contiguous()

    rewrite(folder, cut)
    with pytest.raises(
        ValueError, match=r"k_proj.weight must have shape \(32, 64\).*got \(31, 64\)"
    ):
        load(folder)


def test_a_tensor_that_nobody_computes_with_is_refused(folder: Path):
    """A q/k norm or a bias that config.json does not mention would be left out without a word."""
    rewrite(
        folder,
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(16)}),
    )
    with pytest.raises(ValueError, match=r"q_norm\.weight belongs to no part of the architecture"):
        load(folder)


def test_a_stored_head_beside_a_tied_embedding_counts_if_it_differs(tmp_path: Path):
    """transformers unties them, and says so: the folder was trained further, and its config.json not mended."""
    folder = make_llama(tmp_path, tie_word_embeddings=True)
    embedding: list[torch.Tensor] = []

    def add_head(tensors):
        embedding.append(tensors["model.embed_tokens.weight"])
        tensors["lm_head.weight"] = embedding[0].clone()

    expected = generate(make_runner(folder), [[1, 2, 3]], greedy(6))
    rewrite(folder, add_head)
    assert generate(make_runner(folder), [[1, 2, 3]], greedy(6)) == expected
    rewrite(folder, lambda tensors: tensors.update({"lm_head.weight": embedding[0].flip(0)}))
    expected = transformers_tokens(folder, [[1, 2, 3]], 6)
    assert generate(make_runner(folder), [[1, 2, 3]], greedy(6)) == expected


def test_other_forms_of_the_weights_beside_model_safetensors_are_passed_over(folder: Path):
    """Some folders hold the same weights a second time, under the names of the program that trained them."""
    save_file({"layers.0.attention.wq.weight": torch.ones(2)}, folder / "consolidated.safetensors")
    load(folder)


def test_two_files_with_one_tensor_and_no_index_are_named(folder: Path):
    """Which is the newer nobody can tell."""
    whole = folder / "model.safetensors"
    save_file({"model.norm.weight": torch.ones(64)}, folder / "b.safetensors")
    whole.rename(folder / "a.safetensors")
    with pytest.raises(
        ValueError, match=r"a\.safetensors and \S+b\.safetensors both hold .*norm\.weight"
    ):
        load(folder)


def test_an_index_beside_a_whole_file_that_it_does_not_name_is_refused(folder: Path):
    whole = (folder / "model.safetensors").read_bytes()
    split_into(folder, 2)
    (folder / "model.safetensors").write_bytes(whole)
    with pytest.raises(ValueError, match=r"index\.json that does not name it; remove the one"):
        load(folder)


def test_a_tensor_that_the_index_leaves_out_is_still_refused_if_nobody_reads_it(folder: Path):
    split_into(folder, 2)
    shard = folder / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    save_file({**tensors, "model.layers.0.self_attn.q_norm.weight": torch.ones(16)}, shard)
    with pytest.raises(ValueError, match=r"q_norm\.weight belongs to no part of the architecture"):
        load(folder)


def test_an_unknown_dtype_is_named(folder: Path):
    def to_int8(tensors):
        name = "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].to(torch.int8)

    rewrite(folder, to_int8)
    with pytest.raises(ValueError, match=r"down_proj\.weight has dtype I8"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_a_truncated_file_is_named(folder: Path, keep):
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[: int(keep * len(whole)) if keep < 1 else keep])
    with pytest.raises(ValueError, match=r"model\.safetensors is truncated or damaged") as caught:
        load(folder)
    assert "\n" not in str(caught.value)


def test_a_file_that_the_index_names_and_nobody_downloaded_is_named(folder: Path):
    split_into(folder, 3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ValueError, match=r"lacks the file model-00002-of-00003\.safetensors"):
        load(folder)


def test_a_tensor_that_the_index_promises_elsewhere_is_named(folder: Path):
    split_into(folder, 3)
    index = folder / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = "model-00001-of-00003.safetensors"
    values["weight_map"]["model.embed_tokens.weight"] = "model-00002-of-00003.safetensors"
    index.write_text(json.dumps(values))
    with pytest.raises(
        ValueError, match=r"lacks the tensor model\.\S+ that model\.safetensors\.index"
    ):
        load(folder)


@pytest.mark.parametrize("text", ["{", "{}", '{"weight_map": 3}'])
def test_a_garbled_index_gets_a_sentence(folder: Path, text):
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match="must hold a weight_map"):
        load(folder)


def test_a_folder_without_weights_gets_a_sentence(folder: Path):
    (folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"has no \*\.safetensors file"):
        load(folder)
