# SPDX-License-Identifier: Apache-2.0
"""The GPU worker's memory arithmetic and its warm-up, without a GPU; the whole of it runs on the
emulated platforms."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    SlidingWindowSpec,
)
from vllm.v1.worker import gpu_worker
from vllm.v1.worker.gpu.warmup import warmup_steps
from vllm.v1.worker.gpu_worker import MemoryUse, Worker

GiB = 1 << 30
SHAPE = dict(block_size=16, num_kv_heads=1, head_size=8, dtype=torch.float32)


@pytest.mark.parametrize(
    "free, peak, expected",
    [
        (60, 15, 50),  # 20 GiB went, most of them by us
        (85, 15, 55),  # somebody else gave memory back meanwhile: ours counts
        (5, 15, 0),  # nothing is left
    ],
)
def test_what_is_left_for_the_cache(free, peak, expected):
    memory = MemoryUse(free_at_start=80 * GiB, requested=70 * GiB)
    assert memory.for_kv_cache(free * GiB, peak * GiB) == expected * GiB


class Device:
    """A GPU of 80 GiB as the platform speaks of it."""

    def __init__(self, *free: int) -> None:
        self.free, self.calls = list(free), []

    def mem_get_info(self, device):
        return (self.free.pop(0) if len(self.free) > 1 else self.free[0]) * GiB, 80 * GiB

    def get_torch_device(self, local_rank):
        return torch.device("meta", local_rank)

    def get_current_memory_usage(self, device):
        return float(10 * GiB)

    def __getattr__(self, name):
        return lambda *args: self.calls.append(name)


def make_worker(monkeypatch, device: Device, share=0.9, given=None) -> Worker:
    monkeypatch.setattr(gpu_worker, "current_platform", device)
    runner = SimpleNamespace(profile_run=lambda: device.calls.append("profile_run"))
    monkeypatch.setattr(gpu_worker, "GPUModelRunner", lambda config, where: runner)
    worker = Worker.__new__(Worker)
    worker.vllm_config, worker.local_rank = None, 3
    worker.model_config = SimpleNamespace(dtype="float16", seed=0)
    worker.cache_config = SimpleNamespace(
        gpu_memory_utilization=share, kv_cache_memory_bytes=given
    )
    worker.init_device()
    return worker


def test_memory_is_measured_after_the_largest_step(monkeypatch):
    """In this order: the step, wait, look, and only then give back what torch holds; looked at
    later, the step's own memory would count as free."""
    device = Device(80, 55)
    worker = make_worker(monkeypatch, device)
    assert worker.device == torch.device("meta", 3) and device.calls[0] == "set_device"
    assert worker.determine_available_memory() == 72 * GiB - 25 * GiB
    assert device.calls[-3:] == ["profile_run", "synchronize", "empty_cache"]


def test_a_device_that_is_taken_is_refused(monkeypatch):
    with pytest.raises(ValueError, match="40.00 of 80.00 GiB are free .*--gpu-memory-utilization 0.9"):
        make_worker(monkeypatch, Device(40))
    given = make_worker(monkeypatch, Device(40), given=30 * GiB)
    assert given.determine_available_memory() == 30 * GiB


def test_a_cache_that_does_not_fit_is_refused(monkeypatch):
    worker = make_worker(monkeypatch, Device(40, 20), given=30 * GiB)
    with pytest.raises(ValueError, match="30.00 GiB does not fit: 20.00 GiB.*kv-cache-memory-bytes"):
        worker.determine_available_memory()


def cache_config(*specs, num_blocks=8) -> KVCacheConfig:
    groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
    return KVCacheConfig(num_blocks, [], groups)


def test_warm_up_uses_pages_of_its_own_for_each_group():
    """Groups share allocations: a page in two groups would hold both at once. Page 0 is nobody's."""
    specs = FullAttentionSpec(**SHAPE), SlidingWindowSpec(**SHAPE, sliding_window=4)
    prompt, decode, end = warmup_steps(cache_config(*specs), prompt_len=16)
    pages = [page for ids in prompt.scheduled_new_reqs[0].block_ids for page in ids]
    assert len(set(pages)) == len(pages) == 4 and 0 not in pages
    assert (prompt.total_num_scheduled_tokens, decode.total_num_scheduled_tokens) == (16, 1)
    assert decode.scheduled_cached_reqs.num_computed_tokens == [16]
    assert end.finished_req_ids == set(prompt.num_scheduled_tokens)


def test_warm_up_with_an_encoder():
    """Cross-attention's kernels are made ready too: pages for the encoder's tokens, which the first
    step encodes and the last gives up."""
    specs = FullAttentionSpec(**SHAPE), CrossAttentionSpec(**SHAPE)
    position = PlaceholderRange(0, 3 * SHAPE["block_size"] + 1)
    feature = MultiModalFeatureSpec(None, "text", "largest", position)
    config = cache_config(*specs, num_blocks=16)
    prompt, decode, end = warmup_steps(config, 4, [feature])
    (request,) = prompt.scheduled_new_reqs
    assert [len(ids) for ids in request.block_ids] == [1, 4] and request.mm_features == [feature]
    assert prompt.scheduled_encoder_inputs == {request.req_id: [0]}
    assert not decode.scheduled_encoder_inputs and end.free_encoder_mm_hashes == ["largest"]


@pytest.mark.parametrize(
    "config, prompt_len",
    [
        (cache_config(FullAttentionSpec(**SHAPE), num_blocks=2), 16),
        (cache_config(FullAttentionSpec(**SHAPE)), 0),
        (cache_config(FullAttentionSpec(**SHAPE), CrossAttentionSpec(**SHAPE)), 4),
    ],
)
def test_no_warm_up_where_it_cannot_be(config, prompt_len):
    """Too few pages, a model of one token, an encoder whose output there is not."""
    assert warmup_steps(config, prompt_len) == []
