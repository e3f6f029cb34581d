# SPDX-License-Identifier: Apache-2.0
"""BART and mBART against Transformers in float32, token for token: a BART that was trained, and
random ones, however the work is cut up and however a prompt is written."""

from __future__ import annotations

import random
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.models.bart_dates import examples
from tests.models.make_bart import FOLDER
from torch import nn

from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams

NUM_NEW_TOKENS = 14
START, FORCED_BOS = 2, 0
# Dates that were never trained with, in any form.
DATES = examples(200, 2, held_out=True)
# Encoder ids as users of BART know them: BOS in front, EOS, the decoder's start token, at the end.
IDS = [0, 294, 213, 7, 334, 479, 2]


def make_llm(folder: Path, **options) -> LLM:
    defaults = dict(dtype="float32", kv_cache_memory_bytes=8 << 20, disable_log_stats=False)
    return LLM(model=str(folder), **{**defaults, **options})


def metric(llm: LLM, name: str) -> float:
    """Of all engines of this process so far."""
    return next(m.value for m in llm.get_metrics() if m.name == name)


def by_transformers(
    model: nn.Module, texts: Sequence[Sequence[int]], decoder_ids: Sequence[int] = (), **options
) -> list[list[int]]:
    """What `generate` gives behind the decoder's prompt, one text at a time."""
    outputs = []
    begin = list(decoder_ids) or [START, model.generation_config.forced_bos_token_id]
    for text in texts:
        ids = torch.tensor([text])
        with torch.inference_mode():
            output = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                decoder_input_ids=torch.tensor([begin]),
                num_beams=1,
                **options,
            )
        outputs.append(output[0, len(begin) :].tolist())
    return outputs


# The trained model


@cache
def trained_model() -> nn.Module:
    from transformers import AutoModelForSeq2SeqLM

    return AutoModelForSeq2SeqLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@cache
def trained_by_transformers() -> tuple[list[str], list[list[int]]]:
    """Texts and tokens of `generate` as a user would call it: a plain batch, padded, no decoder
    prompt. Behind start token and forced BOS, up to EOS."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    inputs = tokenizer([text for text, _ in DATES], padding=True, return_tensors="pt")
    inputs.pop("token_type_ids", None)
    with torch.inference_mode():
        output = trained_model().generate(**inputs, num_beams=1)
    assert (output[:, 0] == START).all() and (output[:, 1] == FORCED_BOS).all()
    rows = [row[: row.index(START) + 1] if START in row else row for row in output[:, 2:].tolist()]
    return tokenizer.batch_decode(output, skip_special_tokens=True), rows


@pytest.fixture(scope="module")
def trained() -> LLM:
    return make_llm(FOLDER, max_num_seqs=32)


def test_the_trained_model_reads_dates(trained):
    """Right answers, not just the same as another's: 198 of 200 unseen dates when the model was
    made. Text and tokens are exactly Transformers', with the model's own defaults on both sides."""
    outputs = trained.generate([text for text, _ in DATES], use_tqdm=False)
    texts = [output.outputs[0].text for output in outputs]
    assert sum(text == date for text, (_, date) in zip(texts, DATES, strict=True)) >= 195
    expected_texts, expected = trained_by_transformers()
    assert texts == expected_texts
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert {output.outputs[0].finish_reason for output in outputs} == {"stop"}


def test_every_way_to_write_a_prompt(trained):
    """Text or ids, alone, in a dict, beside a decoder prompt that is left out, empty, text or ids,
    with its start token or without: one output. Guards against an encoder text that is taken for
    the decoder's, and against a start token put in front twice."""
    text = DATES[0][0]
    ids = trained.get_tokenizer().encode(text)
    data = {"multi_modal_data": {"text": text}}
    decoders = (None, "", "<s>", "</s><s>", [FORCED_BOS], [START], [START, FORCED_BOS])
    prompts = [
        text,
        ids,
        {"prompt": text},
        {"prompt_token_ids": ids},
        {"prompt": "", **data},
        {"prompt": "", "multi_modal_data": {"text": ids}},
        *({"encoder_prompt": text, "decoder_prompt": decoder} for decoder in decoders),
        *({"encoder_prompt": ids, "decoder_prompt": decoder} for decoder in decoders),
        {"encoder_prompt": {"prompt": "", **data}, "decoder_prompt": "<s>"},
        {"encoder_prompt": {"prompt": "", **data}, "decoder_prompt": {"prompt": "<s>"}},
        {
            "encoder_prompt": {"prompt": "", **data},
            "decoder_prompt": {"prompt_token_ids": [START, FORCED_BOS]},
        },
    ]
    outputs = [trained.generate(prompt, use_tqdm=False)[0] for prompt in prompts]
    expected = trained_by_transformers()[1][0]
    for prompt, output in zip(prompts, outputs, strict=True):
        assert list(output.outputs[0].token_ids) == expected, prompt
        assert output.prompt_token_ids == [START, FORCED_BOS], prompt


