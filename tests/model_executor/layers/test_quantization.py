# SPDX-License-Identifier: Apache-2.0
"""Quantised layers: what they load, in which order it may come, and what stays as it is."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from gguf.constants import GGMLQuantizationType
from tests.model_executor.layers.test_linear import on_each_rank, rand

from vllm.model_executor.layers.cpu_ops.quant_format import INT4, INT4_MIN, INT8
from vllm.model_executor.layers.cpu_ops.quant_packing import dequantize, quantize, unpack_blocks
from vllm.model_executor.layers.linear import (
    ColumnParallelLinear,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.layers.quantization.parameter import report_weights
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)
from vllm.model_executor.model_loader.base_loader import process_weights_after_loading
from vllm.model_executor.model_loader.gguf_weights import _layer_blocks
from vllm.model_executor.model_loader.weight_utils import initialize_dummy_weights

INT8_CONFIG, INT4_CONFIG, GGUF = (get_quantization_config(n)() for n in ("int8", "int4", "gguf"))
KINDS = {"Q8_0": INT8, "Q4_0": INT4, "Q4_1": INT4_MIN}


def load(layer, weight: torch.Tensor, *shard) -> None:
    layer.weight.weight_loader(layer.weight, weight, *shard)


def values(layer) -> torch.Tensor:
    """What the layer's weight stands for, float32."""
    weight = layer.weight
    if weight.format is None:
        return weight.data.float()
    return dequantize(unpack_blocks(weight.data, weight.format), weight.format)


