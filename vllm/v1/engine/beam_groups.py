# SPDX-License-Identifier: Apache-2.0
"""Beam searches in the engine core.

Each running beam is a request of the scheduler for one token. It goes on after the tokens of its
beam, whose full pages it finds in the prefix cache. When all of a prompt's beams have their
candidates, their successors are queued at once, so that the next step holds the beams of all
prompts. Clients see none of this: their request ends with all its sequences.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from vllm.config import ModelConfig
from vllm.logger import init_logger
from vllm.sampling_params import SamplingParams
from vllm.v1.core.sched.interface import SchedulerInterface
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason
from vllm.v1.engine.beam_search import BeamSearch, Candidates, FinishedBeam
from vllm.v1.engine.parallel_sampling import sibling_request_ids
from vllm.v1.request import Request, RequestStatus

logger = init_logger(__name__)

_NOTHING_TO_TAKE = "every token is forbidden, or none has a logprob that is a number"


@dataclass
class _BeamGroup:
    """One prompt's search. `root` is the client's request, which is never scheduled itself;
    `request_ids` the client's ids, one for each sequence; `waits_for` the place in
    `search.running` of each beam that is under way, by its request's id."""

    root: Request
    search: BeamSearch
    request_ids: list[str]
    num_steps: int = 0
    waits_for: dict[str, int] = field(default_factory=dict)
    candidates: dict[int, Candidates] = field(default_factory=dict)
    first_output: EngineCoreOutput | None = None


class BeamGroups:
    """The beam searches under way."""

    def __init__(self, scheduler: SchedulerInterface, model_config: ModelConfig) -> None:
        self._scheduler = scheduler
        self._model_config = model_config
        self._forced_bos_token_id = None
        if model_config.is_encoder_decoder:
            generation_config = {
                **model_config.try_get_generation_config(),
                **model_config.override_generation_config,
            }
            self._forced_bos_token_id = generation_config.get("forced_bos_token_id")
        self._group_of: dict[str, _BeamGroup] = {}
        self._group_of_beam: dict[str, _BeamGroup] = {}

    def add_request(self, request: Request) -> None:
        """Begins the search that the request's parameters ask for.

        Raises:
            ValueError: its id is in use.
        """
        params = request.sampling_params
        request_ids = sibling_request_ids(request.request_id, params.beam_search.beam_width)
        if any(request_id in self._group_of for request_id in request_ids):
            raise ValueError(f"request id {request.request_id!r} is in use")
        search = self._make_search(request)
        request.sampling_params = copy.copy(params)
        request.sampling_params.logprobs = _num_logprobs(params, search.num_candidates)
        group = _BeamGroup(request, search, request_ids)
        self._group_of.update(dict.fromkeys(request_ids, group))
        self._queue_beams(group)

    def _make_search(self, request: Request) -> BeamSearch:
        params = request.sampling_params
        stop_token_ids = set(params.stop_token_ids)
        if params.eos_token_id is not None and not params.ignore_eos:
            stop_token_ids.add(params.eos_token_id)
        num_left = self._model_config.max_model_len - request.num_prompt_tokens
        return BeamSearch(
            params.beam_search,
            max_tokens=max(1, min(request.max_tokens, num_left)),
            stop_token_ids=frozenset(stop_token_ids),
            num_counted_before=self._num_forced_tokens(request.prompt_token_ids),
            num_told=sys.maxsize if params.logprobs == -1 else params.logprobs,
        )

    def _num_forced_tokens(self, decoder_prompt: list[int]) -> int:
        """Of a decoder prompt that is nothing but the start token and the BOS that the model
        forces, the BOS counts as generated: Transformers draws it."""
        is_forced = len(decoder_prompt) == 2 and decoder_prompt[1] == self._forced_bos_token_id
        return 1 if is_forced else 0

    def _queue_beams(self, group: _BeamGroup) -> None:
        root = group.root
        for place, beam in enumerate(group.search.running):
            request_id = f"{root.request_id}/{group.num_steps}.{place}"
            group.waits_for[request_id] = place
            self._group_of_beam[request_id] = group
            self._scheduler.add_request(root.fork(request_id, beam.token_ids(), place))
        group.num_steps += 1

    def abort(self, request_ids: Iterable[str]) -> list[str]:
        """Ends the searches among `request_ids`; returns the scheduler's requests to end instead:
        those of beams under way, and what is no search."""
        to_end: list[str] = []
        for request_id in request_ids:
            group = self._group_of.get(request_id)
            to_end.extend([request_id] if group is None else self._forget(group))
        return to_end

    def _forget(self, group: _BeamGroup) -> list[str]:
        """Returns the requests of its beams that are under way."""
        for request_id in group.request_ids:
            del self._group_of[request_id]
        for request_id in group.waits_for:
            del self._group_of_beam[request_id]
        return list(group.waits_for)

    def take_outputs(self, outputs: dict[int, EngineCoreOutputs]) -> None:
        """Takes what a step gave beams out of `outputs`, moves their searches on, and puts in what
        is to be told of those that have ended."""
        if not self._group_of_beam:
            return
        for of_client in outputs.values():
            mine = [each for each in of_client.outputs if each.request_id in self._group_of_beam]
            if mine:
                kept = [o for o in of_client.outputs if o.request_id not in self._group_of_beam]
                of_client.outputs = kept + self._take(mine)

    def _take(self, outputs: list[EngineCoreOutput]) -> list[EngineCoreOutput]:
        told: list[EngineCoreOutput] = []
        for output in outputs:
            group = self._group_of_beam.pop(output.request_id, None)
            if group is None:
                continue  # A beam beside it has failed.
            place = group.waits_for.pop(output.request_id)
            group.first_output = group.first_output or output
            if output.finish_reason is FinishReason.ERROR:
                told.append(self._fail(group, output.error_message, output.is_engine_fault))
                continue
            group.candidates[place] = _candidates_of(
                output, group.root.sampling_params.logprobs
            )
            if not group.waits_for:
                told.extend(self._advance(group))
        return told

    def _advance(self, group: _BeamGroup) -> list[EngineCoreOutput]:
        candidates, group.candidates = group.candidates, {}
        group.search.advance([candidates[place] for place in range(len(candidates))])
        if not group.search.is_done:
            self._queue_beams(group)
            return []
        if not group.search.finished:
            return [self._fail(group, _NOTHING_TO_TAKE)]
        self._forget(group)
        return _last_outputs(group)

    def _fail(
        self, group: _BeamGroup, message: str | None, is_engine_fault: bool = False
    ) -> EngineCoreOutput:
        """Ends a search, and what the client is told: the first of its ids stands for all."""
        to_end = self._forget(group)
        self._scheduler.finish_requests(to_end, RequestStatus.FINISHED_ABORTED)
        return EngineCoreOutput(
            group.request_ids[0],
            [],
            finish_reason=FinishReason.ERROR,
            error_message=message,
            is_engine_fault=is_engine_fault,
        )


