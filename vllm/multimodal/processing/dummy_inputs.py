# SPDX-License-Identifier: Apache-2.0
"""Inputs of the largest size, to warm up with and to fill in for a prompt that is token ids."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Generic, TypeVar

from vllm.multimodal.processing.context import BaseProcessingInfo
from vllm.multimodal.processing.inputs import ProcessorInputs

if TYPE_CHECKING:
    from PIL.Image import Image

    from vllm.config.multimodal import BaseDummyOptions, ImageDummyOptions
    from vllm.inputs import MultiModalDataDict

_I = TypeVar("_I", bound=BaseProcessingInfo)


class BaseDummyInputsBuilder(ABC, Generic[_I]):
    """Makes up prompts for a model."""

    def __init__(self, info: _I) -> None:
        self.info = info

    @abstractmethod
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        """A text with the placeholders of so many items."""

    @abstractmethod
    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions],
    ) -> MultiModalDataDict:
        """So many items, each of the size that makes the most encoder tokens.

        Args:
            seq_len: the longest prompt, in tokens.
            mm_options: sizes that the user asked for.
        """

    def get_dummy_processor_inputs(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions],
    ) -> ProcessorInputs:
        """Text and items together."""
        data = self.get_dummy_mm_data(seq_len, mm_counts, mm_options)
        return ProcessorInputs(
            prompt=self.get_dummy_text(mm_counts),
            mm_data_items=self.info.parse_mm_data(data, validate=False),
            tokenization_kwargs={"truncation": False},
        )

    def _get_dummy_images(
        self,
        *,
        width: int,
        height: int,
        num_images: int,
        overrides: ImageDummyOptions | None = None,
    ) -> list[Image]:
        """White RGB images; `overrides` may only make them smaller."""
        from PIL import Image

        if overrides is not None:
            width = min(width, overrides.width or width)
            height = min(height, overrides.height or height)
        return [Image.new("RGB", (width, height), "white")] * num_images
