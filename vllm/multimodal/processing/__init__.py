# SPDX-License-Identifier: Apache-2.0
"""Processors: from users' prompts and data to what the engine takes. Imports no torch."""

from vllm.multimodal.processing.context import (
    BaseProcessingInfo,
    InputProcessingContext,
    TimingContext,
    TokenizeParams,
)
from vllm.multimodal.processing.dummy_inputs import BaseDummyInputsBuilder
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.processing.processor import (
    BaseMultiModalProcessor,
    EncDecMultiModalProcessor,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptUpdate,
    PromptUpdateDetails,
)

__all__ = [
    "BaseDummyInputsBuilder",
    "BaseMultiModalProcessor",
    "BaseProcessingInfo",
    "EncDecMultiModalProcessor",
    "InputProcessingContext",
    "ProcessorInputs",
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptUpdate",
    "PromptUpdateDetails",
    "TimingContext",
    "TokenizeParams",
]
