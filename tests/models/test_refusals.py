# SPDX-License-Identifier: Apache-2.0
"""Models that would be silently wrong are refused at the start, in one line that says why."""

from __future__ import annotations

import pytest
import torch
from tests.models.test_tiny import make_llm
from tests.models.tiny import NATIVE, REFUSED, make_config, make_model

from vllm import LLM


def start(folder, **options) -> LLM:
    return make_llm(folder, load_format="dummy", **options)


def save_config(family, folder) -> None:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    config = make_config(family)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].__name__]
    config.save_pretrained(folder)


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name, tmp_path):
    """No interface, unknown keywords, other masks, other states, two attentions in one layer."""
    family, reason = REFUSED[name]
    save_config(family, tmp_path)
    with pytest.raises(ValueError, match=reason) as refusal:
        start(tmp_path)
    assert "\n" not in str(refusal.value)
    assert "cannot be served with Transformers' code" in str(refusal.value)


def test_what_looks_at_other_tokens_beside_attention(tmp_path, monkeypatch):
    """A layer that mixes neighbours calls the interface as it should, and would mix requests: only
    numbers show it."""
    from transformers.models.llama.modeling_llama import LlamaMLP

    make_model(NATIVE["llama"], tmp_path)
    make_llm(tmp_path, model_impl="transformers")
    whole = LlamaMLP.forward
    monkeypatch.setattr(
        LlamaMLP, "forward", lambda self, x: whole(self, x + 0.1 * x.roll(1, dims=1))
    )
    with pytest.raises(ValueError, match="besides attention looks at other tokens"):
        make_llm(tmp_path, model_impl="transformers")


def test_rope_that_depends_on_the_batch(tmp_path):
    """Beyond its original length a dynamic rope turns all keys anew with every token."""
    family, _ = REFUSED["falcon"]
    family = type(family)("phi3", {
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 128,
            "short_factor": [1.0] * 4, "long_factor": [2.0] * 4,
        },
        "original_max_position_embeddings": 128,
    })  # fmt: skip
    save_config(family, tmp_path)
    with pytest.raises(ValueError, match="pass --max-model-len 128 or less"):
        start(tmp_path, max_model_len=129)
    start(tmp_path, max_model_len=128)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"architectures": ["NoSuchForCausalLM"]}, "no causal language model of this name"),
        ({"architectures": ["NoSuchLM"], "is_encoder_decoder": True}, "no encoder-decoder language"),
        ({"architectures": ["LlavaForConditionalGeneration"], "vision_config": {}}, "vision"),
        ({"architectures": ["X"], "auto_map": {"AutoModelForCausalLM": "m.X"}}, "trust-remote-code"),
        ({"architectures": []}, "names no architectures"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantised \(gptq\)"),
    ],
)
def test_refused_by_the_config_alone(changes, reason, tmp_path):
    """Before an engine process is started, and without torch."""
    config = make_config(NATIVE["llama"])
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason):
        start(tmp_path, hf_overrides=changes)


def test_model_impl_vllm_takes_no_fallback(tmp_path):
    family, _ = REFUSED["falcon"]
    save_config(family, tmp_path)
    with pytest.raises(ValueError, match=r"FalconForCausalLM is not supported \(it is not regist"):
        start(tmp_path, model_impl="vllm")


def test_half_precision(tmp_path):
    """The check's tolerance lets rounding pass in each dtype."""
    for dtype in (torch.bfloat16, torch.float16):
        folder = tmp_path / str(dtype)
        make_model(NATIVE["gemma2"], folder)
        LLM(
            model=str(folder), dtype=str(dtype).removeprefix("torch."), model_impl="transformers",
            skip_tokenizer_init=True, max_model_len=64, kv_cache_memory_bytes=4 << 20,
        )  # fmt: skip
