# SPDX-License-Identifier: Apache-2.0
"""Published configs at their full size, on the meta device: as many weights as their authors count,
and a KV cache planned by hand."""

from __future__ import annotations

import json

import pytest
import torch

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.utils import set_default_torch_dtype
from vllm.v1.core.kv_cache_utils import get_kv_cache_configs
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

LLAMA_3_8B = dict(
    architectures=["LlamaForCausalLM"], model_type="llama", hidden_size=4096,
    intermediate_size=14336, num_attention_heads=32, num_key_value_heads=8, num_hidden_layers=32,
    max_position_embeddings=8192, vocab_size=128256, rope_theta=500000.0, rms_norm_eps=1e-5,
    tie_word_embeddings=False,
)  # fmt: skip
QWEN2_5_0_5B = dict(
    architectures=["Qwen2ForCausalLM"], model_type="qwen2", hidden_size=896,
    intermediate_size=4864, num_attention_heads=14, num_key_value_heads=2, num_hidden_layers=24,
    max_position_embeddings=32768, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
QWEN3_0_6B = dict(
    architectures=["Qwen3ForCausalLM"], model_type="qwen3", hidden_size=1024,
    intermediate_size=3072, num_attention_heads=16, num_key_value_heads=8, num_hidden_layers=28,
    head_dim=128, max_position_embeddings=40960, vocab_size=151936, tie_word_embeddings=True,
)  # fmt: skip
GEMMA_3_1B = dict(
    architectures=["Gemma3ForCausalLM"], model_type="gemma3_text", hidden_size=1152,
    intermediate_size=6912, num_attention_heads=4, num_key_value_heads=1, num_hidden_layers=26,
    head_dim=256, max_position_embeddings=32768, vocab_size=262144, sliding_window=512,
    sliding_window_pattern=6, query_pre_attn_scalar=256,
)  # fmt: skip
GPT_2 = dict(
    architectures=["GPT2LMHeadModel"], model_type="gpt2", n_embd=768, n_head=12, n_layer=12,
    n_positions=1024, vocab_size=50257,
)  # fmt: skip
PADDING_ROWS = (-50257 % 64) * 768


def make(folder, config: dict) -> tuple[torch.nn.Module, VllmConfig]:
    (folder / "config.json").write_text(json.dumps(config))
    vllm_config = VllmConfig(model_config=ModelConfig(model=str(folder), dtype="bfloat16"))
    with torch.device("meta"), set_default_torch_dtype(torch.bfloat16):
        return initialize_model(vllm_config), vllm_config


@pytest.mark.parametrize(
    ("config", "num_weights"),
    [
        pytest.param(LLAMA_3_8B, 8_030_261_248, id="Llama-3-8B"),
        pytest.param(QWEN2_5_0_5B, 494_032_768, id="Qwen2.5-0.5B"),
        pytest.param(QWEN3_0_6B, 596_049_920, id="Qwen3-0.6B"),
        pytest.param(GEMMA_3_1B, 999_885_952, id="Gemma-3-1B"),
        pytest.param(GPT_2, 124_439_808 + PADDING_ROWS, id="GPT-2"),
    ],
)
def test_number_of_weights(tmp_path, config, num_weights):
    """Guards against a projection, bias or norm too many or too few, and untied embeddings."""
    model, _ = make(tmp_path, config)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_weights


def test_llama_3_8b_plans_its_cache(tmp_path):
    """A page of 16 tokens is 2 MiB: 32 layers of 8 heads of 128, K and V, 2 bytes each."""
    _, config = make(tmp_path, LLAMA_3_8B)
    specs = get_kv_cache_spec(config)
    assert len(specs) == 32
    (plan,) = get_kv_cache_configs(config, [specs], [4 << 30])
    assert plan.num_blocks == (4 << 30) // (2 << 20)
    assert sum(tensor.size for tensor in plan.kv_cache_tensors) == 4 << 30
    assert len(plan.kv_cache_groups) == 1


def test_gemma_3_1b_groups_its_layers(tmp_path):
    """22 layers with a window and 4 without: groups whose pages are of one size share a pool."""
    _, config = make(tmp_path, GEMMA_3_1B)
    (plan,) = get_kv_cache_configs(config, [get_kv_cache_spec(config)], [1 << 30])
    windows = [getattr(g.kv_cache_spec, "sliding_window", None) for g in plan.kv_cache_groups]
    assert None in windows and set(windows) == {None, 512}
    by_window = {w: 0 for w in windows}
    for group, window in zip(plan.kv_cache_groups, windows):
        by_window[window] += len(group.layer_names)
    assert by_window == {None: 4, 512: 22}
