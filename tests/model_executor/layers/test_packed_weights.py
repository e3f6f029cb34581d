# SPDX-License-Identifier: Apache-2.0
"""Products with packed weights: the values of the plain ones, the same bits for any batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.linear import ReplicatedLinear
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.base_loader import process_weights_after_loading
from vllm.model_executor.utils import set_default_torch_dtype

BF16 = torch.bfloat16
_probe = torch.empty(32, 2, dtype=BF16)
needs_pairs = pytest.mark.skipif(
    not cpu_ops.can_pack(_probe), reason="this CPU has no bfloat16 products"
)


def weights(n: int, k: int) -> torch.Tensor:
    torch.manual_seed(n + k)
    return (torch.randn(n, k) / k**0.5).to(BF16)


def test_what_is_packed():
    """Other dtypes and sizes that fill no panel stay plain; so does everything on a CPU without
    bfloat16 products."""
    assert not cpu_ops.can_pack(torch.empty(64, 64))
    assert not cpu_ops.can_pack(torch.empty(33, 64, dtype=BF16))
    assert not cpu_ops.can_pack(torch.empty(64, 63, dtype=BF16))
    assert not cpu_ops.can_pack(torch.empty(64, 64, dtype=BF16, device="meta"))


@needs_pairs
@pytest.mark.parametrize("shape", [(32, 2), (96, 64), (64, 1000)], ids=str)
def test_packing_loses_nothing(shape):
    weight = weights(*shape)
    packed = cpu_ops.pack(weight)
    assert cpu_ops.is_packed(packed) and packed.numel() == weight.numel()
    assert torch.equal(cpu_ops.unpack(packed), weight)


@needs_pairs
@pytest.mark.parametrize("rows", [1, 2, 3, 5, 7, 9, 11, 12, 13, 25, 191, 192, 193, 400])
@pytest.mark.parametrize("with_bias", [False, True])
def test_product(rows, with_bias):
    """As near to float64 as one rounding to bfloat16; no row or column is left out; strided rows
    and leading dimensions as in torch's."""
    n, k = 96, 70
    weight, bias = weights(n, k), torch.randn(n).to(BF16) if with_bias else None
    x = torch.randn(rows, k + 6).to(BF16)[:, 3 : 3 + k]
    expected = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    packed = cpu_ops.pack(weight)
    actual = cpu_ops.linear(x, packed, bias)
    error = (actual.double() - expected).abs() / expected.abs().clamp(min=1)
    assert error.max() <= 2**-8
    assert torch.equal(cpu_ops.linear(x.reshape(1, rows, k), packed, bias)[0], actual)


@needs_pairs
def test_bits_do_not_depend_on_the_batch():
    """A request's numbers are the same alone, in a batch, and in a prompt: guards against tiles
    that sum in another order."""
    x, packed = torch.randn(405, 576).to(BF16), cpu_ops.pack(weights(64, 576))
    whole = cpu_ops.linear(x, packed)
    for first, count in [(0, 1), (404, 1), (7, 2), (50, 12), (100, 193), (3, 64)]:
        part = cpu_ops.linear(x[first : first + count], packed)
        assert torch.equal(part, whole[first : first + count])


@needs_pairs
def test_no_value_of_another_row_or_column():
    """NaN in one row of x stays there; in one output's weights, in that output."""
    x, weight = torch.randn(30, 64).to(BF16), weights(96, 64)
    x[4] = float("nan")
    weight[40] = float("nan")
    out = cpu_ops.linear(x, cpu_ops.pack(weight)).isnan()
    expected = torch.zeros_like(out)
    expected[4], expected[:, 40] = True, True
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, BF16], ids=str)
def test_embedding(dtype):
    table = torch.randn(64, 34).to(dtype)
    ids = torch.tensor([[0, 31, 32], [63, 5, 5]])
    assert torch.equal(cpu_ops.embedding(ids, table), F.embedding(ids, table))
    assert cpu_ops.embedding(ids[:, :0], table).shape == (2, 0, 34)
    for bad in (-1, 64):
        with pytest.raises(IndexError, match="64 rows"):
            cpu_ops.embedding(torch.tensor([3, bad]), table)
    if cpu_ops.can_pack(table):
        assert torch.equal(cpu_ops.embedding(ids, cpu_ops.pack(table)), F.embedding(ids, table))


@needs_pairs
def test_layers_pack_once():
    """Linear layers and output projections are packed, an embedding of its own is not; one that is
    tied shares the memory and still finds its rows."""
    with set_current_vllm_config(VllmConfig()), set_default_torch_dtype(BF16):
        model = torch.nn.ModuleDict(
            {
                "embed": VocabParallelEmbedding(64, 32),
                "own": VocabParallelEmbedding(64, 32),
                "head": ParallelLMHead(64, 32),
                "linear": ReplicatedLinear(32, 64, return_bias=False),
            }
        )
        model["head"].tie_weights(model["embed"])
    for parameter in model.parameters():
        parameter.data.normal_()
    x, ids = torch.randn(3, 32).to(BF16), torch.tensor([0, 63, 17])
    before = [model["linear"](x), model["embed"](ids), model["own"](ids)]
    process_weights_after_loading(model, BF16)
    after = [model["linear"](x), model["embed"](ids), model["own"](ids)]
    assert torch.equal(before[1], after[1]) and torch.equal(before[2], after[2])
    assert torch.allclose(before[0].float(), after[0].float(), atol=0.1)
    packed = {name: cpu_ops.is_packed(layer.weight) for name, layer in model.items()}
    assert packed == {"embed": True, "own": False, "head": True, "linear": True}
    assert model["head"].weight is model["embed"].weight
    assert sum(p.numel() for p in model.parameters()) == 3 * 64 * 32 + 64
