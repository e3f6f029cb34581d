# SPDX-License-Identifier: Apache-2.0
"""What a step of the model runner gives back. Torch is needed by the producers only."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorWorkerMetadata
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats


class LogprobsLists(NamedTuple):
    """Logprobs on the host, a row a position. The first column is the token that was taken (or, for
    a prompt, came next); the others are the most likely tokens, best first.

    logprob_token_ids: (positions, 1 + k) int32
    logprobs: (positions, 1 + k) float32
    sampled_token_ranks: (positions,) int32; 1 is the most likely token
    cu_num_generated_tokens: where the rows of request i begin, if not every request has one row
    """

    logprob_token_ids: np.ndarray
    logprobs: np.ndarray
    sampled_token_ranks: np.ndarray
    cu_num_generated_tokens: list[int] | None = None

    def slice_request(self, req_idx: int, num_positions: int) -> LogprobsLists:
        """The rows of the request at `req_idx` of the batch."""
        begin = self.cu_num_generated_tokens[req_idx] if self.cu_num_generated_tokens else req_idx
        rows = slice(begin, begin + num_positions)
        return LogprobsLists(
            self.logprob_token_ids[rows], self.logprobs[rows], self.sampled_token_ranks[rows]
        )


class LogprobsTensors(NamedTuple):
    """`LogprobsLists` on the device: shapes and dtypes as there."""

    logprob_token_ids: torch.Tensor
    logprobs: torch.Tensor
    selected_token_ranks: torch.Tensor
    cu_num_generated_tokens: list[int] | None = None

    def tolists(self, cu_num_generated_tokens: list[int] | None = None) -> LogprobsLists:
        """Copied to the host."""
        return LogprobsLists(
            self.logprob_token_ids.cpu().numpy(),
            self.logprobs.cpu().numpy(),
            self.selected_token_ranks.cpu().numpy(),
            cu_num_generated_tokens or self.cu_num_generated_tokens,
        )


@dataclass
class SamplerOutput:
    """On the device. sampled_token_ids: (num_reqs, 1) int32."""

    sampled_token_ids: torch.Tensor
    logprobs_tensors: LogprobsTensors | None
    # (num_reqs,) bool: every token was forbidden, so that the one taken is none to be told.
    has_none: torch.Tensor | None = None


@dataclass
class KVConnectorOutput:
    """What the worker's half of a KV connector reports after a step.

    finished_sending: requests whose pages, kept after their end, may be freed.
    finished_recving: requests whose asynchronous load is over, well or not.
    invalid_block_ids: pages that were to be loaded and were not.
    """

    finished_sending: set[str] | None = None
    finished_recving: set[str] | None = None
    kv_connector_stats: KVConnectorStats | None = None
    kv_connector_worker_meta: KVConnectorWorkerMetadata | None = None
    invalid_block_ids: set[int] = field(default_factory=set)
    expected_finished_count: int = 0

    def is_empty(self) -> bool:
        """Whether there is nothing to report."""
        return not (
            self.finished_sending
            or self.finished_recving
            or self.kv_connector_stats
            or self.kv_connector_worker_meta
            or self.invalid_block_ids
        )


@dataclass(frozen=True)
class RequestFailure:
    """Why a request of a step cannot go on, in words for its user. `is_computed` False: the step
    has written none of its keys and values."""

    message: str
    is_computed: bool = True


@dataclass
class ModelRunnerOutput:
    """What a step gave, a request at `req_id_to_index[req_id]` of each list.

    `sampled_token_ids` is empty for a request whose prompt is not computed to its end yet.
    `prompt_logprobs_dict` holds a request's prompt logprobs in the step that completes its prompt.
    `failures`: requests of the step that are to end with an error, by id; they need not be among
    `req_ids`.
    """

    req_ids: list[str]
    req_id_to_index: dict[str, int]
    sampled_token_ids: list[list[int]] = field(default_factory=list)
    logprobs: LogprobsLists | None = None
    prompt_logprobs_dict: dict[str, LogprobsLists | None] = field(default_factory=dict)
    kv_connector_output: KVConnectorOutput | None = None
    num_nans_in_logits: dict[str, int] | None = None
    failures: dict[str, RequestFailure] = field(default_factory=dict)

    @staticmethod
    def with_kv_conn_output_only(
        kv_connector_output: KVConnectorOutput | None,
    ) -> ModelRunnerOutput:
        """The output of a step without tokens."""
        if kv_connector_output is None or kv_connector_output.is_empty():
            return EMPTY_MODEL_RUNNER_OUTPUT
        return ModelRunnerOutput([], {}, kv_connector_output=kv_connector_output)


class AsyncModelRunnerOutput(ABC):
    """The output of a step that may still be running on the device."""

    @abstractmethod
    def get_output(self) -> ModelRunnerOutput:
        """Waits for the step and gives its output."""


EMPTY_MODEL_RUNNER_OUTPUT = ModelRunnerOutput(req_ids=[], req_id_to_index={})
