"""Checkpoints whose weights are stored quantized: refused by the name of what they are quantized with.

Owns the places where that is said. None is read yet: the first to be becomes a module of its own and leaves this one.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Files of folders that say it beside config.json alone.
_BESIDE = {
    "quantize_config.json": "gptq",
    "quant_config.json": "awq",
    "hf_quant_config.json": "modelopt",
}
_KEYS = ("quantization_config", "compression_config")


def refuse_quantized(config_path: Path, values: Mapping[str, Any]) -> None:
    """values: what config.json holds; a key that says nothing of a method is left to whoever checks the other keys.

    Raises: ValueError naming file and method.
    """
    for key in _KEYS:
        said = values.get(key)
        method = _method(key, said) if isinstance(said, Mapping) else None
        if method is not None:
            raise ValueError(_sentence(config_path, method))
    for name, method in _BESIDE.items():
        if (config_path.parent / name).is_file():
            raise ValueError(_sentence(config_path.parent / name, method))


def _method(key: str, said: Mapping[str, Any]) -> str | None:
    method = said.get("quant_method")
    if isinstance(method, str) and method:
        bits = said.get("bits")
        return f"{method:.40}, {bits} bits" if isinstance(bits, int) else f"{method:.40}"
    if said.get("load_in_4bit") or said.get("load_in_8bit"):
        return "bitsandbytes"
    if key == "compression_config" or "config_groups" in said:
        return "compressed-tensors"
    return None


def _sentence(path: Path, method: str) -> str:
    return (
        f"{path}: the weights are quantized ({method}), which rowcast does not read yet; "
        "give the model's unquantized folder, or a .gguf file of it"
    )
