# SPDX-License-Identifier: Apache-2.0
"""Model classes that have processors and no layers: what reads prompts needs no more of a model."""

from __future__ import annotations

from torch import nn

from vllm.model_executor.models.interfaces import SupportsMultiModal
from vllm.multimodal import MULTIMODAL_REGISTRY
from vllm.multimodal.inputs import MultiModalFieldConfig
from vllm.multimodal.processing import (
    BaseDummyInputsBuilder,
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    PromptReplacement,
)
from vllm.multimodal.processing.encoder_text import (
    TextDummyInputsBuilder,
    TextEncDecProcessor,
    TextProcessingInfo,
)

TOKENS_PER_IMAGE = 6


class _Model(nn.Module, SupportsMultiModal):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__()

    def embed_input_ids(self, input_ids, multimodal_embeddings=None, *, is_multimodal=None):
        raise NotImplementedError

    def forward(self, input_ids, positions, intermediate_tensors=None, inputs_embeds=None):
        raise NotImplementedError


@MULTIMODAL_REGISTRY.register_processor(
    TextEncDecProcessor, info=TextProcessingInfo, dummy_inputs=TextDummyInputsBuilder
)
class TextEncoderForTest(_Model):
    """Reads text."""


class ImageInfo(BaseProcessingInfo):
    """Two images at most."""

    def get_supported_mm_limits(self):
        return {"image": 2}

    def get_mm_max_tokens_per_item(self, seq_len, mm_counts):
        return {"image": TOKENS_PER_IMAGE}


class ImageDummyInputs(BaseDummyInputsBuilder[ImageInfo]):
    """White squares."""

    def get_dummy_text(self, mm_counts):
        return ""

    def get_dummy_mm_data(self, seq_len, mm_counts, mm_options):
        count = mm_counts.get("image", 0)
        overrides = mm_options.get("image")
        images = self._get_dummy_images(
            width=4, height=4, num_images=count, overrides=overrides
        )
        return {"image": images}


class ImageProcessor(EncDecMultiModalProcessor[ImageInfo]):
    """An image is its size."""

    def create_encoder_prompt(self, prompt, mm_items):
        return [0]

    def _call_hf_processor(self, prompt, mm_data, mm_kwargs, tok_kwargs):
        def measure(images, return_tensors, scale=1):
            import torch

            return {"sizes": torch.tensor([image.size for image in images]) * scale}

        return self.info.ctx.call_hf_processor(measure, mm_data, mm_kwargs)

    def _get_mm_fields_config(self, hf_inputs, hf_processor_mm_kwargs):
        return {"sizes": MultiModalFieldConfig.batched("image")}

    def _get_prompt_updates(self, mm_items, hf_processor_mm_kwargs, out_mm_kwargs):
        return [PromptReplacement("image", [0], [0] * TOKENS_PER_IMAGE)]


@MULTIMODAL_REGISTRY.register_processor(
    ImageProcessor, info=ImageInfo, dummy_inputs=ImageDummyInputs
)
class ImageEncoderForTest(_Model):
    """Reads images."""
