# SPDX-License-Identifier: Apache-2.0
"""Tokenizers and chat templates, without torch."""

from vllm.tokenizers.protocol import TokenizerLike
from vllm.tokenizers.registry import cached_get_tokenizer, get_tokenizer

__all__ = ["TokenizerLike", "cached_get_tokenizer", "get_tokenizer"]
