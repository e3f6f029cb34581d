# SPDX-License-Identifier: Apache-2.0
"""What weights of 8 and 4 bits cost, against float32 models that were not themselves dequantised: a
decoder that is trained here, the BART that was, and random Llamas. docs/performance.md has what was
measured; the bounds leave room for a training that another CPU rounds otherwise.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.models.bart_dates import examples
from tests.models.make_bart import FOLDER
from tests.models import test_cpu_programs as programs
from tests.models.smollm2 import model_path
from tests.models.test_tiny import make_llm
from tests.models.tiny import make_model
from transformers import LlamaConfig, LlamaForCausalLM

from vllm import LLM, SamplingParams
from vllm.model_executor.layers.cpu_ops.quant_packing import dequantize, unpack_blocks
from vllm.model_executor.layers.quantization.parameter import QuantizedParameter

_NUM_STEPS, _BATCH, _CONTEXT = 250, 24, 64
_NEWLINE = 10


def text_ids(count: int, seed: int, held_out: bool) -> list[int]:
    """Bytes of lines such as `3 May 1987: 1987-05-03`."""
    lines = (f"{text}: {date}" for text, date in examples(count, seed, held_out))
    return list("\n".join(lines).encode())


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> tuple[LlamaForCausalLM, str]:
    """A Llama over bytes, trained to write dates, and its folder."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=_NUM_STEPS)
    ids = torch.tensor(text_ids(20000, 1, False))
    for _ in range(_NUM_STEPS):
        starts = torch.randint(len(ids) - _CONTEXT, (_BATCH, 1))
        batch = ids[starts + torch.arange(_CONTEXT)]
        loss = model(input_ids=batch, labels=batch).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    assert loss < 1.2, "it has not learned"
    folder = tmp_path_factory.mktemp("trained")
    model.eval().save_pretrained(folder)
    return model, str(folder)