def in_file(weight: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(rows as the loader hands them on, the values they have by gguf.quants)."""
    packed = gguf.quants.quantize(weight.numpy(), GGMLQuantizationType[kind])
    exact = torch.from_numpy(gguf.quants.dequantize(packed, GGMLQuantizationType[kind]))
    return _layer_blocks(GGMLQuantizationType[kind], packed.view(np.uint8)), exact


def rounded(weight: torch.Tensor, fmt) -> torch.Tensor:
    return dequantize(quantize(weight, fmt), fmt)


@pytest.mark.parametrize(("config", "fmt"), [(INT8_CONFIG, INT8), (INT4_CONFIG, INT4_MIN)], ids=str)
def test_shards_in_any_order_are_the_fused_weight(config, fmt):
    """Quantised once the last is there; until the first there is no memory, and it is not held in
    floats afterwards."""
    q, k, v = rand(64, 64), rand(32, 64), rand(32, 64) * 2
    layer = QKVParallelLinear(64, 16, 4, 2, bias=False, quant_config=config)
    assert layer.weight.untyped_storage().nbytes() == 4
    for shard_id, part in [("v", v), ("q", q), ("k", k)]:
        assert layer.weight.format is None
        load(layer, part, shard_id)
    assert layer.weight.format is fmt and layer.weight._staged is None
    assert layer.weight.nbytes == 128 * 64 // 32 * fmt.block_bytes
    assert torch.equal(values(layer), rounded(torch.cat((q, k, v)), fmt))
    with pytest.raises(ValueError, match="has it twice"):
        load(layer, q, "q")


def test_a_fused_checkpoint_is_loaded_whole():
    weight = rand(128, 64)
    layer = MergedColumnParallelLinear(64, [64, 64], bias=False, quant_config=INT8_CONFIG)
    load(layer, weight)
    assert torch.equal(values(layer), rounded(weight, INT8))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_a_file_are_kept(kind):
    """Exactly the file's values, and its bytes."""
    (gate, gate_values), (up, up_values) = (in_file(rand(64, n), kind) for n in (64, 64))
    layer = MergedColumnParallelLinear(64, [64, 64], bias=False, quant_config=GGUF)
    load(layer, up, 1)
    load(layer, gate, 0)
    assert layer.weight.format is KINDS[kind]
    assert layer.weight.nbytes == gate.nbytes + up.nbytes
    assert torch.equal(values(layer), torch.cat((gate_values, up_values)))


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_of_as_many_bits_are_kept(kind):
    """`int8` and `int4` on a GGUF file: no second rounding where the first was to as many bits."""
    blocks, exact = in_file(rand(64, 64), kind)
    for config in (INT8_CONFIG, INT4_CONFIG):
        wanted = INT8 if config is INT8_CONFIG else INT4_MIN
        kept = KINDS[kind].bits == wanted.bits
        layer = ReplicatedLinear(64, 64, bias=False, quant_config=config)
        load(layer, blocks)
        assert layer.weight.format is (KINDS[kind] if kept else wanted)
        assert torch.equal(values(layer), exact if kept else rounded(exact, wanted))


def test_shards_of_several_kinds_meet_as_floats():
    """4 bits with and without a minimum: one format for the whole weight, its values rounded once
    more."""
    (gate, gate_values), (up, up_values) = (in_file(rand(64, 64), k) for k in ("Q4_0", "Q4_1"))
    layer = MergedColumnParallelLinear(64, [64, 64], bias=False, quant_config=INT4_CONFIG)
    load(layer, gate, 0)
    load(layer, up, 1)
    assert layer.weight.format is INT4_MIN
    assert torch.equal(values(layer), rounded(torch.cat((gate_values, up_values)), INT4_MIN))


@pytest.mark.parametrize("first", ["Q4_1", "plain"])
def test_shards_of_several_kinds_stay_plain(first):
    """A file that has one projection in another type than the next: the values are the file's,
    rounded to the model's dtype at most."""
    blocks, exact = in_file(rand(64, 64), "Q4_1")
    layer = MergedColumnParallelLinear(64, [64, 64], bias=False, quant_config=GGUF)
    other = rand(64, 64) * 3
    order = [(blocks, 0), (other, 1)] if first == "Q4_1" else [(other, 1), (blocks, 0)]
    for shard, shard_id in order:
        load(layer, shard, shard_id)
    assert layer.weight.format is None
    assert torch.equal(values(layer), torch.cat((exact, other)))


def test_rows_of_another_length_are_refused():
    layer = ReplicatedLinear(64, 32, bias=False, quant_config=GGUF)
    with pytest.raises(ValueError, match="rows of 50 bytes in the checkpoint do not hold 64"):
        load(layer, torch.zeros(32, 50, dtype=torch.uint8))


@pytest.mark.parametrize("kind", [None, "Q8_0"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_devices_hold_their_part(monkeypatch, world_size, kind):
    """Ranges of outputs and of inputs, of floats and of a file's blocks, make up the whole."""
    weight, config = rand(64, 128), INT8_CONFIG if kind is None else GGUF
    given, exact = (weight, rounded(weight, INT8)) if kind is None else in_file(weight, kind)
    columns = on_each_rank(
        monkeypatch,
        world_size,
        lambda: ColumnParallelLinear(128, 64, bias=False, quant_config=config),
    )
    rows = on_each_rank(
        monkeypatch, world_size, lambda: RowParallelLinear(128, 64, bias=False, quant_config=config)
    )
    for layer in (*columns, *rows):
        load(layer, given)
        assert layer.weight.format is INT8
    assert torch.equal(torch.cat([values(layer) for layer in columns], dim=0), exact)
    assert torch.equal(torch.cat([values(layer) for layer in rows], dim=1), exact)


@pytest.mark.parametrize(("inputs", "outputs"), [(48, 64), (64, 40)])
def test_sizes_that_fill_no_groups_stay_plain(inputs, outputs):
    weight, x = rand(outputs, inputs), rand(3, inputs)
    layer = ReplicatedLinear(inputs, outputs, bias=False, quant_config=INT4_CONFIG)
    load(layer, weight)
    process_weights_after_loading(layer, torch.float32)
    assert layer.weight.format is None
    torch.testing.assert_close(layer(x)[0], F.linear(x, weight))
    with pytest.raises(ValueError, match="--quantization int4: no weight of ReplicatedLinear"):
        report_weights(layer, "int4")


def test_tied_embeddings_share_the_table():
    """One table of 8 bits, looked up and multiplied with; rows beyond the vocabulary are zero."""
    table = rand(60, 64)
    embed = VocabParallelEmbedding(60, 64, quant_config=INT4_CONFIG)
    with torch.device("meta"):
        head = ParallelLMHead(60, 64, quant_config=INT4_CONFIG)
    model = torch.nn.ModuleDict({"embed": embed, "head": head.tie_weights(embed)})
    load(embed, table)
    process_weights_after_loading(model, torch.float32)
    exact = rounded(table, INT8)
    assert embed.weight is head.weight and embed.weight.format is INT8
    ids = torch.tensor([0, 59, 7])
    assert torch.equal(embed(ids), exact[ids])
    hidden = torch.randint(-127, 128, (4, 64)).float()
    hidden[:, ::32] = 127
    logits = LogitsProcessor(60)(head, hidden)
    torch.testing.assert_close(logits, F.linear(hidden, exact), atol=1e-3, rtol=1e-5)


def test_random_weights_are_quantised():
    """`--load-format dummy`: what is measured without a checkpoint has the same bytes."""
    layer = ReplicatedLinear(64, 32, bias=False, quant_config=INT8_CONFIG)
    plain = ReplicatedLinear(64, 32, bias=False)
    for module in (layer, plain):
        initialize_dummy_weights(module, None, -1.0, 1.0)
    assert torch.equal(values(layer), rounded(plain.weight.data, INT8))


def test_unknown_methods_are_refused():
    with pytest.raises(ValueError, match="'awq' is not supported; supported: int8, int4, gguf"):
        get_quantization_config("awq")
    with pytest.raises(ValueError, match="Int8Config has no settings, got bits"):
        get_quantization_config("int8").from_config({"bits": 8})
