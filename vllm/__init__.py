# SPDX-License-Identifier: Apache-2.0
"""A compact vLLM. Importing it is cheap: names are resolved on first use, torch is not imported."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import env_override as _env_override  # noqa: F401  (before torch is imported)
from .version import __version__, __version_tuple__

MODULE_ATTRS = {
    "AsyncEngineArgs": "vllm.engine.arg_utils",
    "AsyncLLMEngine": "vllm.engine.async_llm_engine",
    "CompletionOutput": "vllm.outputs",
    "EngineArgs": "vllm.engine.arg_utils",
    "LLM": "vllm.entrypoints.llm",
    "LLMEngine": "vllm.engine.llm_engine",
    "ModelRegistry": "vllm.model_executor.models",
    "PromptType": "vllm.inputs",
    "RequestOutput": "vllm.outputs",
    "SamplingParams": "vllm.sampling_params",
    "TextPrompt": "vllm.inputs",
    "TokensPrompt": "vllm.inputs",
}

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs, EngineArgs
    from vllm.engine.async_llm_engine import AsyncLLMEngine
    from vllm.engine.llm_engine import LLMEngine
    from vllm.entrypoints.llm import LLM
    from vllm.inputs import PromptType, TextPrompt, TokensPrompt
    from vllm.model_executor.models import ModelRegistry
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.sampling_params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in MODULE_ATTRS:
        raise AttributeError(f"module 'vllm' has no attribute {name!r}")
    return getattr(importlib.import_module(MODULE_ATTRS[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *MODULE_ATTRS])


__all__ = [
    "AsyncEngineArgs",
    "AsyncLLMEngine",
    "CompletionOutput",
    "EngineArgs",
    "LLM",
    "LLMEngine",
    "ModelRegistry",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]
