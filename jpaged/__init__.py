"""PagedAttention for JAX: the KV cache lives in pages that sequences take on demand and give back at once.

Names are resolved when they are first used, so `import jpaged` is quick and needs no jax.

Example:
  >>> from jpaged import SamplingParams
  >>> SamplingParams(temperature=0.0, max_tokens=16).greedy
  True
"""

import importlib
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jpaged import errors
    from jpaged.async_engine import AsyncEngine
    from jpaged.config import CacheConfig, EngineConfig, SchedulerConfig, SpeculationConfig
    from jpaged.engine import Engine
    from jpaged.llm import LLM, Score
    from jpaged.request import Completion, Output, SamplingParams, TokenLogprobs
    from jpaged.stats import EngineStats
    from jpaged.structured import StructuredOutput
    from jpaged.tokenizer import Tokenizer

BEGAN = time.time()  # nothing of jpaged was read before
__version__ = "0.2.0"

__all__ = [
    "LLM",
    "AsyncEngine",
    "CacheConfig",
    "Completion",
    "Engine",
    "EngineConfig",
    "EngineStats",
    "Output",
    "SamplingParams",
    "SchedulerConfig",
    "Score",
    "SpeculationConfig",
    "StructuredOutput",
    "TokenLogprobs",
    "Tokenizer",
    "__version__",
    "errors",
]

_HOME = {
    "LLM": "jpaged.llm",
    "AsyncEngine": "jpaged.async_engine",
    "CacheConfig": "jpaged.config",
    "Completion": "jpaged.request",
    "Engine": "jpaged.engine",
    "EngineConfig": "jpaged.config",
    "EngineStats": "jpaged.stats",
    "Output": "jpaged.request",
    "SamplingParams": "jpaged.request",
    "SchedulerConfig": "jpaged.config",
    "Score": "jpaged.llm",
    "SpeculationConfig": "jpaged.config",
    "StructuredOutput": "jpaged.structured",
    "TokenLogprobs": "jpaged.request",
    "Tokenizer": "jpaged.tokenizer",
}


def __getattr__(name: str) -> object:
    if name == "errors":
        return importlib.import_module("jpaged.errors")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    raise AttributeError(f"module 'jpaged' has no attribute {name!r}; its public names are {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