def _num_logprobs(params: SamplingParams, num_candidates: int) -> int:
    """Logprobs that each step is to give: the search's candidates, and what is to be told."""
    return -1 if params.logprobs == -1 else max(num_candidates, params.logprobs or 0)


def _candidates_of(output: EngineCoreOutput, num_logprobs: int) -> Candidates:
    """Of its only position. The first column is the greedy token, and no candidate by itself.

    Args:
        num_logprobs: those that the search asked for. A step gives every request as many as any
            of them wants, and the beams of a search may be of several steps. -1: all.
    """
    rows = output.new_logprobs
    columns = slice(1, None if num_logprobs == -1 else 1 + num_logprobs)
    return Candidates(rows.logprob_token_ids[0, columns], rows.logprobs[0, columns])


def _last_outputs(group: _BeamGroup) -> list[EngineCoreOutput]:
    """A sequence for each of the client's ids. Where tokens are forbidden there may be fewer: the
    ids that are left over end as aborted."""
    told = [
        _sequence_output(group, request_id, finished)
        for request_id, finished in zip(group.request_ids, group.search.finished)
    ]
    told[0].prefill_stats = group.first_output.prefill_stats
    for request_id in group.request_ids[len(told) :]:
        told.append(EngineCoreOutput(request_id, [], finish_reason=FinishReason.ABORT))
    return told


def _sequence_output(
    group: _BeamGroup, request_id: str, finished: FinishedBeam
) -> EngineCoreOutput:
    beam, params = finished.beam, group.root.sampling_params
    is_stopped = group.search.ends_with_stop_token(beam)
    has_reason = is_stopped and (beam.token_id != params.eos_token_id or params.ignore_eos)
    return EngineCoreOutput(
        request_id,
        beam.token_ids(),
        new_logprobs=group.search.logprobs_of(beam),
        finish_reason=FinishReason.STOP if is_stopped else FinishReason.LENGTH,
        stop_reason=beam.token_id if has_reason else None,
        events=group.first_output.events,
        beam_score=float(finished.score),
    )
