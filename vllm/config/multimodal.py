# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, Field, field_validator
from pydantic.dataclasses import dataclass

from vllm.config.utils import config, hash_factors


@dataclass
class BaseDummyOptions:
    """What a user says about the items of a modality."""

    count: int = Field(999, ge=0)
    """The most in one prompt."""


@dataclass(config=ConfigDict(extra="forbid"))
class ImageDummyOptions(BaseDummyOptions):
    """The same of images, and the size (in pixels) of those to warm up with."""

    width: int | None = Field(None, gt=0)
    height: int | None = Field(None, gt=0)


@config
class MultiModalConfig:
    """What prompts may have besides tokens, and how it is processed."""

    limit_per_prompt: dict[str, BaseDummyOptions] = Field(default_factory=dict)
    """The most items of each modality in one prompt, such as {"image": 1}; left out: as many as the
    model takes."""
    mm_processor_kwargs: dict[str, Any] | None = None
    """Arguments of the model's processor for every request; a request's own come over them."""

    @field_validator("limit_per_prompt", mode="before")
    @classmethod
    def _validate_limits(cls, value: Any) -> dict[str, BaseDummyOptions]:
        if not isinstance(value, Mapping):
            raise ValueError(f'must be an object such as {{"image": 1}}, not {value!r:.100}')
        return {str(name): _options(str(name), given) for name, given in value.items()}

    def get_limit_per_prompt(self, modality: str) -> int:
        """The most items of a modality in one prompt."""
        options = self.limit_per_prompt.get(modality)
        return BaseDummyOptions().count if options is None else options.count

    def merge_mm_processor_kwargs(self, inference_kwargs: Mapping[str, object]) -> dict[str, object]:
        """The arguments for every request, under those of one."""
        return {**(self.mm_processor_kwargs or {}), **inference_kwargs}

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation: nothing does."""
        return hash_factors({})


def _options(modality: str, given: Any) -> BaseDummyOptions:
    if isinstance(given, BaseDummyOptions):
        return given
    kind = ImageDummyOptions if modality == "image" else BaseDummyOptions
    if isinstance(given, bool) or not isinstance(given, (int, Mapping)):
        raise ValueError(f"{modality}: must be a count or an object, not {given!r:.100}")
    return kind(count=given) if isinstance(given, int) else kind(**given)
