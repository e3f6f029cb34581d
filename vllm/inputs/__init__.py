# SPDX-License-Identifier: Apache-2.0
"""Prompts, as users hand them in."""

from vllm.inputs.llm import (
    DecoderOnlyPrompt,
    PromptType,
    SingletonPrompt,
    TextPrompt,
    TokensPrompt,
)

__all__ = ["DecoderOnlyPrompt", "PromptType", "SingletonPrompt", "TextPrompt", "TokensPrompt"]
