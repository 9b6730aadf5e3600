"""Chat-completion requests from Apache Beam pipelines: exactly one record per request.

The public names below are loaded when they are first used: the simulator and other small commands need no Beam.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from beam_llm.version import __version__

if TYPE_CHECKING:
    from beam_llm.config import ChatConfig
    from beam_llm.dofn import ChatCompletionDoFn
    from beam_llm.encode_images import EncodeImages
    from beam_llm.errors import BeamLLMError, ConfigError, ErrorKind, RequestError, RunStoppedError
    from beam_llm.images import ImagePolicy
    from beam_llm.io import Format, InputFormat, ReadRequests, WriteResults
    from beam_llm.records import ChatRequest, Completion, FailedRequest, Origin
    from beam_llm.retry import RetryPolicy
    from beam_llm.sampling import Dialect, SamplingParams
    from beam_llm.transforms import ChatCompletion, ChatResults

_HOMES = {
    "config": ("ChatConfig",),
    "dofn": ("ChatCompletionDoFn",),
    "encode_images": ("EncodeImages",),
    "errors": ("BeamLLMError", "ConfigError", "ErrorKind", "RequestError", "RunStoppedError"),
    "images": ("ImagePolicy",),
    "io": ("Format", "InputFormat", "ReadRequests", "WriteResults"),
    "records": ("ChatRequest", "Completion", "FailedRequest", "Origin"),
    "retry": ("RetryPolicy",),
    "sampling": ("Dialect", "SamplingParams"),
    "transforms": ("ChatCompletion", "ChatResults"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "BeamLLMError",
    "ChatCompletion",
    "ChatCompletionDoFn",
    "ChatConfig",
    "ChatRequest",
    "ChatResults",
    "Completion",
    "ConfigError",
    "Dialect",
    "EncodeImages",
    "ErrorKind",
    "FailedRequest",
    "Format",
    "ImagePolicy",
    "InputFormat",
    "Origin",
    "ReadRequests",
    "RequestError",
    "RetryPolicy",
    "RunStoppedError",
    "SamplingParams",
    "WriteResults",
    "__version__",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'beam_llm' has no attribute {name!r}")
    return getattr(import_module(f"beam_llm.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
