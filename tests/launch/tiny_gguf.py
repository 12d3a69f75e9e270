"""Write a .gguf file from plain values and arrays."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np

Quantize = Callable[[str], gguf.GGMLQuantizationType | None]
"""Tensor name -> how it is stored; None is float32."""


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "o r", "Ġw or", "l d", "Ġwor ld", "1 2"]
"""Of the tiny models' byte-level tokenizers."""


def write_gguf(
    path: Path,
    values: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    quantize: Quantize | None = None,
) -> Path:
    """Write metadata (a value of None is left out) and tensors; `values` must name general.architecture."""
    values = dict(values)
    writer = gguf.GGUFWriter(path, values.pop("general.architecture"))
    for key, value in values.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        elif value is not None:
            writer.add_array(key, value)
    for name, tensor in tensors.items():
        kind = quantize(name) if quantize else None
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
