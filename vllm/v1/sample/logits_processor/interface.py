# SPDX-License-Identifier: Apache-2.0
"""What a logits processor is, and how it is told which requests are in the batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


class MoveDirectionality(Enum):
    """UNIDIRECTIONAL: the request at the first index goes to the second; SWAP: they change places.
    Only the first occurs here."""

    UNIDIRECTIONAL = auto()
    SWAP = auto()


# Index of a request that left and whose place nobody took.
RemovedRequest = int
# Index, parameters, prompt token ids, and output token ids: a list that grows as tokens are drawn.
AddedRequest = tuple[int, SamplingParams, list[int] | None, list[int]]
# From index, to index.
MovedRequest = tuple[int, int, MoveDirectionality]


@dataclass(frozen=True)
class BatchUpdate:
    """What has changed in the batch since the last step, to be applied in the order `removed`,
    `added`, `moved`. A request may be added at the index of one that left, without that being
    removed; after the moves the indices are 0 to `batch_size` - 1."""

    batch_size: int
    removed: Sequence[RemovedRequest] = field(default_factory=list)
    added: Sequence[AddedRequest] = field(default_factory=list)
    moved: Sequence[MovedRequest] = field(default_factory=list)


class LogitsProcessor(ABC):
    """Changes the logits of a whole batch before tokens are drawn.

    The engine makes one object for the whole time of its life; in each step it calls `update_state`
    and then `apply`.
    """

    @classmethod
    def validate_params(cls, sampling_params: SamplingParams) -> None:
        """Called for each request before it is accepted; `extra_args` are what it may be told.

        Raises:
            ValueError: they cannot be served; the message is for the request's user.
        """

    @abstractmethod
    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None: ...

    @abstractmethod
    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        """The changed logits, in place or new.

        logits: (batch size, vocab) float32, a row for each index that `update_state` has told of. A
            row whose request draws no token in this step holds zeros, and what becomes of it has no
            effect.
        """

    @abstractmethod
    def is_argmax_invariant(self) -> bool:
        """Whether the most likely token stays so whatever happens: then it is applied after the
        temperature, and greedy requests do without it."""

    @abstractmethod
    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Called in each step before `apply`; None: the same requests at the same indices."""
