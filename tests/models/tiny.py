# SPDX-License-Identifier: Apache-2.0
"""Tiny random models of many families, made by Transformers, and what it generates with them."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

TOKENS_PER_PAGE = 16
NUM_NEW_TOKENS = 12
VOCAB_SIZE = 131


@dataclass(frozen=True)
class Family:
    """A family by Transformers' names. `config` is added to `_COMMON`, whose fields are renamed or
    (None) left out by `names`."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    names: dict[str, str | None] = field(default_factory=dict)


_COMMON = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=48,
    intermediate_size=80,
    num_hidden_layers=3,
    num_attention_heads=6,
    num_key_value_heads=2,
    max_position_embeddings=512,
    initializer_range=0.3,
    bos_token_id=0,
    eos_token_id=1,
    pad_token_id=2,
)
_NO_GQA: dict[str, str | None] = {"num_key_value_heads": None}
_GPT2_NAMES: dict[str, str | None] = {
    "hidden_size": "n_embd",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "max_position_embeddings": "n_positions",
    "intermediate_size": "n_inner",
    **_NO_GQA,
}
_YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0}
_WINDOWS = dict(
    layer_types=["sliding_attention", "full_attention", "sliding_attention"], sliding_window=21
)
# Scaled embeddings that are also the output projection say each token after itself for ever.
_UNTIED = dict(tie_word_embeddings=False)

NATIVE = {
    "llama": Family("llama", dict(attention_bias=True, mlp_bias=True, tie_word_embeddings=True)),
    "llama-linear": Family(
        "llama", dict(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0})
    ),
    "llama-dynamic": Family(
        "llama", dict(rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    ),
    "llama-llama3": Family(
        "llama",
        dict(
            rope_parameters={
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        ),
    ),
    "llama-yarn": Family(
        "llama", dict(rope_parameters={**_YARN, "original_max_position_embeddings": 128})
    ),
    "mistral": Family("mistral", dict(sliding_window=21)),
    "qwen2": Family(
        "qwen2", dict(use_sliding_window=True, sliding_window=21, max_window_layers=1)
    ),
    "qwen3": Family(
        "qwen3",
        dict(head_dim=16, rope_parameters={**_YARN, "original_max_position_embeddings": 128}),
    ),
    "gemma2": Family(
        "gemma2", dict(head_dim=16, query_pre_attn_scalar=24, **_UNTIED, **_WINDOWS)
    ),
    "gemma3": Family(
        "gemma3_text",
        dict(
            **_UNTIED,
            head_dim=16,
            query_pre_attn_scalar=24,
            final_logit_softcapping=10.0,
            num_hidden_layers=6,
            sliding_window=21,
            layer_types=(["sliding_attention"] * 2 + ["full_attention"]) * 2,
            rope_parameters={
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
            },
        ),
    ),
    "gpt2": Family("gpt2", dict(scale_attn_by_inverse_layer_idx=True), _GPT2_NAMES),
}

FALLBACK = {
    "gpt_neox": Family("gpt_neox", dict(hidden_act="gelu"), _NO_GQA),
    "opt": Family(
        "opt",
        dict(word_embed_proj_dim=48),
        {"intermediate_size": "ffn_dim", "initializer_range": "init_std", **_NO_GQA},
    ),
    "phi": Family("phi"),
    "phi3": Family("phi3", dict(sliding_window=21)),
    "olmo": Family("olmo"),
    "olmo2": Family("olmo2"),
    "stablelm": Family("stablelm", dict(use_qkv_bias=True)),
    "granite": Family("granite", dict(logits_scaling=2.0, attention_multiplier=0.2)),
    "cohere": Family("cohere", dict(logit_scale=0.5)),
    "cohere2": Family("cohere2", dict(logit_scale=0.5, **_WINDOWS)),
    "starcoder2": Family("starcoder2", dict(sliding_window=21)),
    "smollm3": Family("smollm3", dict(no_rope_layers=[1, 0, 1])),
    "helium": Family("helium", dict(head_dim=8)),
    "nemotron": Family("nemotron"),
    "gptj": Family("gptj", dict(rotary_dim=4), {**_GPT2_NAMES}),
    "codegen": Family("codegen", dict(rotary_dim=4, num_attention_heads=4), {**_GPT2_NAMES}),
    "gpt_bigcode": Family("gpt_bigcode", {}, _GPT2_NAMES),
    "glm": Family("glm", dict(head_dim=8)),
    "gemma": Family("gemma", dict(head_dim=8, **_UNTIED)),
    "persimmon": Family("persimmon", {}, _NO_GQA),
    "mixtral": Family("mixtral", dict(num_local_experts=4, num_experts_per_tok=2)),
    "qwen3_moe": Family(
        "qwen3_moe",
        dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, head_dim=8),
    ),
    "olmoe": Family("olmoe", dict(num_experts=4, num_experts_per_tok=2)),
    "deepseek_v2": Family(
        "deepseek_v2",
        dict(
            num_key_value_heads=6,
            kv_lora_rank=16,
            q_lora_rank=24,
            qk_rope_head_dim=8,
            qk_nope_head_dim=8,
            v_head_dim=8,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
        ),
    ),
}

