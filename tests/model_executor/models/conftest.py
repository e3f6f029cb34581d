# SPDX-License-Identifier: Apache-2.0
"""Tiny random models made by Transformers, and the same models loaded here."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from vllm.config import ModelConfig, VllmConfig
from vllm.model_executor.model_loader import get_model


class PlainAttention(nn.Module):
    """Causal attention over one sequence without a cache: these tests are about everything else."""

    def __init__(
        self, num_heads, head_size, scale, num_kv_heads, per_layer_sliding_window=None, **_
    ) -> None:
        super().__init__()
        self.window = per_layer_sliding_window
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        self.head_size, self.scale = head_size, scale

    def forward(self, query, key, value):
        def heads(x: torch.Tensor, count: int) -> torch.Tensor:
            return x.reshape(x.shape[0], count, self.head_size).transpose(0, 1)[None]

        ages = torch.arange(len(query))[:, None] - torch.arange(len(query))
        output = F.scaled_dot_product_attention(
            heads(query, self.num_heads),
            heads(key, self.num_kv_heads),
            heads(value, self.num_kv_heads),
            attn_mask=(ages >= 0) & (ages < (self.window or len(query))),
            scale=self.scale,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1).reshape(query.shape[0], -1)


@pytest.fixture
def plain_attention(monkeypatch) -> None:
    monkeypatch.setattr("vllm.model_executor.models.llama.Attention", PlainAttention)


@pytest.fixture
def load() -> Callable[..., nn.Module]:
    """Load a model directory or file as the engine does."""

    def load(path: Path, dtype: str = "float32", load_format: str = "auto") -> nn.Module:
        config = VllmConfig(model_config=ModelConfig(model=str(path), dtype=dtype))
        config.load_config.load_format = load_format
        config.load_config.use_tqdm_on_load = False
        return get_model(vllm_config=config)

    return load


@pytest.fixture
def tiny_llama(tmp_path) -> Callable[..., tuple[Path, nn.Module]]:
    """(directory, Transformers' model) of a random Llama; keyword arguments change its config."""

    def make(**changes) -> tuple[Path, nn.Module]:
        from transformers import LlamaConfig, LlamaForCausalLM

        fields = dict(
            vocab_size=131,
            hidden_size=48,
            intermediate_size=80,
            num_hidden_layers=3,
            num_attention_heads=6,
            num_key_value_heads=2,
            max_position_embeddings=512,
            initializer_range=0.3,
        )
        torch.manual_seed(0)
        model = LlamaForCausalLM(LlamaConfig(**{**fields, **changes})).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which hide faults
                nn.init.normal_(parameter, mean=1.0 if "norm" in name else 0.0, std=0.2)
        model.save_pretrained(tmp_path)
        return tmp_path, model

    return make
