# SPDX-License-Identifier: Apache-2.0
"""A Hugging Face config dict from GGUF metadata, without torch or transformers.

The fields are those that Transformers' own GGUF path sets (it is the oracle in the tests), plus
what it leaves out and would then compute wrongly: biases, rope scaling, several end tokens.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

from vllm.transformers_utils.gguf_reader import GGUFError, GGUFFile


@dataclass(frozen=True)
class GGUFArchitecture:
    """How one `general.architecture` of llama.cpp is spelled in Hugging Face's terms."""

    model_type: str
    hf_architecture: str
    head_dim_key: str | None = None  # metadata key that states the head size, where one does
    permutes_qk: bool = False  # llama.cpp stores q and k for interleaved rope


GGUF_ARCHITECTURES: dict[str, GGUFArchitecture] = {
    "llama": GGUFArchitecture(
        "llama", "LlamaForCausalLM", "rope.dimension_count", permutes_qk=True
    ),
    "mistral": GGUFArchitecture(
        "mistral", "MistralForCausalLM", "rope.dimension_count", permutes_qk=True
    ),
    "qwen2": GGUFArchitecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": GGUFArchitecture("qwen3", "Qwen3ForCausalLM", "attention.key_length"),
    "gemma3": GGUFArchitecture("gemma3_text", "Gemma3ForCausalLM", "attention.key_length"),
    "gpt2": GGUFArchitecture("gpt2", "GPT2LMHeadModel"),
}
# Gemma 3 27B by its number of layers: it alone scales attention scores by its hidden size, which
# the metadata does not say.
_GEMMA3_27B_LAYERS = 62

# Metadata key behind the architecture's prefix -> config field.
_FIELDS = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "embedding_length": "hidden_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "attention.layer_norm_epsilon": "layer_norm_epsilon",
    "attention.sliding_window": "sliding_window",
    "final_logit_softcapping": "final_logit_softcapping",
    "vocab_size": "vocab_size",
}
_REQUIRED = ("block_count", "feed_forward_length", "embedding_length", "attention.head_count")
_TOKEN_IDS = {
    "bos_token_id": "bos_token_id",
    "eos_token_id": "eos_token_id",
    "unknown_token_id": "unk_token_id",
    "padding_token_id": "pad_token_id",
}
ROPE_FACTORS_TENSOR = "rope_freqs.weight"


def gguf_architecture(file: GGUFFile) -> GGUFArchitecture:
    """The entry for this file's architecture. Raises GGUFError naming what is supported."""
    name = file.architecture
    if name == "llama" and (file.get("llama.expert_count") or 0) > 0:
        raise GGUFError(
            f"{file.path}: a mixture-of-experts llama; supported GGUF architectures are dense ones"
        )
    if (file.get("split.count") or 1) > 1:
        raise GGUFError(
            f"{file.path}: one part of a model split over {file.get('split.count')} files; "
            "join them first with `llama-gguf-split --merge`"
        )
    entry = GGUF_ARCHITECTURES.get(name)
    if entry is None:
        supported = ", ".join(sorted(GGUF_ARCHITECTURES))
        raise GGUFError(
            f"{file.path}: GGUF architecture {name!r} is not supported; supported: {supported}"
        )
    if name == "llama" and "mistral" in str(file.get("general.name", "")).lower():
        return GGUF_ARCHITECTURES["mistral"]
    return entry


def config_dict_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """`config.json` as a dict, from the metadata of `file`. Raises GGUFError where a field is
    missing."""
    entry, prefix = gguf_architecture(file), file.architecture
    for key in _REQUIRED:
        if f"{prefix}.{key}" not in file:
            raise GGUFError(f"{file.path}: metadata {prefix}.{key} is missing")
    config: dict[str, Any] = {
        "model_type": entry.model_type,
        "architectures": [entry.hf_architecture],
    }
    for key, field in _FIELDS.items():
        if f"{prefix}.{key}" in file:
            config[field] = file.get(f"{prefix}.{key}")
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("vocab_size", file.array_length("tokenizer.ggml.tokens"))
    head_dim = file.get(f"{prefix}.{entry.head_dim_key}") if entry.head_dim_key else None
    if head_dim is not None:
        config["head_dim"] = head_dim
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config.update(_fields_of_its_own(file, entry, config))
    for key, field in _TOKEN_IDS.items():
        if f"tokenizer.ggml.{key}" in file:
            config[field] = file.get(f"tokenizer.ggml.{key}")
    return config


