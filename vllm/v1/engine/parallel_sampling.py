# SPDX-License-Identifier: Apache-2.0
"""n completions of one prompt: n child requests, of which each has its own seed. The sequences of a
beam search are children too, though only the first one is sent to the engine core, which searches
for all of them."""

from __future__ import annotations

import copy

from vllm.outputs import CompletionOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine import EngineCoreRequest

_MAX_SEED = 2**63 - 1


def sibling_request_ids(first_child_id: str, num_children: int) -> list[str]:
    """The ids of all children of the parent whose first child has that id."""
    parent_id = first_child_id.removeprefix("0_")
    return [f"{index}_{parent_id}" for index in range(num_children)]


class ParentRequest:
    """A request with n > 1. Its children share the prompt's pages through the prefix cache; their
    outputs are put together here."""

    def __init__(self, request: EngineCoreRequest) -> None:
        self.request_id = request.request_id
        self.external_req_id = request.external_req_id or request.request_id
        self.sampling_params = request.sampling_params
        self.child_requests: set[str] = set()
        self.max_num_generation_tokens = 0
        self._outputs: dict[int, CompletionOutput] = {}

    @property
    def n(self) -> int:
        """Completions wanted."""
        return self.sampling_params.n

    def child_request_id(self, index: int) -> str:
        """The id of child `index` in the engine."""
        return f"{index}_{self.request_id}"

    def get_child_info(self, index: int) -> tuple[str, SamplingParams]:
        """Id and parameters of child `index`, whose seed is the parent's plus `index`."""
        child_id = self.child_request_id(index)
        self.child_requests.add(child_id)
        params = copy.copy(self.sampling_params)
        params.n = 1
        if params.seed is not None:
            params.seed = params.seed + index if params.seed <= _MAX_SEED - index else index
        return child_id, params

    def finish_child(self, child_request_id: str, num_generation_tokens: int) -> bool:
        """A child has ended, one way or another; whether it was the last."""
        self.child_requests.discard(child_request_id)
        self.max_num_generation_tokens = max(self.max_num_generation_tokens, num_generation_tokens)
        return not self.child_requests

    def get_outputs(
        self, child_request_id: str, completion_output: CompletionOutput
    ) -> tuple[list[CompletionOutput], bool]:
        """What a child's output makes of the parent's: the completions to hand out now (none if
        the parent waits for its other children), and whether all children have ended."""
        if completion_output.finished():
            self.child_requests.discard(child_request_id)
        finished = not self.child_requests
        kind = self.sampling_params.output_kind
        if kind is RequestOutputKind.DELTA:
            return [completion_output], finished
        self._outputs[completion_output.index] = completion_output
        if kind is RequestOutputKind.FINAL_ONLY and not finished:
            return [], False
        outputs = [self._outputs[index] for index in sorted(self._outputs)]
        if self.sampling_params.beam_search is not None:
            # A search among few tokens has fewer sequences than beams.
            outputs = [each for each in outputs if each.finish_reason != "abort"] or outputs
        return outputs, finished
