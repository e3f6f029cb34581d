# SPDX-License-Identifier: Apache-2.0
"""Models of Transformers with this engine's attention, for architectures that have no class here."""

from vllm.model_executor.models.transformers.encoder_decoder import TransformersForSeq2SeqLM
from vllm.model_executor.models.transformers.model import TransformersForCausalLM

__all__ = ["TransformersForCausalLM", "TransformersForSeq2SeqLM"]
