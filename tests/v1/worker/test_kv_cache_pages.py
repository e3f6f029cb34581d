# SPDX-License-Identifier: Apache-2.0
"""Pages that a step wants zeroed or copied are, before it runs, in every layer."""

from __future__ import annotations

import torch

from tests.models.tiny import NATIVE, make_model
from vllm import LLM, SamplingParams
from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
from vllm.v1.core.sched.output import SchedulerOutput


def layer_pages(worker, pages: list[int]) -> list[torch.Tensor]:
    """Of each layer, what it holds in `pages`."""
    return [cache[pages].clone() for cache in worker.model_runner.kv_caches]


def run_step(worker, zero=None, copies=None, pages=()) -> list[torch.Tensor]:
    step = SchedulerOutput.make_empty()
    step.new_block_ids_to_zero, step.kv_cache_block_copies = zero, copies
    worker.execute_model(step)
    return layer_pages(worker, list(pages))


def test_the_runner_zeroes_and_copies(tmp_path):
    """A page zeroed and copied into holds the copy; two that change places do; others stay."""
    make_model(NATIVE["llama"], tmp_path)
    llm = LLM(
        model=str(tmp_path),
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=64,
        block_size=4,
        num_gpu_blocks_override=9,
    )
    sampling = SamplingParams(max_tokens=1, detokenize=False)
    llm.generate({"prompt_token_ids": list(range(3, 21))}, sampling, use_tqdm=False)
    (before,) = llm.collective_rpc(layer_pages, args=([0, 1, 2, 3, 4, 5],))
    assert all(page[1:].abs().amax(dim=(1, 2, 3)).min() > 0 for page in before), "would prove nothing"
    copies = [KVCacheBlockCopy(1, 2), KVCacheBlockCopy(2, 1), KVCacheBlockCopy(5, 4)]
    (after,) = llm.collective_rpc(run_step, args=([3, 4], copies, range(6)))
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[[0, 1, 2, 4, 5]], old[[0, 2, 1, 5, 5]])
        assert not new[3].any()
