# SPDX-License-Identifier: Apache-2.0
"""One step while it is being decided."""

from __future__ import annotations

from dataclasses import dataclass, field

from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData
from vllm.v1.request import Request


@dataclass
class StepPlan:
    """What has been decided: tokens for requests, within `token_budget`, which shrinks.

    `new_requests` are unknown to the runner (just admitted, or preempted and back), with their
    whole block tables; `known_requests` have only blocks added.
    """

    token_budget: int
    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    new_requests: list[NewRequestData] = field(default_factory=list)
    known_requests: CachedRequestData = field(default_factory=CachedRequestData.make_empty)
    requests: list[Request] = field(default_factory=list)
    encoder_inputs: dict[str, list[int]] = field(default_factory=dict)
    num_encoder_tokens: int = 0

    def add_new(
        self, request: Request, num_tokens: int, block_ids: tuple[list[int], ...]
    ) -> None:
        """Gives an admitted request `num_tokens` tokens."""
        tokens = request.prompt_token_ids
        if request.num_output_tokens:
            # A copy: the request's own list grows while the runner holds this one.
            tokens = list(request.all_token_ids)
        self.new_requests.append(NewRequestData.from_request(request, block_ids, tokens))
        self._add(request, num_tokens)

    def add_known(self, request: Request, num_tokens: int, new_blocks: KVCacheBlocks) -> None:
        """Gives a running request `num_tokens` tokens and the pages added for them."""
        known = self.known_requests
        known.req_ids.append(request.request_id)
        known.new_block_ids.append(new_blocks.get_block_ids(allow_none=True))
        known.num_computed_tokens.append(request.num_computed_tokens)
        known.num_output_tokens.append(request.num_output_tokens)
        self._add(request, num_tokens)

    def add_encoder_inputs(
        self, request: Request, input_ids: list[int], num_encoder_tokens: int
    ) -> None:
        """The step encodes these inputs of an admitted request, `num_encoder_tokens` in all."""
        self.encoder_inputs[request.request_id] = input_ids
        self.num_encoder_tokens += num_encoder_tokens

    def num_tokens_of(self, request: Request) -> int:
        """Tokens given to `request` so far."""
        return self.num_scheduled_tokens.get(request.request_id, 0)

    def _add(self, request: Request, num_tokens: int) -> None:
        self.num_scheduled_tokens[request.request_id] = num_tokens
        self.requests.append(request)
        self.token_budget -= num_tokens
