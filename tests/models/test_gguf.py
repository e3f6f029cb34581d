# SPDX-License-Identifier: Apache-2.0
"""GGUF files of every supported architecture against the model they were made from.

The files are written as llama.cpp's converter does; the tensors' names are those of gguf-py.
"""

from __future__ import annotations

import dataclasses

import gguf
import numpy as np
import pytest
import torch
from tests.models.test_tiny import make_llm, run
from tests.models.tiny import (
    NATIVE,
    NUM_NEW_TOKENS,
    VOCAB_SIZE,
    Family,
    generate,
    make_model,
    make_prompts,
)

from vllm.model_executor.layers.cpu_ops.quant_packing import dequantize, unpack_blocks
from vllm.model_executor.layers.quantization.parameter import QuantizedParameter

GEMMA3 = Family(
    "gemma3_text",
    dict(
        tie_word_embeddings=False,
        head_dim=16,
        query_pre_attn_scalar=16,
        num_hidden_layers=7,
        sliding_window=21,
        rope_parameters={
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        },
    ),
)
CASES = {
    "llama": (gguf.MODEL_ARCH.LLAMA, Family("llama", dict(attention_bias=True))),
    "qwen2": (gguf.MODEL_ARCH.QWEN2, Family("qwen2")),
    "qwen3": (gguf.MODEL_ARCH.QWEN3, Family("qwen3", dict(head_dim=16))),
    "gemma3": (gguf.MODEL_ARCH.GEMMA3, GEMMA3),
    "gpt2": (gguf.MODEL_ARCH.GPT2, Family("gpt2", {}, NATIVE["gpt2"].names)),
}


def stored(name: str, weight: np.ndarray, config, architecture: str) -> np.ndarray:
    """A weight as the converter stores it."""
    if architecture == "llama" and (".q_proj." in name or ".k_proj." in name):
        heads = config.num_attention_heads if ".q_" in name else config.num_key_value_heads
        halves = weight.reshape(heads, 2, -1, *weight.shape[1:])
        return halves.swapaxes(1, 2).reshape(weight.shape)
    if architecture == "gemma3" and name.endswith("norm.weight"):
        return weight + 1
    if architecture == "gpt2" and name.endswith(("c_attn.weight", "c_proj.weight", "c_fc.weight")):
        return weight.T
    return weight


def write(path, model, arch: gguf.MODEL_ARCH, kind: str | None = None) -> None:
    """`kind`: the type of matrices whose rows it fits."""
    name, config = gguf.MODEL_ARCH_NAMES[arch], model.config
    writer = gguf.GGUFWriter(str(path), name)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(getattr(config, "n_inner", None) or config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_vocab_size(VOCAB_SIZE)
    if name == "gpt2":
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_head_count_kv(config.num_key_value_heads)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_key_length(config.head_dim if "head_dim" in config.to_dict() else 8)
        writer.add_rope_dimension_count(8)
    if name == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_rope_freq_base(1e6)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for hf_name, tensor in model.state_dict().items():
        if hf_name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        weight = stored(hf_name, tensor.numpy(), config, name)
        gguf_name = names.get_name(hf_name, try_suffixes=(".weight", ".bias"))
        if kind and weight.ndim == 2 and weight.shape[1] % 32 == 0:
            as_kind = gguf.GGMLQuantizationType[kind]
            writer.add_tensor(gguf_name, gguf.quants.quantize(weight, as_kind), raw_dtype=as_kind)
        else:
            writer.add_tensor(gguf_name, np.ascontiguousarray(weight))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize("name", CASES)
def test_gguf(name, tmp_path):
    """Guards against a field, name or order that differs from the converter's."""
    arch, family = CASES[name]
    model = make_model(family, tmp_path / "hf")
    write(tmp_path / "model.gguf", model, arch)
    expected = generate(model, make_prompts())
    assert run(make_llm(tmp_path / "model.gguf"), make_prompts()) == expected


def packed_values(model) -> dict:
    """float32 values of the weights that are kept quantised, by name."""
    return {
        name: dequantize(unpack_blocks(parameter.data, parameter.format), parameter.format)
        for name, parameter in model.named_parameters()
        if isinstance(parameter, QuantizedParameter) and parameter.format is not None
    }


@pytest.mark.parametrize("kind", ["Q8_0", "Q4_1"])
@pytest.mark.parametrize("name", CASES)
def test_kept_as_they_are(name, kind, tmp_path):
    """`--quantization gguf`: every linear layer and table has the file's values, in its place, as the
    unpacked model has them. Guards against rows moved or turned once they are blocks."""
    arch, family = CASES[name]
    sizes = dict(hidden_size=64, intermediate_size=96, num_attention_heads=8)
    family = dataclasses.replace(family, config={**family.config, **sizes})
    write(tmp_path / "model.gguf", make_model(family, tmp_path / "hf"), arch, kind)
    kept = make_llm(tmp_path / "model.gguf", quantization="gguf")
    (values,) = kept.apply_model(packed_values)
    (expected,) = make_llm(tmp_path / "model.gguf").apply_model(
        lambda model: {name: p.data for name, p in model.named_parameters() if p.dim() == 2}
    )
    not_kept = {"transformer.wpe.weight"} if name == "gpt2" else set()
    assert values.keys() == expected.keys() - not_kept
    assert all(torch.equal(value, expected[name]) for name, value in values.items())
    assert all(len(tokens) == NUM_NEW_TOKENS for tokens in run(kept, make_prompts()))
