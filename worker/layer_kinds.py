"""What sets one attention layer apart from another: what it can see, and how it turns positions.

Owns the parts of config.json that differ from layer to layer: layer_types, windows, layers without RoPE.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..scheduler.kv_groups import AttentionKind
from .architectures import Architecture, Windows
from .config_reader import ConfigReader, short
from .rope import Rope, read_rope

_FULL, _SLIDING = "full_attention", "sliding_attention"


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerKind:
    """One layer's attention. rope: None where positions do not turn.

    Units: window is tokens, as in KVGroupSpec: 0 for full attention, the keys seen including the token itself for a
    sliding window, the chunk's length for chunked attention.
    """

    attention: AttentionKind = AttentionKind.FULL
    window: int = 0
    rope: Rope | None = field(default_factory=Rope)


def read_layer_kinds(
    reader: ConfigReader, architecture: Architecture, head_dim: int
) -> tuple[LayerKind, ...]:
    """The kind of every layer, in the model's order.

    Raises: ValueError naming the key for a layer type or a RoPE that rowcast does not compute for the architecture.
    """
    turns = _turns(reader, architecture)
    types = _layer_types(reader, architecture, turns)
    window = _window(reader, architecture) or 0
    # Each type once, in order: a set's order would choose which error is told.
    ropes = {name: read_rope(reader, architecture, name, head_dim) for name in dict.fromkeys(types)}
    return tuple(
        LayerKind(
            attention=AttentionKind.SLIDING_WINDOW if name == _SLIDING else AttentionKind.FULL,
            window=window if name == _SLIDING else 0,
            rope=ropes[name] if turn else None,
        )
        for name, turn in zip(types, turns, strict=True)
    )


def _turns(reader: ConfigReader, architecture: Architecture) -> list[bool]:
    """By layer, whether it has RoPE."""
    num_layers = reader.size("num_hidden_layers")
    if "no_rope_layers" not in architecture.computes:
        return [True] * num_layers
    said = reader.values.get("no_rope_layers")  # 1 for a layer with RoPE, whatever the name says
    if said is None:
        every = reader.size("no_rope_layer_interval")
        return [bool((layer + 1) % every) for layer in range(num_layers)]
    if not isinstance(said, list) or len(said) != num_layers or not all(n in (0, 1) for n in said):
        raise ValueError(
            f"{reader.where}: no_rope_layers must be a list of {num_layers} numbers 0 or 1, got {short(said)}"
        )
    return [bool(turn) for turn in said]


def _window(reader: ConfigReader, architecture: Architecture) -> int | None:
    """The keys that a sliding layer sees, None if no layer may be one."""
    windows = architecture.windows
    if windows is Windows.NONE:
        return None
    if "use_sliding_window" in architecture.computes and not reader.flag("use_sliding_window"):
        return None
    if windows in (Windows.ALTERNATING, Windows.PATTERN):
        return reader.size("sliding_window")
    return None if reader.values.get("sliding_window") is None else reader.size("sliding_window")


def _layer_types(reader: ConfigReader, architecture: Architecture, turns: list[bool]) -> list[str]:
    num_layers, window = len(turns), _window(reader, architecture)
    types = reader.values.get("layer_types")
    if types is None:
        slides = _slides(reader, architecture, turns)
        return [_SLIDING if window and slides[layer] else _FULL for layer in range(num_layers)]
    allowed = (_FULL, _SLIDING) if window else (_FULL,)
    if window and architecture.windows is Windows.ALL:
        allowed = (_SLIDING,)
    strange = (
        [name for name in types if name not in allowed] if isinstance(types, list) else [types]
    )
    if strange:
        raise ValueError(
            f"{reader.where}: layer_types has {short(strange[0])}; rowcast supports {' and '.join(allowed)} layers "
            "of this architecture with these settings"
        )
    if len(types) != num_layers:
        raise ValueError(
            f"{reader.where}: layer_types must name all {num_layers} layers of num_hidden_layers, got {len(types)}"
        )
    return types


def _slides(reader: ConfigReader, architecture: Architecture, turns: list[bool]) -> list[bool]:
    """By layer, whether a window is its own, if there is one."""
    layers = range(len(turns))
    match architecture.windows:
        case Windows.NONE:
            return [False for _ in layers]
        case Windows.ALL:
            return [True for _ in layers]
        case Windows.ALTERNATING:
            return [layer % 2 == 0 for layer in layers]
        case Windows.PATTERN:
            every = reader.size("sliding_window_pattern")
            return [bool((layer + 1) % every) for layer in layers]
        case Windows.UPPER:
            first = reader.size("max_window_layers", least=0)
            return [layer >= first for layer in layers]
        case Windows.UNROTATED:
            return [not turn for turn in turns]