def log_probs(llm: LLM, prompts: list[list[int]]) -> torch.Tensor:
    """Of every token at every place of the prompts but the first: (places, 256)."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=-1)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)
    return torch.tensor(
        [
            [place[token].logprob for token in range(256)]
            for output in outputs
            for place in output.prompt_logprobs[1:]
        ]
    )


def exact_log_probs(model: LlamaForCausalLM, prompts: list[list[int]]) -> torch.Tensor:
    """The same by Transformers in float32."""
    with torch.inference_mode():
        return model(torch.tensor(prompts)).logits[:, :-1].log_softmax(-1).flatten(0, 1)


@pytest.mark.parametrize(
    ("name", "most", "most_divergence"),
    [(None, 1e-5, 1e-7), ("int8", 0.001, 1.5e-4), ("int4", 0.01, 0.006)],
)
def test_loss_of_a_trained_decoder(trained, name, most, most_divergence):
    """On text that was held out, against Transformers in float32: by how much of itself the
    perplexity changes, and the mean divergence (Kullback and Leibler's, in nats) of a token. The
    unquantised engine has neither."""
    model, folder = trained
    ids = text_ids(300, 2, True)
    prompts = [ids[i : i + 128] for i in range(0, len(ids) - 128, 128)][:24]
    expected = exact_log_probs(model, prompts)
    llm = make_llm(folder, quantization=name, max_logprobs=-1)
    actual = log_probs(llm, prompts)
    tokens = torch.tensor([token for prompt in prompts for token in prompt[1:]])[:, None]
    nll = -expected.gather(1, tokens).mean()
    growth = (nll + actual.gather(1, tokens).mean()).neg().exp().item() - 1
    divergence = (expected.exp() * (expected - actual)).sum(1).mean().item()
    same = (expected.argmax(1) == actual.argmax(1)).float().mean().item()
    print(
        f"{name}: perplexity {nll.exp():.4f}, changes by {growth:+.6f}; divergence {divergence:.3g}; "
        f"{same:.4f} of the likeliest tokens are the same"
    )
    assert abs(growth) <= most and abs(divergence) <= most_divergence


@pytest.mark.parametrize(("name", "least"), [("int8", 0.99), ("int4", 0.9)])
def test_dates_of_a_trained_bart(name, least):
    """Dates that were never trained with, in full: how many are the float32 engine's."""
    texts = [text for text, _ in examples(200, 2, held_out=True)]
    params = SamplingParams(temperature=0.0, max_tokens=14)
    options = dict(dtype="float32", kv_cache_memory_bytes=8 << 20, disable_log_stats=True)
    outputs = []
    for quantization in (None, name):
        llm = LLM(model=str(FOLDER), quantization=quantization, **options)
        outputs.append([o.outputs[0].text for o in llm.generate(texts, params, use_tqdm=False)])
    same = sum(a == b for a, b in zip(*outputs, strict=True)) / len(texts)
    print(f"{name}: {same:.3f} of the dates are the same")
    assert same >= least


@pytest.mark.parametrize(("name", "most"), [("int8", 0.032), ("int4", 0.34)])
@pytest.mark.parametrize("hidden_size", [128, 576])
def test_error_of_random_llamas(tmp_path, name, most, hidden_size):
    """Log-probabilities of a random model of SmolLM2's proportions, its weights as Transformers
    begins with them, by the part of their spread that is error."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=4,
        num_attention_heads=hidden_size // 64,
        num_key_value_heads=max(1, hidden_size // 192),
        max_position_embeddings=256,
    )
    model = LlamaForCausalLM(config).eval()
    model.save_pretrained(tmp_path)
    prompts = torch.randint(3, 256, (1, 64)).tolist()
    expected = exact_log_probs(model, prompts)
    actual = log_probs(make_llm(str(tmp_path), quantization=name, max_logprobs=-1), prompts)
    error = ((actual - expected).norm() / (expected - expected.mean(-1, True)).norm()).item()
    print(f"{name}, hidden size {hidden_size}: relative error {error:.4f}")
    assert error <= most


@pytest.mark.parametrize(("name", "dtype"), [("int8", "bfloat16"), ("int4", "float32")])
def test_decode_steps_are_programs(tmp_path, monkeypatch, name, dtype):
    """Recorded and replayed as those of plain weights are, with the same bits; in float32 as well,
    whose plain products torch computes."""
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    make_model(programs.FAMILIES["llama"], tmp_path)
    options = dict(quantization=name, dtype=dtype)
    expected = programs.run(programs.make_llm(tmp_path, enforce_eager=True, **options))
    llm = programs.make_llm(tmp_path, **options)
    replays = programs.count_replays(llm, monkeypatch)
    assert programs.run(llm) == expected
    assert {(1, 1), (2, 2), (3, 3), (4, 4)} <= set(replays)


def test_a_file_s_weights_are_kept():
    """SmolLM2's Q4_1 and Q8_0 tensors: the values of the file, as the unpacked model in float32 has
    them, and its bytes; what it writes is what that model writes, but for near ties."""
    prompts = ["The capital of France is", "Once upon a time there was"]
    params = SamplingParams(temperature=0.0, max_tokens=8, logprobs=5)
    kept = LLM(model=model_path(), quantization="gguf", max_model_len=128)
    plain = LLM(model=model_path(), dtype="float32", max_model_len=128)

    def packed_values(model) -> dict[str, torch.Tensor]:
        return {
            name: dequantize(unpack_blocks(p.data, p.format), p.format)
            for name, p in model.named_parameters()
            if isinstance(p, QuantizedParameter)
        }

    (values,) = kept.apply_model(packed_values)
    (expected,) = plain.apply_model(
        lambda model: {n: p.data for n, p in model.named_parameters() if n in values}
    )
    assert len(values) == 30 * 4 + 1 == len(expected)
    assert all(torch.equal(values[name], expected[name]) for name in values)
    (nbytes,) = kept.apply_model(lambda model: sum(p.nbytes for p in model.parameters()))
    assert nbytes < 1.02 * Path(model_path()).stat().st_size
    for mine, other in zip(kept.generate(prompts, params), plain.generate(prompts, params)):
        first, same = mine.outputs[0].logprobs[0], other.outputs[0].logprobs[0]
        token = other.outputs[0].token_ids[0]
        assert first[token].logprob == pytest.approx(same[token].logprob, abs=0.3)