def test_ids_with_a_start_token_that_is_eos(trained):
    """The decoder begins with EOS, and the encoder's ids hold it: neither ends the request."""
    (expected,) = by_transformers(trained_model(), [IDS])
    for prompt in (IDS, {"encoder_prompt": IDS, "decoder_prompt": [START]}):
        (output,) = trained.generate(prompt, use_tqdm=False)
        assert list(output.outputs[0].token_ids) == expected
        assert output.prompt_token_ids == [START, FORCED_BOS]
    assert len(expected) > 1


def test_a_decoder_prompt_is_gone_on_with(trained):
    """The first half of the date given as text or ids: the model writes the rest."""
    text, date = DATES[0]
    half = {"encoder_prompt": text, "decoder_prompt": f"<s>{date[:5]}"}
    ids = [FORCED_BOS, *trained.get_tokenizer().encode(date[:5], add_special_tokens=False)]
    for decoder in (half["decoder_prompt"], ids, [START, *ids]):
        (output,) = trained.generate([{**half, "decoder_prompt": decoder}], use_tqdm=False)
        assert output.outputs[0].text == date[5:]


def test_defaults_of_the_generation_config(trained):
    """`max_length` (16, with the decoder's prompt) bounds what has no end, whose last token is the
    forced EOS; a request's own `max_tokens` comes before."""
    defaults = trained.get_default_sampling_params()
    assert (defaults.temperature, defaults.max_length, defaults.max_tokens) == (0.0, 16, None)
    params = trained.get_default_sampling_params()
    params.min_length = 16
    (output,) = trained.generate([DATES[0][0]], params, use_tqdm=False)
    tokens = output.outputs[0].token_ids
    assert len(tokens) == 14 and tokens.index(START) == 13
    params = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    (output,) = trained.generate([DATES[0][0]], params, use_tqdm=False)
    assert len(output.outputs[0].token_ids) == 20


@pytest.mark.parametrize("beam_width", [1, 2, 3, 4])
def test_beams(trained, beam_width):
    """The best of the beams is Transformers', for texts of unequal length searched at once."""
    texts = [text for text, _ in DATES[:6]]
    params = BeamSearchParams(beam_width=beam_width, max_tokens=14, early_stopping=True)
    outputs = trained.beam_search(texts, params)
    tokenizer = trained.get_tokenizer()
    for text, output in zip(texts, outputs, strict=True):
        ids = torch.tensor([tokenizer.encode(text)])
        with torch.inference_mode():
            expected = trained_model().generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=beam_width, early_stopping=True
            )
        assert output.sequences[0].tokens == expected[0].tolist()


def test_sizes_are_the_decoders(trained):
    """What plugins ask of a config, by the names that BART gives them."""
    config = trained.model_config
    sizes = config.get_hidden_size(), config.get_head_size(), config.get_total_num_hidden_layers()
    assert sizes == (128, 32, 2)


# Random models


@dataclass(frozen=True)
class Shape:
    """A model by Transformers' names; deep and wide enough that a fault shows in its tokens."""

    model_type: str
    scale_embedding: bool = False
    forced_bos_token_id: int = FORCED_BOS

    def make(self, folder: Path) -> nn.Module:
        from transformers import CONFIG_MAPPING, AutoModelForSeq2SeqLM, GenerationConfig

        torch.manual_seed(0)
        config = CONFIG_MAPPING[self.model_type](
            vocab_size=301,
            d_model=64,
            encoder_layers=3,
            decoder_layers=3,
            encoder_attention_heads=4,
            decoder_attention_heads=2,
            encoder_ffn_dim=128,
            decoder_ffn_dim=96,
            max_position_embeddings=1024,
            init_std=0.2,
            scale_embedding=self.scale_embedding,
            # Tied, it says each token after itself for ever.
            tie_word_embeddings=False,
            decoder_start_token_id=START,
        )
        model = AutoModelForSeq2SeqLM.from_config(config).eval()
        for name, parameter in model.named_parameters():
            if parameter.dim() == 1:  # norms and biases begin as ones and zeros, which hide faults
                mean = 1.0 if "norm" in name and name.endswith("weight") else 0.0
                nn.init.normal_(parameter, mean=mean, std=0.2)
            # Sharp attention and small steps, or what comes out depends on neither text nor tokens.
            elif "q_proj" in name or "k_proj" in name:
                parameter.data *= 2
            elif "out_proj" in name or "fc2" in name:
                parameter.data *= 0.15
        nn.init.normal_(model.final_logits_bias, std=0.3)
        model.generation_config = GenerationConfig(
            bos_token_id=0,
            pad_token_id=1,
            decoder_start_token_id=START,
            forced_bos_token_id=self.forced_bos_token_id,
        )
        model.save_pretrained(folder)
        return model


