"""One call to an engine's front over Ray, and how each way in which it can end reads to a person."""

from __future__ import annotations

from typing import Any

from .engine import EngineFailed

_TIMEOUT_S = 60.0


def call_front(engine_name: str, method: Any, *arguments: Any) -> Any:
    """Call a method of a front's handle and wait for what it returns.

    Raises: EngineFailed, one sentence, when the front cannot be reached any more.
    """
    import ray
    import ray.exceptions

    try:
        return ray.get(method.remote(*arguments), timeout=_TIMEOUT_S)
    except ray.exceptions.GetTimeoutError:
        raise EngineFailed(
            f"engine {engine_name!r} did not answer within {_TIMEOUT_S:g} s"
        ) from None
    except ray.exceptions.RayTaskError:
        raise
    except Exception as error:
        known = isinstance(error, ray.exceptions.RayError | ConnectionError | RuntimeError)
        # Ray Client says that it is no longer connected with a plain Exception.
        if not known and ray.is_initialized():
            raise
        raise EngineFailed(
            f"engine {engine_name!r} is gone: its front cannot be reached "
            f"({type(error).__name__ if known else 'the connection to Ray is closed'})"
        ) from None
