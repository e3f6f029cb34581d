# SPDX-License-Identifier: Apache-2.0
"""Models with a text encoder that run with Transformers' code, against Transformers in float32."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

from vllm import LLM, SamplingParams

VOCAB_SIZE, START, PAD = 131, 2, 1
NUM_NEW_TOKENS = 12
FAMILIES = ("marian", "pegasus", "m2m_100", "blenderbot-small", "blenderbot", "plbart", "bart")


def make_model(model_type: str, folder: Path) -> nn.Module:
    """Random, with sharp attention and small steps: what comes out depends on text and tokens."""
    from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, GenerationConfig

    torch.manual_seed(0)
    config = CONFIG_MAPPING[model_type](
        vocab_size=VOCAB_SIZE, d_model=48, encoder_layers=2, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=3, encoder_ffn_dim=64,
        decoder_ffn_dim=80, max_position_embeddings=256, init_std=0.2, scale_embedding=True,
        tie_word_embeddings=False, decoder_start_token_id=START, pad_token_id=PAD,
        bos_token_id=0, eos_token_id=START,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
            nn.init.normal_(parameter, mean=mean, std=0.2)
        elif "q_proj" in name or "k_proj" in name:
            parameter.data *= 2
        elif "out_proj" in name or "fc2" in name:
            parameter.data *= 0.15
    bias = dict(model.named_buffers()).get("final_logits_bias")
    if bias is not None:
        nn.init.normal_(bias, std=0.3)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=0, decoder_start_token_id=START
    )
    model.save_pretrained(folder)
    return model


@cache
def texts() -> tuple[tuple[int, ...], ...]:
    """Eight encoder inputs of lengths around a page's."""
    rng = random.Random(0)
    lengths = (1, 15, 16, 17, 40, 5, 33, 100)
    return tuple(tuple(rng.randrange(3, VOCAB_SIZE) for _ in range(n)) for n in lengths)


def by_transformers(
    model: nn.Module, decoder: list[int], num_new_tokens: int = NUM_NEW_TOKENS
) -> list[list[int]]:
    outputs = []
    for text in texts():
        ids = torch.tensor([text])
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), do_sample=False, num_beams=1,
                decoder_input_ids=torch.tensor([decoder]), eos_token_id=None,
                max_new_tokens=num_new_tokens, min_new_tokens=num_new_tokens,
            )  # fmt: skip
        outputs.append(output[0, len(decoder) :].tolist())
    return outputs


def make_llm(folder: Path, **options) -> LLM:
    defaults = dict(dtype="float32", kv_cache_memory_bytes=8 << 20, max_num_seqs=8)
    return LLM(
        model=str(folder), skip_tokenizer_init=True, model_impl="transformers",
        **{**defaults, **options},
    )  # fmt: skip


def run(llm: LLM, prompts: list, num_new_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    outputs = llm.generate(prompts, params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.mark.parametrize("model_type", FAMILIES)
def test_families(model_type, tmp_path):
    """Alone, then eight of mixed lengths at once, then again with their pages cached. Guards against
    positions that count the flat batch, keys of a step that encodes nothing, and texts that see
    each other."""
    expected = by_transformers(make_model(model_type, tmp_path), [START])
    assert len({tuple(tokens) for tokens in expected}) == 8, "the text makes no difference"
    llm = make_llm(tmp_path)
    prompts = [{"prompt_token_ids": list(text)} for text in texts()]
    assert [run(llm, [prompt])[0] for prompt in prompts] == expected
    llm.reset_prefix_cache()
    assert run(llm, prompts) == expected
    assert run(llm, prompts) == expected


@pytest.mark.parametrize("model_type", ["marian", "m2m_100"])
def test_decoder_prompts_in_chunks(model_type, tmp_path):
    """Chunks of a decoder prompt begin at their own positions, and the encoder's keys are there for
    all of them."""
    decoder = [START, *(3 + i * 7 % 120 for i in range(50))]
    expected = by_transformers(make_model(model_type, tmp_path), decoder)
    llm = make_llm(
        tmp_path, max_num_batched_tokens=32, max_num_seqs=4, max_model_len=64,
        num_gpu_blocks_override=24,
    )  # fmt: skip
    prompts = [{"encoder_prompt": list(text), "decoder_prompt": decoder} for text in texts()]
    assert run(llm, prompts) == expected


@pytest.mark.parametrize(
    ("model_type", "reason"),
    [
        ("t5", "relative position biases"),
        ("mt5", "relative position biases"),
        ("umt5", "relative position biases"),
        ("longt5", "relative position biases"),
        ("mvp", "do not call Transformers' attention interface"),
        ("led", "cannot be served with Transformers' code"),
    ],
)
def test_refused(model_type, reason, tmp_path):
    """By name, in one line, at the start."""
    from transformers import CONFIG_MAPPING, MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING

    config = CONFIG_MAPPING[model_type](vocab_size=VOCAB_SIZE, decoder_start_token_id=0)
    name = MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING[type(config)].__name__
    config.architectures = [name]
    config.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=reason) as refusal:
        make_llm(tmp_path, load_format="dummy", max_model_len=64)
    assert name in str(refusal.value) and "\n" not in str(refusal.value)
    assert "Marian, Pegasus, M2M100" in str(refusal.value)
