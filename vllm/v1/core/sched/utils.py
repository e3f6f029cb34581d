# SPDX-License-Identifier: Apache-2.0
"""When a request has enough, and its last words."""

from __future__ import annotations

from collections.abc import Mapping

from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.metrics.stats import SchedulerStats
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus


def check_stop(request: Request, max_model_len: int) -> bool:
    """Whether the request ends with its last token; sets its status and stop reason if so.

    A token that ends it counts more than a length that is reached with the same token. Before
    `min_tokens` no token ends it, but the model's length does.
    """
    params = request.sampling_params
    token = request.output_token_ids[-1]
    if request.num_output_tokens >= params.min_tokens:
        if token == params.eos_token_id and not params.ignore_eos:
            request.status = RequestStatus.FINISHED_STOPPED
            return True
        if token in params.stop_token_ids:
            request.status = RequestStatus.FINISHED_STOPPED
            request.stop_reason = token
            return True
    if request.num_tokens >= max_model_len or request.num_output_tokens >= request.max_tokens:
        request.status = RequestStatus.FINISHED_LENGTH_CAPPED
        return True
    return False


def append_until_stop(
    request: Request, token_ids: list[int], max_model_len: int
) -> tuple[list[int], bool]:
    """Appends sampled tokens up to the one that ends the request. Returns those appended, and
    whether it has ended."""
    for count, token in enumerate(token_ids, start=1):
        request.append_output_token_ids(token)
        if check_stop(request, max_model_len):
            return token_ids[:count], True
    return token_ids, False


def next_output(
    request: Request, output: ModelRunnerOutput, max_model_len: int
) -> EngineCoreOutput | None:
    """Takes in one request's share of a step; None if there is nothing to tell."""
    request_id = request.request_id
    index = output.req_id_to_index[request_id]
    sampled = output.sampled_token_ids[index] if output.sampled_token_ids else []
    new_tokens, has_ended = append_until_stop(request, sampled, max_model_len)
    prompt_logprobs = output.prompt_logprobs_dict.get(request_id)
    if not new_tokens and prompt_logprobs is None:
        return None
    logprobs = None
    if new_tokens and output.logprobs and request.sampling_params.num_logprobs is not None:
        logprobs = output.logprobs.slice_request(index, len(new_tokens))
    return EngineCoreOutput(
        request_id=request_id,
        new_token_ids=new_tokens,
        new_logprobs=logprobs,
        new_prompt_logprobs_tensors=prompt_logprobs,
        finish_reason=request.get_finished_reason() if has_ended else None,
        stop_reason=request.stop_reason,
        events=request.take_events(),
        prefill_stats=request.take_prefill_stats() if new_tokens else None,
        num_nans_in_logits=(output.num_nans_in_logits or {}).get(request_id, 0),
    )


def remove_all(requests: list[Request], to_remove: set[Request]) -> list[Request]:
    """`requests` without those in `to_remove`; itself if there is nothing to remove."""
    if not to_remove:
        return requests
    return [request for request in requests if request not in to_remove]


def last_output(request: Request) -> EngineCoreOutput:
    """Tells the client of a request that ended without a token."""
    return EngineCoreOutput(
        request_id=request.request_id,
        new_token_ids=[],
        finish_reason=request.get_finished_reason(),
        events=request.take_events(),
        error_message=request.error_message,
        is_engine_fault=request.is_engine_fault,
    )


def address(
    by_client: Mapping[int, list[EngineCoreOutput]],
    finished_by_client: Mapping[int, set[str]],
    stats: SchedulerStats | None,
) -> dict[int, EngineCoreOutputs]:
    """An envelope for each client that is to be told something; stats go with the first."""
    outputs = {client: EngineCoreOutputs(outputs=made) for client, made in by_client.items()}
    for client, request_ids in finished_by_client.items():
        outputs.setdefault(client, EngineCoreOutputs()).finished_requests = request_ids
    if stats is not None:
        if not outputs:
            outputs[0] = EngineCoreOutputs()
        next(iter(outputs.values())).scheduler_stats = stats
    return outputs
