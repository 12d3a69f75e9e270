"""rowcast: serve large language models from many GPUs; broadcast only what changed.

Public names load lazily, so that `import rowcast` pulls in neither Ray nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster.client import Client
    from .cluster.outputs import CompletionOutput, Logprob, RequestOutput
    from .launch.llm import LLM
    from .scheduler.sampling_params import SamplingParams
    from .scheduler.structured_outputs import StructuredOutputsParams

__version__ = "0.1.0"

_HOME_OF = {
    "LLM": ".launch.llm",
    "Client": ".cluster.client",
    "CompletionOutput": ".cluster.outputs",
    "Logprob": ".cluster.outputs",
    "RequestOutput": ".cluster.outputs",
    "SamplingParams": ".scheduler.sampling_params",
    "StructuredOutputsParams": ".scheduler.structured_outputs",
}

__all__ = [
    "LLM",
    "Client",
    "CompletionOutput",
    "Logprob",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputsParams",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'rowcast' has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOME_OF[name], __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
