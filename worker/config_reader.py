"""Typed look-ups in a model folder's JSON files, and the sentences for what is not as it must be."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeGuard

_TOO_LARGE = 2**31  # for any size of a model


class ConfigReader:
    """Typed look-ups in one JSON object; None counts as missing. `where` names the object in sentences."""

    def __init__(self, where: str | Path, values: Mapping[str, Any]) -> None:
        self.where = where
        self.values = values

    def size(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        value = self.values.get(key)
        if value is None:
            value = default
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(
                f"{self.where}: {key} must be an integer, at least {least}, got {_got(value)}"
            )
        if value >= _TOO_LARGE:
            raise ValueError(f"{self.where}: {key} must be below 2**31, got {short(value)}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self.values.get(key)
        if value is None:
            value = default
        if not _is_positive(value):
            raise ValueError(f"{self.where}: {key} must be a number above 0, got {_got(value)}")
        return float(value)

    def reals(self, key: str, count: int) -> tuple[float, ...]:
        values = self.values.get(key)
        if (
            not isinstance(values, list)
            or len(values) != count
            or not all(map(_is_positive, values))
        ):
            raise ValueError(
                f"{self.where}: {key} must be a list of {count} numbers above 0, got {_got(values)}"
            )
        return tuple(map(float, values))

    def flag(self, key: str, default: bool = False) -> bool:
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ValueError(f"{self.where}: {key} must be true or false, got {short(value)}")
        return value

    def object(self, key: str) -> Mapping[str, Any]:
        """A nested object; empty when it is missing."""
        value = self.values.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict):
            raise ValueError(f"{self.where}: {key} must be an object, got {short(value)}")
        return value

    def refuse_unless(self, key: str, allowed: tuple[Any, ...]) -> None:
        """Raises: ValueError naming key and value if the value is there and none of `allowed`."""
        if key in self.values and not _is_one_of(self.values[key], allowed):
            raise ValueError(
                f"{self.where}: {key} = {short(self.values[key])} is not supported yet by rowcast"
            )


def read_json(path: Path) -> dict[str, Any]:
    """Raises: ValueError in a sentence if the file cannot be read or holds no JSON object."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON ({error}); download it again") from error
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(values).__name__}")
    return values


def short(value: Any) -> str:
    """A JSON value as it may stand in a sentence."""
    text = json.dumps(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _got(value: Any) -> str:
    return "nothing" if value is None else short(value)


def _is_positive(value: Any) -> TypeGuard[int | float]:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and 0 < value <= sys.float_info.max
    )


def _is_one_of(value: Any, allowed: tuple[Any, ...]) -> bool:
    """Membership without Python's 0 == False: a number is not a switch."""
    return any(
        value == other and isinstance(value, bool) == isinstance(other, bool) for other in allowed
    )
