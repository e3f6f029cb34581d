# SPDX-License-Identifier: Apache-2.0
"""Steps that make kernels ready before the first request: those of a request that nobody sent."""

from __future__ import annotations

from collections.abc import Sequence

from vllm.multimodal.inputs import MultiModalFeatureSpec
from vllm.sampling_params import SamplingParams
from vllm.utils.math_utils import cdiv
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheConfig

_REQ_ID = "warm-up"


def warmup_steps(
    kv_cache_config: KVCacheConfig,
    prompt_len: int,
    encoder_inputs: Sequence[MultiModalFeatureSpec] = (),
) -> list[SchedulerOutput]:
    """A prompt, one token more, and the end, in pages that nobody has yet: whoever gets them writes
    before reading. No steps where pages do not suffice, or cross-attention would see nothing.

    Args:
        encoder_inputs: the request's, of a model with an encoder.
    """
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    num_encoder_tokens = sum(one.mm_position.get_num_embeds() for one in encoder_inputs)
    counts = [
        cdiv(
            num_encoder_tokens if isinstance(spec, CrossAttentionSpec) else prompt_len + 1,
            spec.block_size,
        )
        for spec in specs
    ]
    if prompt_len < 1 or 0 in counts or 1 + sum(counts) > kv_cache_config.num_blocks:
        return []
    pages = iter(range(1, 1 + sum(counts)))
    block_ids = tuple([next(pages) for _ in range(count)] for count in counts)
    params = SamplingParams(temperature=0.0, max_tokens=2)
    request = NewRequestData(
        _REQ_ID, [0] * prompt_len, params, block_ids, 0, mm_features=list(encoder_inputs)
    )
    prompt = SchedulerOutput.make_empty()
    if encoder_inputs:
        prompt.scheduled_encoder_inputs[_REQ_ID] = list(range(len(encoder_inputs)))
    prompt.scheduled_new_reqs.append(request)
    decode = SchedulerOutput.make_empty()
    decode.scheduled_cached_reqs = CachedRequestData([_REQ_ID], [None], [prompt_len], [1])
    for step, num_tokens in ((prompt, prompt_len), (decode, 1)):
        step.num_scheduled_tokens[_REQ_ID] = step.total_num_scheduled_tokens = num_tokens
    end = SchedulerOutput.make_empty()
    end.finished_req_ids.add(_REQ_ID)
    end.free_encoder_mm_hashes.extend(one.identifier for one in encoder_inputs)
    return [prompt, decode, end]
