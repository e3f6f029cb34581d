# SPDX-License-Identifier: Apache-2.0
"""When the runner calls a KV connector's worker half."""

from __future__ import annotations

from tests.models.tiny import NATIVE, make_model
from vllm import LLM, SamplingParams
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheConfig

CHANGED: list[bool] = []
"""For each call of `handle_preemptions`: whether a cache was written to since the last step."""


class Witness(KVConnectorBase_V1):
    """Loads and saves nothing; remembers what the caches hold at the end of each step."""

    uses_layer_hooks = False

    def register_kv_caches(self, kv_caches):
        self._caches = kv_caches
        self._before = {}

    def handle_preemptions(self, kv_connector_metadata):
        assert self._before
        CHANGED.append(any((self._caches[n] != old).any() for n, old in self._before.items()))

    def wait_for_save(self):
        self._before = {name: cache.clone() for name, cache in self._caches.items()}

    def build_connector_meta(self, scheduler_output):
        return KVConnectorMetadata()

    def get_num_new_matched_tokens(self, request, num_computed_tokens):
        return 0, False

    def update_state_after_alloc(self, request, blocks, num_external_tokens):
        pass

    def start_load_kv(self, forward_context, **kwargs):
        pass

    wait_for_layer_load = save_kv_layer = update_state_after_alloc


def test_preemptions_are_told_before_pages_change(tmp_path, monkeypatch):
    """A pool that is too small, whose pages are zeroed when they are handed out. Guards against a
    connector that saves the pages of a preempted request and finds zeros, or another's content."""
    CHANGED.clear()
    monkeypatch.setattr(KVCacheConfig, "needs_kv_cache_zeroing", True)
    make_model(NATIVE["llama"], tmp_path)
    transfer = dict(
        kv_connector="Witness", kv_role="kv_both", kv_connector_module_path=__name__,
        kv_load_failure_policy="fail",
    )  # fmt: skip
    llm = LLM(
        model=str(tmp_path), dtype="float32", skip_tokenizer_init=True, max_model_len=128,
        num_gpu_blocks_override=12, enable_prefix_caching=False, kv_transfer_config=transfer,
    )  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [{"prompt_token_ids": list(range(3 + i, 43 + i))} for i in range(4)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [40] * 4
    assert CHANGED and not any(CHANGED)
