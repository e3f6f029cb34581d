# SPDX-License-Identifier: Apache-2.0
"""Norm, activations and rotary embeddings: the device's form against plain torch and
Transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm.model_executor.layers.activation import get_act_and_mul_fn, get_act_fn
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, LayerNorm, RMSNorm
from vllm.model_executor.layers.learned_positions import LearnedPositions
from vllm.model_executor.layers.rotary_embedding import get_rope

DTYPES = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def rand(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, generator=torch.manual_seed(sum(shape))).to(dtype)


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = DTYPES[actual.dtype]
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("has_weight", [True, False])
def test_rms_norm(dtype, has_weight):
    """With a residual: the sum comes back rounded to the dtype, and its norm."""
    norm = RMSNorm(48, eps=1e-5, has_weight=has_weight, dtype=dtype)
    if has_weight:
        norm.weight.data.copy_(rand(48))
    assert ("weight" in dict(norm.named_parameters())) == has_weight
    x, residual = rand(7, 48, dtype=dtype), rand(48, 7, dtype=dtype).T.contiguous()
    close(norm(x), norm.forward_native(x))
    expected, expected_sum = norm.forward_native(x.clone(), residual.clone())
    actual, actual_sum = norm(x.clone(), residual.clone())
    close(actual, expected)
    assert torch.equal(actual_sum, expected_sum)


def test_rms_norm_is_transformers():
    """The reference itself: bit for bit what Transformers' Llama computes."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    for dtype in DTYPES:
        theirs = LlamaRMSNorm(48, eps=1e-5).to(dtype)
        theirs.weight.data.copy_(rand(48))
        ours = RMSNorm(48, eps=1e-5, dtype=dtype)
        ours.weight.data.copy_(theirs.weight)
        x = rand(7, 48, dtype=dtype)
        assert torch.equal(ours.forward_native(x), theirs(x))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_pytorch_tanh"])
def test_gated_activations(name, dtype):
    """act(first half) * second half, in every dtype."""
    layer, x = get_act_and_mul_fn(name), rand(5, 64, dtype=dtype)
    close(layer(x), layer.forward_native(x))
    gate, up = x.float().chunk(2, dim=-1)
    act = (
        F.silu(gate)
        if name == "silu"
        else F.gelu(gate, approximate="tanh" if "tanh" in name else "none")
    )
    close(layer(x), (act * up).to(dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_learned_positions(dtype):
    """The device's form and torch's have the same bits, with rows in front that no position has."""
    layer = LearnedPositions(9, 48, offset=2).to(dtype)
    layer.weight.data.copy_(rand(11, 48))
    x, positions = rand(4, 48, dtype=dtype), torch.tensor([8, 0, 3, 3])
    assert torch.equal(layer(x, positions), layer.forward_native(x, positions))
    assert torch.equal(layer(x, positions)[1], x[1] + layer.weight[2])


def test_activations_are_transformers():
    """A config's `hidden_act` means the same function."""
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 101)
    for name in (
        "gelu",
        "gelu_new",
        "gelu_fast",
        "gelu_pytorch_tanh",
        "quick_gelu",
        "relu",
        "relu2",
    ):
        torch.testing.assert_close(get_act_fn(name)(x), ACT2FN[name](x), rtol=1e-6, atol=1e-6)
    for name in ("silu", "tanh", "sigmoid"):
        assert torch.equal(get_act_fn(name)(x), ACT2FN[name](x))


def test_unknown_activations_are_refused():
    """The line lists what there is."""
    with pytest.raises(ValueError, match="'softsign' is not supported; supported: .*silu"):
        get_act_fn("softsign")
    with pytest.raises(ValueError, match="gated activation 'relu'"):
        get_act_and_mul_fn("relu")


@pytest.mark.parametrize("dtype", DTYPES)
def test_gemma_norm_is_transformers(dtype):
    """The weight is added to one and applied before rounding, unlike Llama's."""
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm

    norm, theirs = GemmaRMSNorm(48, eps=1e-5).to(dtype), Gemma3RMSNorm(48, eps=1e-5).to(dtype)
    for module in (norm, theirs):
        module.weight.data.copy_(rand(48))
    x, residual = rand(7, 48, dtype=dtype), rand(48, 7, dtype=dtype).T.contiguous()
    close(norm(x), theirs(x))
    total = x + residual
    actual, actual_sum = norm(x, residual)
    close(actual, theirs(total))
    assert torch.equal(actual_sum, total)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bias", [True, False])
def test_layer_norm(dtype, bias):
    """With a residual: the sum comes back rounded to the dtype, and its norm."""
    norm = LayerNorm(48, eps=1e-5, bias=bias).to(dtype)
    norm.weight.data.copy_(rand(48))
    if bias:
        norm.bias.data.copy_(rand(1, 48)[0])
    x, residual = rand(7, 48, dtype=dtype), rand(48, 7, dtype=dtype).T.contiguous()
    close(norm(x), norm.forward_native(x))
    expected, expected_sum = norm.forward_native(x.clone(), residual.clone())
    actual, actual_sum = norm(x.clone(), residual.clone())
    close(actual, expected)
    assert torch.equal(actual_sum, expected_sum)


ROPES = {
    "default": {"rope_type": "default", "rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    "llama3": {
        "rope_type": "llama3",
        "rope_theta": 5e5,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 3.0},
    "yarn": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    },
    "yarn of DeepSeek": {
        "rope_type": "yarn",
        "rope_theta": 1e4,
        "factor": 40.0,
        "mscale": 0.7,
        "mscale_all_dim": 1.0,
        "beta_fast": 8,
        "beta_slow": 2,
        "original_max_position_embeddings": 128,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 32.0,
        "truncate": False,
        "attention_factor": 1.2,
        "original_max_position_embeddings": 128,
    },
}


