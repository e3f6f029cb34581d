# SPDX-License-Identifier: Apache-2.0
"""The encoder's outputs in the runner, and how many of them a step may add."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from vllm.v1.request import Request

if TYPE_CHECKING:
    from vllm.config import SchedulerConfig, VllmConfig


class EncoderCacheManager(ABC):
    """Keeps account of the encoder outputs that the runner keeps, by identifier of their input.

    Each step: `can_allocate` and `allocate` for the inputs it encodes, then, once,
    `get_freed_mm_hashes` for what the runner is to forget before it encodes them.
    """

    @classmethod
    def create_manager(cls, *, cache_size: int, vllm_config: VllmConfig) -> EncoderCacheManager:
        """The manager for the model of `vllm_config`: encoder-decoder models are the only ones
        here that have an encoder."""
        return EncoderDecoderCacheManager(cache_size)

    def __init__(self, cache_size: int) -> None:
        self.cache_size = cache_size

    @abstractmethod
    def reset(self) -> None:
        """The runner has forgotten everything."""

    @abstractmethod
    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        """Whether a step may encode input `input_id` of the request.

        Args:
            encoder_compute_budget: tokens that the step may still encode.
            num_embeds_to_schedule: tokens that it was allowed for the same request, but that are
                not allocated yet.
        """

    @abstractmethod
    def allocate(self, request: Request, input_id: int) -> None:
        """The step encodes input `input_id` of the request."""

    @abstractmethod
    def get_freed_mm_hashes(self) -> list[str]:
        """Identifiers of the outputs that nobody needs any more; each is named once."""


class EncoderDecoderCacheManager(EncoderCacheManager):
    """Outputs become keys and values of cross-attention in the step that makes them, and are
    forgotten at the next: nobody waits for room, and no request holds any while it waits.

    An input larger than the cache, or than a step's budget, is encoded by itself.
    """

    def __init__(self, cache_size: int) -> None:
        super().__init__(cache_size)
        self.reset()

    def reset(self) -> None:
        self.num_free_slots = self.cache_size
        self._of_this_step: list[str] = []
        self._of_last_step: list[str] = []

    def can_allocate(
        self,
        request: Request,
        input_id: int,
        encoder_compute_budget: int,
        num_embeds_to_schedule: int,
    ) -> bool:
        if not self._of_this_step and not num_embeds_to_schedule:
            return True
        num_embeds = request.get_num_encoder_embeds(input_id) + num_embeds_to_schedule
        return num_embeds <= min(encoder_compute_budget, self.num_free_slots)

    def allocate(self, request: Request, input_id: int) -> None:
        self.num_free_slots -= request.get_num_encoder_embeds(input_id)
        self._of_this_step.append(request.mm_features[input_id].identifier)

    def get_freed_mm_hashes(self) -> list[str]:
        freed, self._of_last_step = self._of_last_step, self._of_this_step
        self._of_this_step = []
        self.num_free_slots = self.cache_size
        return freed


def compute_mm_encoder_budget(
    scheduler_config: SchedulerConfig, mm_max_toks_per_item: Mapping[str, int]
) -> tuple[int, int]:
    """Tokens that a step encodes at most, and tokens of output that are kept: what the config says,
    or the largest input if that is more.

    Args:
        mm_max_toks_per_item: tokens of the largest input, by modality.
    """
    largest = max(mm_max_toks_per_item.values(), default=0)
    return (
        max(scheduler_config.max_num_encoder_input_tokens, largest),
        max(scheduler_config.encoder_cache_size, largest),
    )
