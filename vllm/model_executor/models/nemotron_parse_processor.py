# SPDX-License-Identifier: Apache-2.0
"""Nemotron Parse's inputs: an image fitted onto the page that the model sees, and task tokens for
the decoder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from PIL import Image

from vllm.multimodal.inputs import MultiModalKwargsItem
from vllm.multimodal.processing import BaseDummyInputsBuilder, BaseProcessingInfo
from vllm.multimodal.processing.context import TokenizeParams
from vllm.multimodal.processing.one_item import OneItemEncDecProcessor
from vllm.transformers_utils.nemotron_parse import num_encoder_tokens

if TYPE_CHECKING:
    from transformers import BatchFeature

    from vllm.config.multimodal import BaseDummyOptions
    from vllm.inputs import MultiModalDataDict

PIXEL_VALUES = "pixel_values"
WHITE = (255, 255, 255)


def fit_to_page(image: Image.Image, height: int, width: int) -> Image.Image:
    """The image, RGB, in the middle of a white page of that size in pixels.

    A larger one is made smaller with its aspect kept; a smaller one keeps its size. What is
    transparent is white.
    """
    if image.mode.startswith("I"):  # 16 bits a pixel
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.has_transparency_data:
        layer = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", layer.size, (*WHITE, 255)), layer)
    image = image.convert("RGB")
    scale = min(1.0, height / image.height, width / image.width)
    if scale < 1.0:
        size = (max(1, int(image.width * scale)), max(1, int(image.height * scale)))
        image = image.resize(size, Image.Resampling.BILINEAR)
    page = Image.new("RGB", (width, height), WHITE)
    page.paste(image, ((width - image.width) // 2, (height - image.height) // 2))
    return page


def to_image(data: Any) -> Image.Image:
    """An image in PIL's form from an array or a tensor: (height, width, channels) or (channels,
    height, width), bytes or numbers from 0 to 1.

    Raises:
        ValueError: another number of channels than 1, 3 or 4.
    """
    if isinstance(data, Image.Image):
        return data
    array = np.asarray(data)
    if array.shape[0] in (1, 3, 4) and array.shape[-1] not in (1, 3, 4):
        array = array.transpose(1, 2, 0)
    if array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image of shape {array.shape} has no dimension of 1, 3 or 4 channels")
    if np.issubdtype(array.dtype, np.floating):
        array = (array.clip(0, 1) * 255).round()
    array = array.astype(np.uint8)
    return Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array)


class NemotronParseProcessingInfo(BaseProcessingInfo):
    """One image in a prompt; every one has the same number of encoder tokens."""

    skip_prompt_length_check = True

    @property
    def image_size(self) -> tuple[int, int]:
        """Height and width in pixels of the page that the encoder sees."""
        height, width = self.ctx.model_config.hf_config_dict["image_size"]
        return height, width

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"image": 1}

    def get_default_tok_params(self) -> TokenizeParams:
        """A prompt says its special tokens itself."""
        return TokenizeParams(add_special_tokens=False)

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        return {"image": num_encoder_tokens(self.image_size)}


class NemotronParseDummyInputsBuilder(BaseDummyInputsBuilder[NemotronParseProcessingInfo]):
    """White pages."""

    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions],
    ) -> MultiModalDataDict:
        height, width = self.info.image_size
        count = mm_counts.get("image", 0)
        return {"image": self._get_dummy_images(width=width, height=height, num_images=count)}


class NemotronParseMultiModalProcessor(OneItemEncDecProcessor[NemotronParseProcessingInfo]):
    """Makes pixels of the image; the text of a prompt is the decoder's."""

    modality = "image"
    argument = PIXEL_VALUES

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        """`pixel_values`: of each image (3, height, width) bytes. The model makes numbers of them:
        a quarter of what would travel to it otherwise."""
        import torch
        from transformers import BatchFeature

        if mm_kwargs:
            raise ValueError(
                f"mm_processor_kwargs ({', '.join(mm_kwargs)}) are not supported by this model: "
                "its config says how large an image is"
            )
        height, width = self.info.image_size
        pages = [fit_to_page(to_image(image), height, width) for image in mm_data.get("images", ())]
        pixels = [torch.from_numpy(np.array(page)).permute(2, 0, 1).contiguous() for page in pages]
        return BatchFeature({PIXEL_VALUES: pixels})

    def num_encoder_tokens(self, item: MultiModalKwargsItem) -> int:
        return num_encoder_tokens(self.info.image_size)
