"""How a model turns queries and keys by their positions: what config.json says of RoPE. Needs no torch.

What the numbers do is in `layers/rope_scaling.py`. Whatever would turn otherwise is refused here by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .architectures import Architecture
from .config_reader import ConfigReader, short


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearScaling:
    """Every position divided by factor."""

    factor: float


@dataclass(frozen=True, kw_only=True, slots=True)
class DynamicScaling:
    """A larger base beyond max_position tokens; below, nothing."""

    factor: float
    max_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Llama3Scaling:
    """Slow turns divided by factor, fast ones left alone, and a smooth way from one to the other."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True, slots=True)
class YarnScaling:
    """The same by another ramp (arXiv 2309.00071); cosines and sines are multiplied by attention_factor."""

    factor: float
    original_max_position: int
    attention_factor: float
    beta_fast: float
    beta_slow: float
    truncate: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LongRopeScaling:
    """Each turn divided by its own factor: one list up to original_max_position tokens, another beyond."""

    short_factors: tuple[float, ...]
    long_factors: tuple[float, ...]
    original_max_position: int
    attention_factor: float


Scaling = LinearScaling | DynamicScaling | Llama3Scaling | YarnScaling | LongRopeScaling


@dataclass(frozen=True, kw_only=True, slots=True)
class Rope:
    """One way to turn. rotary_fraction: the share of a head that turns, from its first item on."""

    theta: float = 10_000.0
    rotary_fraction: float = 1.0
    scaling: Scaling | None = None

    def rotary_dim(self, head_dim: int) -> int:
        """The items of a head that turn."""
        return int(head_dim * self.rotary_fraction)

    def reach(self, max_position: int) -> int:
        """Tokens up to which it makes sense, for a model of max_position_embeddings `max_position`."""
        if isinstance(self.scaling, DynamicScaling):
            return int(max_position * self.scaling.factor)
        if isinstance(self.scaling, YarnScaling):
            stretched = int(self.scaling.original_max_position * self.scaling.factor)
            return max(max_position, stretched)
        return max_position


