# SPDX-License-Identifier: Apache-2.0
"""The name that users of upstream know."""

from vllm.v1.engine.async_llm import AsyncLLM

AsyncLLMEngine = AsyncLLM