def _fields_of_its_own(
    file: GGUFFile, entry: GGUFArchitecture, config: dict[str, Any]
) -> dict[str, Any]:
    """What is said in each architecture's own way, or only by which tensors there are."""
    prefix = file.architecture
    if entry.model_type == "gpt2":
        return {"n_inner": config["intermediate_size"]}
    if entry.model_type == "gemma3_text":
        num_heads, head_dim = config["num_attention_heads"], config.get("head_dim", 256)
        if config["num_hidden_layers"] == _GEMMA3_27B_LAYERS:
            scalar = config["hidden_size"] // num_heads
        else:
            scalar = head_dim
        local_theta = file.get(f"{prefix}.rope.freq_base_swa", 10000.0)
        return {
            "query_pre_attn_scalar": scalar,
            "rope_parameters": {
                "full_attention": _rope_parameters(file, prefix, default_theta=1e6),
                "sliding_attention": {"rope_type": "default", "rope_theta": local_theta},
            },
        }
    fields: dict[str, Any] = {"rope_parameters": _rope_parameters(file, prefix)}
    if entry.model_type == "llama":
        fields["attention_bias"] = (
            "blk.0.attn_output.bias" in file.tensors or "blk.0.attn_q.bias" in file.tensors
        )
        fields["mlp_bias"] = "blk.0.ffn_down.bias" in file.tensors
    return fields


def generation_config_dict_from_gguf(file: GGUFFile) -> dict[str, Any]:
    """`generation_config.json` as a dict: begin, padding and every end token the file names."""
    config = {}
    for key, field in (("bos_token_id", "bos_token_id"), ("padding_token_id", "pad_token_id")):
        if f"tokenizer.ggml.{key}" in file:
            config[field] = file.get(f"tokenizer.ggml.{key}")
    # Llama 3 files end a text with one token (eos) and a chat turn with another (eot).
    ends = [file.get(f"tokenizer.ggml.{key}") for key in ("eos_token_id", "eot_token_id")]
    ends = list(dict.fromkeys(end for end in ends if end is not None))
    if ends:
        config["eos_token_id"] = ends[0] if len(ends) == 1 else ends
    return config


def _rope_parameters(
    file: GGUFFile, prefix: str, default_theta: float = 10000.0
) -> dict[str, Any]:
    theta = file.get(f"{prefix}.rope.freq_base", default_theta)
    kind = file.get(f"{prefix}.rope.scaling.type", "none")
    if ROPE_FACTORS_TENSOR in file.tensors:
        return {"rope_theta": theta, **_llama3_parameters(file, prefix, theta)}
    if kind == "none":
        return {"rope_type": "default", "rope_theta": theta}
    parameters = {
        "rope_type": kind,
        "rope_theta": theta,
        "factor": file.get(f"{prefix}.rope.scaling.factor"),
    }
    original = file.get(f"{prefix}.rope.scaling.original_context_length")
    if original is not None:
        parameters["original_max_position_embeddings"] = original
    return parameters


def _llama3_parameters(file: GGUFFile, prefix: str, theta: float) -> dict[str, Any]:
    """The llama3 rope parameters behind a file's frequency factors.

    llama.cpp stores the factors alone. Every published Llama 3.x uses the same two wavelength
    bounds and original length, so they are assumed and checked: factors that they do not explain
    are refused.
    """
    factors = _rope_factors(file)
    parameters = {
        "rope_type": "llama3",
        "factor": float(max(factors)),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    for index, stored in enumerate(factors):
        if not math.isclose(
            _llama3_factor(index, len(factors), theta, parameters), stored, rel_tol=1e-4
        ):
            raise GGUFError(
                f"{file.path}: tensor {ROPE_FACTORS_TENSOR} holds rope factors that are not "
                "Llama 3's; "
                "convert the model to a directory with config.json and safetensors instead"
            )
    return parameters


def _llama3_factor(
    index: int, num_frequencies: int, theta: float, parameters: dict[str, Any]
) -> float:
    """By how much llama3 scaling divides the frequency `index` (Llama 3.1's published rule)."""
    wavelength = 2 * math.pi * theta ** (index / num_frequencies)
    original = parameters["original_max_position_embeddings"]
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    if wavelength < original / high:
        return 1.0
    if wavelength > original / low:
        return parameters["factor"]
    smooth = (original / wavelength - low) / (high - low)
    return 1.0 / ((1 - smooth) / parameters["factor"] + smooth)


def _rope_factors(file: GGUFFile) -> list[float]:
    info = file.tensors[ROPE_FACTORS_TENSOR]
    if info.ggml_type != 0 or not info.num_elements:
        raise GGUFError(f"{file.path}: tensor {ROPE_FACTORS_TENSOR} must be float32 and not empty")
    data = file.tensor_bytes(info, 4 * info.num_elements)
    return list(struct.unpack(f"<{info.num_elements}f", data))
