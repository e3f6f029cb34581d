# SPDX-License-Identifier: Apache-2.0
"""Requests and responses of the HTTP routes, a file a route."""

from vllm.entrypoints.openai.protocol.chat import (
    ChatCompletionRequest,
    ChatCompletionResponse,
    ChatCompletionStreamResponse,
)
from vllm.entrypoints.openai.protocol.common import (
    ErrorInfo,
    ErrorResponse,
    ModelCard,
    ModelList,
    RequestError,
    StreamOptions,
    UsageInfo,
)
from vllm.entrypoints.openai.protocol.completion import (
    CompletionRequest,
    CompletionResponse,
    CompletionStreamResponse,
)

__all__ = [
    "ChatCompletionRequest",
    "ChatCompletionResponse",
    "ChatCompletionStreamResponse",
    "CompletionRequest",
    "CompletionResponse",
    "CompletionStreamResponse",
    "ErrorInfo",
    "ErrorResponse",
    "ModelCard",
    "ModelList",
    "RequestError",
    "StreamOptions",
    "UsageInfo",
]