SHAPES = {
    "bart": Shape("bart"),
    "bart-scaled": Shape("bart", scale_embedding=True),
    # Which language comes out, the forced BOS says.
    "mbart": Shape("mbart", scale_embedding=True, forced_bos_token_id=250),
}


@cache
def random_texts() -> tuple[tuple[int, ...], ...]:
    """32 encoder inputs: a token, lengths around a page's, one as long as the encoder takes."""
    rng = random.Random(0)
    lengths = [1, 15, 16, 17, 32, 33, 1024] + [rng.randrange(2, 120) for _ in range(25)]
    return tuple(tuple(rng.randrange(3, 301) for _ in range(length)) for length in lengths)


def run(llm: LLM, prompts: Sequence, num_new_tokens: int = NUM_NEW_TOKENS) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    outputs = llm.generate(list(prompts), params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def exactly(num_new_tokens: int = NUM_NEW_TOKENS) -> dict:
    return dict(max_new_tokens=num_new_tokens, min_new_tokens=num_new_tokens, do_sample=False)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_random_models(shape, tmp_path):
    """Alone, then 32 of mixed lengths in one batch, then again with their pages cached. Guards
    against texts that see each other, padding, and keys of one encoder's output taken for
    another's."""
    texts = random_texts()
    expected = by_transformers(shape.make(tmp_path), texts, **exactly())
    assert len({tuple(tokens) for tokens in expected}) > 20, "the text makes no difference"
    llm = make_llm(tmp_path, skip_tokenizer_init=True, max_num_seqs=32)
    prompts = [{"prompt_token_ids": list(text)} for text in texts]
    assert [run(llm, [prompt])[0] for prompt in prompts[:9]] == expected[:9]
    llm.reset_prefix_cache()
    assert run(llm, prompts) == expected
    assert run(llm, prompts) == expected


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_under_preemption(name, tmp_path):
    """A pool that holds few requests to their end: some are preempted after their encoder output
    was dropped, encode again, and end with the same tokens."""
    texts = random_texts()[7:19]
    expected = by_transformers(SHAPES[name].make(tmp_path), texts, **exactly(40))
    pages = 40
    llm = make_llm(
        tmp_path, skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=pages
    )
    before = metric(llm, "vllm:num_preemptions")
    assert run(llm, [list(text) for text in texts], 40) == expected
    assert metric(llm, "vllm:num_preemptions") > before


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_a_decoder_prompt_in_chunks(name, tmp_path):
    """Decoder prompts of several steps' budget: the encoder's output is there for all of them."""
    texts = random_texts()[7:12]
    decoder = [START, *(3 + i * 7 % 290 for i in range(70))]
    expected = by_transformers(SHAPES[name].make(tmp_path), texts, decoder, **exactly())
    llm = make_llm(tmp_path, skip_tokenizer_init=True, max_num_batched_tokens=32, max_num_seqs=4)
    prompts = [{"encoder_prompt": list(text), "decoder_prompt": decoder} for text in texts]
    assert run(llm, prompts) == expected
    assert run(llm, prompts[::-1]) == expected[::-1]


def test_no_repeat_ngram_and_lengths_as_transformers(tmp_path):
    """A summariser's defaults on a model that repeats itself all the time."""
    from transformers import GenerationConfig

    model = SHAPES["bart"].make(tmp_path)
    model.generation_config = GenerationConfig(
        bos_token_id=0,
        pad_token_id=1,
        eos_token_id=START,
        decoder_start_token_id=START,
        forced_bos_token_id=FORCED_BOS,
        forced_eos_token_id=START,
        no_repeat_ngram_size=2,
        min_length=12,
        max_length=30,
        num_beams=4,
    )
    model.generation_config.save_pretrained(tmp_path)
    texts = random_texts()[:12]
    expected = []
    for text in texts:  # as a user would call it
        ids = torch.tensor([text])
        with torch.inference_mode():
            output = model.generate(ids, attention_mask=torch.ones_like(ids), num_beams=1)
        expected.append(output[0, 2:].tolist())
    llm = make_llm(tmp_path, skip_tokenizer_init=True)
    outputs = llm.generate([list(text) for text in texts], use_tqdm=False)
    assert [list(output.outputs[0].token_ids) for output in outputs] == expected
    assert all(10 <= len(tokens) <= 28 for tokens in expected)


def test_the_example(monkeypatch, capsys):
    """`examples/bart.py` as the documentation shows it."""
    example = Path(__file__).parents[2] / "examples" / "bart.py"
    monkeypatch.setattr(sys, "argv", [str(example)])
    runpy.run_path(str(example), run_name="__main__")
    answers = [line.rpartition(" -> ")[2] for line in capsys.readouterr().out.splitlines()]
    assert answers == ["2015-10-21", "1984-03-17", "1999-03-03", "2015-10-21"]
