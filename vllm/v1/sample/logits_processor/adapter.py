# SPDX-License-Identifier: Apache-2.0
"""A function for one request as a logits processor of the batch."""

from __future__ import annotations

import inspect
from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

from vllm.sampling_params import SamplingParams
from vllm.v1.sample.logits_processor.interface import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig

# (output token ids, logits of the request) or (prompt token ids, output token ids, logits) -> logits
RequestLogitsProcessor = (
    Callable[[list[int], "torch.Tensor"], "torch.Tensor"]
    | Callable[[list[int], list[int], "torch.Tensor"], "torch.Tensor"]
)


class AdapterLogitsProcessor(LogitsProcessor):
    """For processors that look at one request at a time: a subclass says with
    `new_req_logits_processor` which function a request gets, if any."""

    def __init__(
        self, vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
    ) -> None:
        self.req_info: dict[int, Callable[[torch.Tensor], torch.Tensor]] = {}

    @abstractmethod
    def new_req_logits_processor(self, params: SamplingParams) -> RequestLogitsProcessor | None:
        """The function for a request with these parameters; None: it needs none."""

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if batch_update is None:
            return
        for index in batch_update.removed:
            self.req_info.pop(index, None)
        for added in batch_update.added:
            self._add(added)
        for source, target, direction in batch_update.moved:
            moving, other = self.req_info.pop(source, None), self.req_info.pop(target, None)
            if moving is not None:
                self.req_info[target] = moving
            if other is not None and direction is MoveDirectionality.SWAP:
                self.req_info[source] = other

    def _add(self, added: AddedRequest) -> None:
        index, params, prompt_ids, output_ids = added
        self.req_info.pop(index, None)
        function = self.new_req_logits_processor(params)
        if function is None:
            return
        takes_prompt = len(inspect.signature(function).parameters) == 3
        tokens = (prompt_ids or [], output_ids) if takes_prompt else (output_ids,)
        self.req_info[index] = lambda logits: function(*tokens, logits)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        for index, function in self.req_info.items():
            row = logits[index]
            changed = function(row)
            if changed is not row:
                logits[index] = changed
        return logits
