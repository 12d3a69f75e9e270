"""What sets one attention layer apart from another: what it can see, and by which base it turns positions.

Owns the parts of config.json that differ from layer to layer: layer_types, window, RoPE.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..scheduler.kv_groups import AttentionKind
from .architectures import Architecture
from .config_reader import ConfigReader, short

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """One layer's attention.

    Units: window is tokens, as in KVGroupSpec: 0 for full attention, the keys seen including the token itself for a
    sliding window, the chunk's length for chunked attention.
    """

    attention: AttentionKind = AttentionKind.FULL
    window: int = 0
    rope_theta: float = 10_000.0


def read_layer_kinds(reader: ConfigReader, architecture: Architecture) -> tuple[LayerKind, ...]:
    """The kind of every layer, in the model's order.

    Raises: ValueError naming the key for a layer type or a RoPE that rowcast does not compute for the architecture.
    """
    kinds: dict[str, LayerKind] = {}
    types = _layer_types(reader, architecture)
    for name in dict.fromkeys(
        types
    ):  # each once, in order: a set's order would choose which error is told
        sliding = name == _SLIDING
        kinds[name] = LayerKind(
            attention=AttentionKind.SLIDING_WINDOW if sliding else AttentionKind.FULL,
            window=reader.size("sliding_window") if sliding else 0,
            rope_theta=_theta(reader, architecture, name),
        )
    return tuple(kinds[name] for name in types)


def _layer_types(reader: ConfigReader, architecture: Architecture) -> list[str]:
    num_layers = reader.size("num_hidden_layers")
    types = reader.values.get("layer_types")
    if types is None:
        if _SLIDING not in architecture.thetas:
            return [_FULL] * num_layers
        every = reader.size("sliding_window_pattern")  # each so-manieth layer sees everything
        return [_SLIDING if (layer + 1) % every else _FULL for layer in range(num_layers)]
    allowed = tuple(architecture.thetas)
    strange = (
        [name for name in types if name not in allowed] if isinstance(types, list) else [types]
    )
    if strange:
        raise ValueError(
            f"{reader.where}: layer_types has {short(strange[0])}; rowcast supports {' and '.join(allowed)} layers "
            "of this architecture so far"
        )
    if len(types) != num_layers:
        raise ValueError(
            f"{reader.where}: layer_types must name all {num_layers} layers of num_hidden_layers, got {len(types)}"
        )
    return types


def _theta(reader: ConfigReader, architecture: Architecture, layer_type: str) -> float:
    """The base of a layer type's default RoPE.

    Older configs say rope_theta (full layers), rope_local_base_freq (sliding ones) and rope_scaling (full layers);
    newer ones rope_parameters, with one object a layer type where an architecture has several.
    """
    own_base = "rope_local_base_freq" if layer_type == _SLIDING else "rope_theta"
    theta = reader.real(own_base, architecture.thetas[layer_type])
    if layer_type == _FULL:
        theta = _default_rope(reader, "rope_scaling", reader.object("rope_scaling"), theta)
    rope, key = reader.object("rope_parameters"), "rope_parameters"
    if len(architecture.thetas) > 1:
        strange = sorted(set(rope) - set(architecture.thetas))
        if strange:
            raise ValueError(
                f"{reader.where}: rope_parameters must hold one object for each of "
                f"{', '.join(architecture.thetas)}, got {short(strange[0])}"
            )
        rope, key = (
            ConfigReader(f"{reader.where}: rope_parameters", rope).object(layer_type),
            (f"rope_parameters.{layer_type}"),
        )
    return _default_rope(reader, key, rope, theta)


def _default_rope(reader: ConfigReader, key: str, rope: Mapping[str, Any], theta: float) -> float:
    """One object's base, `theta` if it names none. Raises: ValueError if it asks for anything but default RoPE."""
    if not rope:
        return theta
    others = sorted(set(rope) - {"rope_theta", "partial_rotary_factor"})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        raise ValueError(
            f"{reader.where}: {key} asks for RoPE type {short(kind)}; rowcast supports default so far"
        )
    if others and not {"rope_type", "type"} & rope.keys():
        # Without a type a factor, or one object a layer kind, would be passed over in silence.
        raise ValueError(
            f"{reader.where}: {key} has {others[0]} and no rope_type; rowcast supports default RoPE so far"
        )
    own = ConfigReader(reader.where, rope)
    own.refuse_unless("partial_rotary_factor", (None, 1, 1.0))
    return own.real("rope_theta", theta)
