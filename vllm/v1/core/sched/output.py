# SPDX-License-Identifier: Apache-2.0
"""What the scheduler tells the model runner to do in one step."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata
    from vllm.multimodal.inputs import MultiModalFeatureSpec
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.request import Request


@dataclass
class NewRequestData:
    """A request the runner does not know yet (or forgot when it was preempted): all of it.

    `block_ids` has a list of page ids for each KV cache group. `prefill_token_ids` are the tokens
    to compute: the prompt and, for a request that was preempted, what it had generated.
    `mm_features` are its encoder inputs.
    """

    req_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    block_ids: tuple[list[int], ...]
    num_computed_tokens: int
    prefill_token_ids: list[int] | None = None
    mm_features: list[MultiModalFeatureSpec] = field(default_factory=list)

    @classmethod
    def from_request(
        cls,
        request: Request,
        block_ids: tuple[list[int], ...],
        prefill_token_ids: list[int] | None = None,
    ) -> NewRequestData:
        """As `request` stands now."""
        return cls(
            req_id=request.request_id,
            prompt_token_ids=request.prompt_token_ids,
            sampling_params=request.sampling_params,
            block_ids=block_ids,
            num_computed_tokens=request.num_computed_tokens,
            prefill_token_ids=prefill_token_ids,
            mm_features=request.mm_features,
        )

    def anon_repr(self) -> str:
        """For logs: lengths in the place of what the user wrote."""
        return (
            f"NewRequestData(req_id={self.req_id}, prompt_len={len(self.prompt_token_ids)}, "
            f"num_computed_tokens={self.num_computed_tokens}, block_ids={self.block_ids})"
        )


@dataclass
class CachedRequestData:
    """Requests the runner knows: what is new about each, a list entry a request.

    `new_block_ids[i]` is None if no page was added. A resumed request is sent as new instead, since
    the runner forgets a request when it is preempted.
    """

    req_ids: list[str]
    new_block_ids: list[tuple[list[int], ...] | None]
    num_computed_tokens: list[int]
    num_output_tokens: list[int]

    @property
    def num_reqs(self) -> int:
        """Requests in it."""
        return len(self.req_ids)

    def anon_repr(self) -> str:
        """For logs; it holds nothing the user wrote."""
        return repr(self)

    @classmethod
    def make_empty(cls) -> CachedRequestData:
        """No request."""
        return cls([], [], [], [])


@dataclass
class SchedulerOutput:
    """One step.

    For the runner's states: `scheduled_new_reqs`, `scheduled_cached_reqs`, and what it must forget:
    `finished_req_ids` (each is named once) and `preempted_req_ids`.
    For the batch: `num_scheduled_tokens` (request id -> tokens to compute, at least 1).
    For the encoder: `scheduled_encoder_inputs` (request id -> which of its `mm_features` to encode
    in this step) and, to be forgotten before, `free_encoder_mm_hashes` (identifiers of outputs that
    an earlier step made).
    For the cache, before the step runs: pages to zero and pages to copy.
    """

    scheduled_new_reqs: list[NewRequestData]
    scheduled_cached_reqs: CachedRequestData
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    finished_req_ids: set[str]
    preempted_req_ids: set[str] = field(default_factory=set)
    num_common_prefix_blocks: list[int] = field(default_factory=list)
    scheduled_encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    free_encoder_mm_hashes: list[str] = field(default_factory=list)
    kv_connector_metadata: KVConnectorMetadata | None = None
    new_block_ids_to_zero: list[int] | None = None
    kv_cache_block_copies: list[KVCacheBlockCopy] | None = None

    def without(self, req_ids: Collection[str]) -> SchedulerOutput:
        """The step without the tokens and encoder inputs of these requests."""
        num_tokens = {r: n for r, n in self.num_scheduled_tokens.items() if r not in req_ids}
        encoded = {r: i for r, i in self.scheduled_encoder_inputs.items() if r not in req_ids}
        return replace(
            self,
            num_scheduled_tokens=num_tokens,
            total_num_scheduled_tokens=sum(num_tokens.values()),
            scheduled_encoder_inputs=encoded,
        )

    @classmethod
    def make_empty(cls) -> SchedulerOutput:
        """Nothing to compute."""
        return cls([], CachedRequestData.make_empty(), {}, 0, set())
