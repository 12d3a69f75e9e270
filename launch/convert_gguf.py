"""Turn one GGUF file of a Llama, Qwen or Gemma 3 model into an ordinary Hugging Face folder.

Owns the reading and the writing of `config.json`, `generation_config.json` and `model.safetensors`; what differs
between the architectures is in `gguf_families.py`, and the tokenizer's files come from `convert_tokenizer.py`. Reads
with the `gguf` package and NumPy alone: no torch (mapping the 135M model takes seconds; transformers wants accelerate,
half a minute and 1.6 GB, and then refuses to save the result). Knows nothing of caches, locks or atomic renames:
`model_cache.py` does.

Weights are saved as float32. A quantized value is `scale * code + offset` of two float16 numbers, which float32 holds
exactly but for the last bits, and bfloat16 or float16 would round away. It also is what a CPU computes in, so ranks map
the file and use it in place, and transformers and rowcast start from the same bits. The price is disk: 538 MB where
bfloat16 takes 269 MB. Whoever serves in half precision rounds once, at load.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, dequantize

from .convert_tokenizer import eos_token_ids, tokenizer_files
from .gguf_families import Family, family_of, tensor_shapes
from .gguf_header import check_gguf_header
from .gguf_metadata import Metadata
from .progress import Stage
from .settled import settle

_TOP_LEVEL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


def convert_gguf(gguf_path: Path, out_dir: Path, progress: Stage | None = None) -> None:
    """Write the model in `gguf_path` to `out_dir` in Hugging Face's form.

    Writes config.json, generation_config.json, model.safetensors, tokenizer.json, tokenizer_config.json and, when the
    model has one, chat_template.jinja; each file with mode 0644 and flushed to the disk. `out_dir` is made when it is
    missing. `progress` hears of the bytes of the weights. A call that fails or is interrupted may leave a part: callers
    who need all or nothing build in a temporary folder and rename.

    Raises: ValueError, one sentence, for a file that is not GGUF, is truncated, or holds a model of
        another architecture.
    """
    gguf_path, out_dir = Path(gguf_path), Path(out_dir)
    reader = read_gguf(gguf_path)
    metadata = Metadata(reader, gguf_path)
    family = family_of(metadata)
    config = family.config(metadata)
    names = _hugging_face_names(metadata, reader, family, config)

    texts = tokenizer_files(metadata)
    texts["config.json"] = _json(config)
    texts["generation_config.json"] = _json(
        {
            "bos_token_id": config["bos_token_id"],
            "eos_token_id": eos_token_ids(metadata),
            "pad_token_id": config["pad_token_id"],
        }
    )

    out_dir.mkdir(parents=True, exist_ok=True)
    for file_name, text in texts.items():
        with open(out_dir / file_name, "w", encoding="utf-8", newline="") as file:
            file.write(text)
            settle(file)
    _write_safetensors(out_dir / "model.safetensors", reader, names, family, config, progress)


def read_gguf(path: Path) -> GGUFReader:
    """Open a GGUF file and check that every tensor it announces lies inside it.

    Raises: ValueError for a missing, foreign, damaged or truncated file.
    """
    check_gguf_header(path)
    truncated = f"{path} is truncated or damaged ({path.stat().st_size} bytes are there, {{}}); download it again"
    try:
        reader = GGUFReader(path)
    except (ValueError, IndexError, KeyError, OverflowError) as error:
        # All lengths are right, so a value is wrong: a key twice, no UTF-8, tensor data that is not there.
        raise ValueError(truncated.format("the reader stumbles in them")) from error
    end = max((int(t.data_offset + t.n_bytes) for t in reader.tensors), default=0)
    if end > path.stat().st_size:
        raise ValueError(truncated.format(f"its tensors need {end}"))
    return reader


def _hugging_face_names(
    metadata: Metadata, reader: GGUFReader, family: Family, config: dict[str, Any]
) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF tensor name -> (Hugging Face name, shape), checked to be exactly the tensors that the model needs."""
    path = metadata.path
    expected = tensor_shapes(family, config)
    names: dict[str, tuple[str, tuple[int, ...]]] = {}
    for tensor in reader.tensors:
        name = _TOP_LEVEL_NAMES.get(tensor.name)
        layer = _LAYER_TENSOR.fullmatch(tensor.name)
        if layer and layer[2] in family.layer_names:
            name = f"model.layers.{layer[1]}.{family.layer_names[layer[2]]}.{layer[3]}"
        if name is None or name not in expected:
            raise ValueError(
                f"{path} holds the tensor {tensor.name!r}, which a {family.title} model does not have; "
                "give the model's Hugging Face folder instead"
            )
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if shape != expected[name]:
            raise ValueError(
                f"{path}: tensor {tensor.name!r} has shape {shape}, the metadata says {expected[name]}"
            )
        names[tensor.name] = (name, shape)
    missing = sorted(expected.keys() - {name for name, _ in names.values()})
    if missing:
        raise ValueError(
            f"{path} lacks {len(missing)} of the model's {len(expected)} tensors (first {missing[0]!r}); "
            "it may be one part of a split file: give the merged one"
        )
    return names


def _write_safetensors(
    path: Path,
    reader: GGUFReader,
    names: dict[str, tuple[str, tuple[int, ...]]],
    family: Family,
    config: dict[str, Any],
    progress: Stage | None,
) -> None:
    """Write the file tensor by tensor, so that memory holds one dequantized tensor and not the model.

    Format: 8 bytes little-endian header length, a JSON header (name -> dtype, shape, data offsets), the data.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for name, shape in names.values():
        num_bytes = int(np.prod(shape)) * 4
        header[name] = {
            "dtype": "F32",
            "shape": list(shape),
            "data_offsets": [offset, offset + num_bytes],
        }
        offset += num_bytes
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # The data starts at a multiple of 8.
    written = 0
    with open(path, "wb") as file:
        file.write(len(encoded).to_bytes(8, "little"))
        file.write(encoded)
        for tensor in reader.tensors:
            name, shape = names[tensor.name]
            weight = family.convert_weight(name, _dequantized(tensor, shape), config)
            weight = np.ascontiguousarray(weight, dtype="<f4")
            file.write(weight.data)
            written += weight.nbytes
            if progress is not None:
                progress(written, offset)
        settle(file)


def _dequantized(tensor: Any, shape: tuple[int, ...]) -> np.ndarray:
    try:
        weight = dequantize(tensor.data, GGMLQuantizationType(tensor.tensor_type))
    except NotImplementedError as error:
        raise ValueError(
            f"tensor {tensor.name!r} is stored as {tensor.tensor_type.name}, which the gguf package cannot read; "
            "use a file of another quantization"
        ) from error
    return np.asarray(weight, dtype=np.float32).reshape(shape)


def _json(values: dict[str, Any]) -> str:
    given = {key: value for key, value in values.items() if value is not None}
    return json.dumps(given, indent=2, ensure_ascii=False) + "\n"