# What must be refused, and why.
_NO_INTERFACE = "do not call Transformers' attention interface"
REFUSED = {
    "bloom": (Family("bloom", {}, {**_GPT2_NAMES, "hidden_size": "hidden_size"}), _NO_INTERFACE),
    "falcon": (Family("falcon"), _NO_INTERFACE),
    "mpt": (
        Family("mpt", {}, {**_GPT2_NAMES, "n_embd": "d_model", "hidden_size": "d_model"}),
        _NO_INTERFACE,
    ),
    "gpt_oss": (
        Family("gpt_oss", dict(num_local_experts=4, num_experts_per_tok=2, head_dim=8)),
        r"layers.0.self_attn passes s_aux= to attention",
    ),
    "bert": (Family("bert", {}, _NO_GQA), "neither causal nor causal with a sliding window"),
    "recurrent_gemma": (Family("recurrent_gemma"), r"attention interface: 0, 1"),
    "mamba": (Family("mamba"), "no layer calls"),
    "diffllama": (Family("diffllama"), "attends more than once"),
    "falcon_h1": (
        Family(
            "falcon_h1",
            dict(
                mamba_d_ssm=48,
                mamba_n_heads=6,
                mamba_d_head=8,
                mamba_d_state=8,
                mamba_n_groups=1,
                head_dim=8,
            ),
        ),
        "cannot be served",
    ),
}


def make_config(family: Family):
    from transformers import CONFIG_MAPPING

    fields = {}
    for name, value in {**_COMMON, **family.config}.items():
        new_name = family.names.get(name, name)
        if new_name is not None:
            fields[new_name] = value
    return CONFIG_MAPPING[family.model_type](**fields)


def make_model(family: Family, folder: Path) -> nn.Module:
    """A random model of the family, saved to `folder`; the same each time."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(make_config(family)).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which hide faults
            is_scale = "norm" in name or "ln_" in name
            mean = 1.0 if is_scale and name.endswith("weight") and parameter.mean() > 0.5 else 0.0
            nn.init.normal_(parameter, mean=mean, std=0.2)
    model.generation_config.eos_token_id = None
    model.save_pretrained(folder)
    return model


@cache
def make_prompts(extra_lengths: tuple[int, ...] = ()) -> tuple[tuple[int, ...], ...]:
    """Prompts of lengths around a page's, the last of which begins as the one before."""
    rng = random.Random(0)
    n = TOKENS_PER_PAGE
    lengths = (n - 1, n, n + 1, 3 * n, *extra_lengths)
    prompts = [[rng.randrange(3, VOCAB_SIZE) for _ in range(length)] for length in lengths]
    prompts.append(prompts[3][: 2 * n + 3] + [5, 6, 7])
    return tuple(tuple(prompt) for prompt in prompts)


@torch.inference_mode()
def prompt_logprobs(model: nn.Module, prompt: Sequence[int]) -> list[float]:
    """The logprob of each token of a prompt but the first."""
    ids = torch.tensor([prompt])
    logprobs = model(ids).logits[0, :-1].log_softmax(dim=-1)
    return logprobs.gather(1, ids[0, 1:, None])[:, 0].tolist()


@torch.inference_mode()
def generate(model: nn.Module, prompts, num_new_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    """What Transformers generates greedily, prompt by prompt."""
    outputs = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        generated = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=num_new_tokens,
            min_new_tokens=num_new_tokens,
            eos_token_id=None,
            pad_token_id=2,
        )
        outputs.append(generated[0, len(prompt) :].tolist())
    return outputs