@pytest.mark.parametrize("name", ROPES)
def test_rotary_is_transformers(name):
    """Angles and rotation are Transformers', at every position, however long."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    heads, size, positions = 3, 16, torch.tensor([0, 1, 5, 100, 511])
    config = LlamaConfig(
        hidden_size=heads * size,
        num_attention_heads=heads,
        max_position_embeddings=512,
        rope_parameters=dict(ROPES[name]),
    )
    rope = get_rope(size, 512, rope_parameters=ROPES[name])
    query, key = rand(5, heads * size), rand(5, size)
    cos, sin = LlamaRotaryEmbedding(config)(query[None], positions[None])
    q = query.view(1, 5, heads, size).transpose(1, 2)
    k = key.view(1, 5, 1, size).transpose(1, 2)
    q, k = apply_rotary_pos_emb(q, k, cos, sin)
    expected = (q[0].transpose(0, 1).reshape(5, -1), k[0].transpose(0, 1).reshape(5, -1))
    for turned in (rope.forward_native, rope):
        for actual, want in zip(turned(positions, query.clone(), key.clone()), expected):
            torch.testing.assert_close(actual, want, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_neox_style", [True, False])
@pytest.mark.parametrize("partial", [1.0, 0.5])
def test_rotary_on_views_of_a_fused_buffer(dtype, is_neox_style, partial):
    """Queries and keys are parts of one tensor: turning them in place must not touch the values."""
    rope = get_rope(
        16, 64, is_neox_style, {"rope_theta": 1e4, "partial_rotary_factor": partial}, torch.float32
    )
    qkv, positions = rand(9, 16 * 6, dtype=dtype), torch.arange(9)
    query, key, value = qkv.split([64, 16, 16], dim=-1)
    expected = rope.forward_native(positions, query.float(), key.float())
    before = value.clone()
    actual = rope(positions, query, key)
    for got, want in zip(actual, expected):
        close(got.contiguous(), want.to(dtype))
    assert torch.equal(value, before)


def test_rotary_tables_are_shared_by_equal_layers():
    """A table for each of 80 layers would cost gigabytes."""
    first = get_rope(16, 64, rope_parameters={"rope_theta": 7.0})
    assert get_rope(16, 64, rope_parameters={"rope_theta": 7.0}) is first
    assert get_rope(16, 64, rope_parameters={"rope_theta": 8.0}) is not first
    assert first.cos_sin_cache.dtype == torch.float32


@pytest.mark.parametrize(
    ("parameters", "says"),
    [
        (
            {"rope_type": "longrope", "factor": 2.0},
            "'longrope' is not supported; supported: default, linear",
        ),
        ({"rope_type": "yarn", "factor": 2.0}, "'yarn' needs original_max_position_embeddings"),
        ({"rope_type": "linear"}, "'linear' needs factor"),
        ({"rope_type": "llama3", "factor": 2.0}, "needs low_freq_factor"),
    ],
)
def test_other_ropes_are_refused(parameters, says):
    """A scaling that is not written, or is not told in full, must not become the default one."""
    with pytest.raises(ValueError, match=says):
        get_rope(16, 64, rope_parameters=parameters)
