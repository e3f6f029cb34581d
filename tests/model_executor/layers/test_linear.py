# SPDX-License-Identifier: Apache-2.0
"""Linear and embedding layers: shards of any number of devices make up the whole."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from vllm.distributed import parallel_state
from vllm.distributed.parallel_state import GroupCoordinator
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

HIDDEN = 24


def rand(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.manual_seed(sum(shape)))


def on_each_rank(monkeypatch, world_size: int, make):
    """The layers that `make` gives on each device of a group of `world_size`."""
    layers = []
    for rank in range(world_size):
        monkeypatch.setattr(parallel_state, "_tp", GroupCoordinator(rank, world_size))
        layers.append(make())
    return layers


def fill(layer, weight: torch.Tensor, bias: torch.Tensor | None = None, *shard) -> None:
    layer.weight.weight_loader(layer.weight, weight, *shard)
    if bias is not None:
        layer.bias.weight_loader(layer.bias, bias, *shard)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_column_parallel_outputs_make_up_the_whole(monkeypatch, world_size):
    """Each device has its range of outputs, bias included."""
    weight, bias, x = rand(16, HIDDEN), rand(16), rand(5, HIDDEN)
    layers = on_each_rank(monkeypatch, world_size, lambda: ColumnParallelLinear(HIDDEN, 16))
    for layer in layers:
        fill(layer, weight, bias)
    outputs = torch.cat([layer(x)[0] for layer in layers], dim=-1)
    torch.testing.assert_close(outputs, F.linear(x, weight, bias))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_row_parallel_outputs_sum_to_the_whole(monkeypatch, world_size):
    """Each device has its range of inputs; one of them adds the bias."""
    weight, bias, x = rand(16, HIDDEN), rand(16), rand(5, HIDDEN)
    layers = on_each_rank(
        monkeypatch,
        world_size,
        lambda: RowParallelLinear(HIDDEN, 16, reduce_results=False, skip_bias_add=world_size > 1),
    )
    total = 0
    for layer, part in zip(layers, x.chunk(world_size, dim=-1)):
        fill(layer, weight, bias)
        total = total + layer(part)[0]
    torch.testing.assert_close(total, F.linear(x, weight, bias if world_size == 1 else None))


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_merged_shards(monkeypatch, world_size):
    """Gate and up of unequal sizes: each device holds its part of both, one below the other."""
    gate, up, x = rand(16, HIDDEN), rand(8, HIDDEN), rand(5, HIDDEN)
    layers = on_each_rank(
        monkeypatch, world_size, lambda: MergedColumnParallelLinear(HIDDEN, [16, 8], bias=False)
    )
    for by_parts in (True, False):
        halves = []
        for layer in layers:
            layer.weight.data.fill_(float("nan"))
            if by_parts:
                fill(layer, up, None, 1)
                assert layer.weight.pending_shards <= {0}
                fill(layer, gate, None, 0)
            else:
                fill(layer, torch.cat([gate, up]))
            assert not layer.weight.pending_shards
            halves.append(layer(x)[0].split(layer.output_partition_sizes, dim=-1))
        for index, whole in enumerate((gate, up)):
            actual = torch.cat([half[index] for half in halves], dim=-1)
            torch.testing.assert_close(actual, F.linear(x, whole))


@pytest.mark.parametrize(
    ("world_size", "heads", "kv_heads"), [(1, 4, 2), (2, 4, 2), (4, 4, 2), (4, 4, 1), (2, 6, 6)]
)
def test_qkv_shards(monkeypatch, world_size, heads, kv_heads):
    """Devices share the heads; where key heads are fewer than devices, several hold the same
    one."""
    size, x = 8, rand(5, HIDDEN)
    parts = {
        "q": rand(heads * size, HIDDEN),
        "k": rand(kv_heads * size, HIDDEN) + 1,
        "v": rand(kv_heads * size, HIDDEN) - 1,
    }
    biases = {name: rand(len(weight)) for name, weight in parts.items()}
    layers = on_each_rank(
        monkeypatch, world_size, lambda: QKVParallelLinear(HIDDEN, size, heads, kv_heads)
    )
    for rank, layer in enumerate(layers):
        for name, weight in parts.items():
            fill(layer, weight, biases[name], name)
        assert not layer.weight.pending_shards and not layer.bias.pending_shards
        outputs = layer(x)[0].split(layer.output_partition_sizes, dim=-1)
        for name, actual in zip("qkv", outputs):
            whole = F.linear(x, parts[name], biases[name]).unflatten(-1, (-1, size))
            total = heads if name == "q" else kv_heads
            first = rank * total // world_size
            count = max(1, total // world_size)
            torch.testing.assert_close(actual, whole[:, first : first + count].flatten(1))
        fused = layer.weight.detach().clone()
        fill(layer, torch.cat(list(parts.values())))
        assert torch.equal(layer.weight, fused)


def test_replicated_and_options():
    """`skip_bias_add` hands the bias back; `return_bias=False` returns the output alone."""
    weight, bias, x = rand(4, HIDDEN), rand(4), rand(2, HIDDEN)
    layer = ReplicatedLinear(HIDDEN, 4)
    fill(layer, weight, bias)
    output, rest = layer(x)
    assert rest is None
    torch.testing.assert_close(output, F.linear(x, weight, bias))
    skipping = ReplicatedLinear(HIDDEN, 4, skip_bias_add=True)
    fill(skipping, weight, bias)
    output, rest = skipping(x)
    torch.testing.assert_close(output, F.linear(x, weight))
    assert rest is skipping.bias
    assert ReplicatedLinear(HIDDEN, 4, bias=False, return_bias=False)(x).shape == (2, 4)


def test_what_cannot_be_divided_is_refused(monkeypatch):
    """A shard must not be rounded: 10 outputs have no quarter."""
    monkeypatch.setattr(parallel_state, "_tp", GroupCoordinator(0, 4))
    with pytest.raises(ValueError, match="10 cannot be divided evenly among 4"):
        ColumnParallelLinear(HIDDEN, 10)
    assert ColumnParallelLinear(HIDDEN, 10, disable_tp=True).weight.shape == (10, HIDDEN)


@pytest.mark.parametrize("world_size", [1, 2])
def test_embedding_rows_and_logits(monkeypatch, world_size):
    """Rows of the padded table, each on one device, zeros elsewhere; padding never becomes a
    logit."""
    table, ids = rand(70, 16), torch.tensor([0, 5, 63, 64, 69])
    layers = on_each_rank(monkeypatch, world_size, lambda: ParallelLMHead(70, 16))
    for layer in layers:
        fill(layer, table)
    whole = torch.cat([layer.weight for layer in layers])
    assert torch.equal(whole[:70], table) and (whole[70:] == 0).all() and len(whole) == 128
    if world_size > 1:
        return
    embedding = VocabParallelEmbedding(70, 16)
    fill(embedding, table)
    assert torch.equal(embedding(ids), table[ids])
    hidden = rand(3, 16)
    logits = LogitsProcessor(70, scale=0.5, soft_cap=2.0)(layers[0], hidden)
    expected = torch.tanh(hidden @ table.T / 2.0) * 2.0 * 0.5
    assert logits.shape == (3, 70)
    torch.testing.assert_close(logits, expected)
    with pytest.raises(RuntimeError, match="LogitsProcessor"):
        layers[0](hidden)


def test_groups_of_several_are_refused():
    """Nothing may pretend to add up over devices while it cannot."""
    parallel_state.destroy_model_parallel()
    parallel_state.ensure_model_parallel_initialized(1, 1)
    assert parallel_state.model_parallel_is_initialized()
    with pytest.raises(ValueError, match="tensor parallel size 2"):
        parallel_state.initialize_model_parallel(2)
    with pytest.raises(ValueError, match="not"):
        parallel_state.ensure_model_parallel_initialized(2, 1)
    with pytest.raises(NotImplementedError):
        GroupCoordinator(0, 2).all_reduce(torch.ones(1))
    parallel_state.destroy_model_parallel()
    assert parallel_state.get_tensor_model_parallel_world_size() == 1


@pytest.mark.parametrize("world_size", [1, 2])
def test_keys_and_values_alone_can_be_fused(monkeypatch, world_size):
    """Cross-attention projects the encoder's output to keys and values only: no query shard is
    waited for, and the output is keys, then values."""
    k, v, x = rand(16, HIDDEN), rand(16, HIDDEN) + 1, rand(5, HIDDEN)
    layers = on_each_rank(
        monkeypatch, world_size, lambda: QKVParallelLinear(HIDDEN, 4, 0, 4, bias=False)
    )
    for layer in layers:
        fill(layer, k, None, "k")
        assert layer.weight.pending_shards == {"v"}
        fill(layer, v, None, "v")
        assert not layer.weight.pending_shards
    parts = [layer(x)[0].chunk(2, dim=-1) for layer in layers]
    for whole, shards in zip((k, v), zip(*parts)):
        torch.testing.assert_close(torch.cat(shards, dim=-1), F.linear(x, whole))