def read_rope(
    reader: ConfigReader, architecture: Architecture, layer_type: str, head_dim: int
) -> Rope:
    """The RoPE of the layers of one type.

    Older configs say rope_theta (full layers), rope_local_base_freq (sliding ones, where these have their own RoPE) and
    rope_scaling (full layers); newer ones rope_parameters, with one object a layer type where types differ.
    Raises: ValueError naming the key for what rowcast does not compute.
    """
    own = architecture.sliding_rope_theta if layer_type == "sliding_attention" else None
    if own is not None:
        theta = reader.real("rope_local_base_freq", own)
    else:
        theta = reader.real("rope_theta", architecture.rope_theta)
    key, said = _said(reader, architecture, layer_type)
    said = {name: value for name, value in said.items() if value is not None}
    kind = said.get("rope_type", said.get("type", "default"))
    if kind == "su":  # Phi-3's first name for it
        kind = "longrope"
    if not isinstance(kind, str) or kind not in _KEYS:
        raise ValueError(
            f"{reader.where}: {key} asks for RoPE type {short(kind)}; rowcast supports {', '.join(_KEYS)}"
        )
    others = sorted(said.keys() - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if others and not {"rope_type", "type"} & said.keys():
        # Without a type a factor, or one object a layer kind, would be passed over in silence.
        raise ValueError(
            f"{reader.where}: {key} has {others[0]} and no rope_type; say which of {', '.join(_KEYS)} it is"
        )
    strange = [name for name in others if name not in _KEYS[kind]]
    if strange:
        raise ValueError(
            f"{reader.where}: {key} has {strange[0]}, which rowcast does not compute in RoPE type {kind}"
        )
    own_reader = ConfigReader(f"{reader.where}: {key}", said)
    rope = Rope(
        theta=own_reader.real("rope_theta", theta),
        rotary_fraction=_fraction(reader, own_reader, architecture),
    )
    rotary_dim = rope.rotary_dim(head_dim)
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise ValueError(
            f"{reader.where}: partial_rotary_factor {rope.rotary_fraction:g} of head_dim {head_dim} must give an even "
            f"number in [2, {head_dim}], got {rotary_dim}"
        )
    scaling = _SCALINGS[kind](reader, own_reader, rotary_dim) if kind in _SCALINGS else None
    return Rope(theta=rope.theta, rotary_fraction=rope.rotary_fraction, scaling=scaling)


def _said(
    reader: ConfigReader, architecture: Architecture, layer_type: str
) -> tuple[str, Mapping[str, Any]]:
    """What config.json says of a layer type's RoPE, beside its base, and the name of the place."""
    old = reader.object("rope_scaling")
    new = reader.object("rope_parameters")
    if architecture.sliding_rope_theta is None:
        if old and new and old != new:
            raise ValueError(
                f"{reader.where}: rope_scaling and rope_parameters say different things; keep one of them"
            )
        return ("rope_scaling", old) if old else ("rope_parameters", new)
    types = ("full_attention", "sliding_attention")
    strange = sorted(set(new) - set(types))
    if strange:
        raise ValueError(
            f"{reader.where}: rope_parameters must hold one object for each of {', '.join(types)}, got "
            f"{short(strange[0])}"
        )
    own = ConfigReader(f"{reader.where}: rope_parameters", new).object(layer_type)
    if old and layer_type == "full_attention":
        return "rope_scaling", {**own, **old}
    return f"rope_parameters.{layer_type}", own


def _fraction(reader: ConfigReader, own: ConfigReader, architecture: Architecture) -> float:
    if architecture.partial_rotary:
        return own.real("partial_rotary_factor", reader.real("partial_rotary_factor", 1.0))
    for place in (reader, own):
        place.refuse_unless("partial_rotary_factor", (None, 1, 1.0))
    return 1.0


def _original(reader: ConfigReader, own: ConfigReader) -> int:
    """The length before it was stretched, wherever it stands."""
    key = "original_max_position_embeddings"
    places = [place.size(key) for place in (reader, own) if place.values.get(key) is not None]
    if len(set(places)) > 1:
        raise ValueError(
            f"{own.where} has {key} {places[1]}, beside it stands {places[0]}; they must be equal"
        )
    return places[0] if places else reader.size("max_position_embeddings")


def _linear(reader: ConfigReader, own: ConfigReader, rotary_dim: int) -> LinearScaling:
    return LinearScaling(factor=own.real("factor"))


def _dynamic(reader: ConfigReader, own: ConfigReader, rotary_dim: int) -> DynamicScaling:
    return DynamicScaling(
        factor=own.real("factor"), max_position=reader.size("max_position_embeddings")
    )


def _llama3(reader: ConfigReader, own: ConfigReader, rotary_dim: int) -> Llama3Scaling:
    low, high = own.real("low_freq_factor"), own.real("high_freq_factor")
    if low >= high:
        raise ValueError(
            f"{own.where}: low_freq_factor {low:g} must be below high_freq_factor {high:g}"
        )
    return Llama3Scaling(
        factor=own.real("factor"),
        low_freq_factor=low,
        high_freq_factor=high,
        original_max_position=_original(reader, own),
    )


def _yarn(reader: ConfigReader, own: ConfigReader, rotary_dim: int) -> YarnScaling:
    factor = own.real("factor")

    def stretched(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    attention_factor = stretched(1.0)
    if {"mscale", "mscale_all_dim"} <= own.values.keys():
        attention_factor = stretched(own.real("mscale")) / stretched(own.real("mscale_all_dim"))
    return YarnScaling(
        factor=factor,
        original_max_position=_original(reader, own),
        attention_factor=own.real("attention_factor", attention_factor),
        beta_fast=own.real("beta_fast", 32.0),
        beta_slow=own.real("beta_slow", 1.0),
        truncate=own.flag("truncate", True),
    )


def _longrope(reader: ConfigReader, own: ConfigReader, rotary_dim: int) -> LongRopeScaling:
    original = _original(reader, own)
    factor = own.real("factor", reader.size("max_position_embeddings") / original)
    stretched = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return LongRopeScaling(
        short_factors=own.reals("short_factor", rotary_dim // 2),
        long_factors=own.reals("long_factor", rotary_dim // 2),
        original_max_position=original,
        attention_factor=own.real("attention_factor", stretched),
    )


_ORIGINAL = "original_max_position_embeddings"
# RoPE type -> the keys that it reads, beside those of all types
_KEYS: dict[str, frozenset[str]] = {
    "default": frozenset(),
    "linear": frozenset({"factor"}),
    "dynamic": frozenset({"factor"}),
    "llama3": frozenset({"factor", "low_freq_factor", "high_freq_factor", _ORIGINAL}),
    "yarn": frozenset(
        {"factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"}
        | {"truncate", _ORIGINAL}
    ),
    "longrope": frozenset({"factor", "short_factor", "long_factor", "attention_factor", _ORIGINAL}),
}
_SCALINGS: dict[str, Callable[[ConfigReader, ConfigReader, int], Scaling]] = {
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
}
