# SPDX-License-Identifier: Apache-2.0
"""Beam search of encoder-decoder models against Transformers in float32: tokens and scores, with a
model's own generation config, and one pass of the encoder for all beams."""

from __future__ import annotations

import pytest
import torch

from tests.models.test_bart import (
    DATES,
    FOLDER,
    SHAPES,
    START,
    make_llm,
    metric,
    random_texts,
    trained_model,
)
from vllm.sampling_params import BeamSearchParams

# (length_penalty, early_stopping)
WAYS_TO_STOP = [(1.0, False), (2.0, True), (0.5, "never"), (-1.0, False)]


@torch.inference_mode()
def by_transformers(model, ids, width, length_penalty, early_stopping, **more):
    """Sequences, decoder prompt and all, without padding; and scores."""
    ids = torch.tensor([ids])
    beams = {} if width == 1 else dict(length_penalty=length_penalty, early_stopping=early_stopping)
    made = model.generate(
        ids, attention_mask=torch.ones_like(ids), num_beams=width, num_return_sequences=width,
        return_dict_in_generate=True, output_scores=True, **beams, **more,
    )  # fmt: skip
    pad = model.generation_config.pad_token_id
    rows = [[token for token in row if token != pad] for row in made.sequences.tolist()]
    return rows, None if width == 1 else made.sequences_scores.tolist()


def check(output, wanted):
    sequences, scores = wanted
    assert [sequence.tokens for sequence in output.sequences] == sequences
    if scores is not None:
        made = [sequence.score for sequence in output.sequences]
        torch.testing.assert_close(made, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_trained_bart(width):
    """Dates: with the model's max_length, forced BOS, which counts as generated for a score, and
    forced EOS."""
    llm = make_llm(FOLDER, max_num_seqs=16)
    texts = [text for text, _ in DATES[:6]]
    tokenizer = llm.get_tokenizer()
    for length_penalty, early_stopping in WAYS_TO_STOP:
        params = BeamSearchParams(
            width, 14, length_penalty=length_penalty, early_stopping=early_stopping
        )
        for text, output in zip(texts, llm.beam_search(texts, params), strict=True):
            ids = tokenizer.encode(text)
            check(output, by_transformers(trained_model(), ids, width, *params_of(params)))
            if width > 1:
                assert tokenizer.decode(output.sequences[0].tokens[2:-1]) == output.sequences[0].text


def params_of(params: BeamSearchParams):
    return params.length_penalty, params.early_stopping


@pytest.mark.parametrize("name", ["bart", "mbart"])
def test_random_models(name, tmp_path):
    """Mixed lengths in one batch, EOS among the likely tokens, n-grams forbidden; all beams of a text
    share its keys and values: one pass of the encoder each."""
    model = SHAPES[name].make(tmp_path)
    model.generation_config.eos_token_id = [START, *range(20, 40)]
    model.generation_config.no_repeat_ngram_size = 2
    model.generation_config.save_pretrained(tmp_path)
    llm = make_llm(tmp_path, skip_tokenizer_init=True, max_num_seqs=32)
    texts = [list(text) for text in random_texts()[:6]]
    before = metric(llm, "vllm:encoder_passes")
    params = BeamSearchParams(4, 12)
    outputs = llm.beam_search([{"prompt_token_ids": text} for text in texts], params)
    assert metric(llm, "vllm:encoder_passes") - before == len(texts)
    for text, output in zip(texts, outputs, strict=True):
        # The forced BOS is a new token there.
        wanted = by_transformers(model, text, 4, 1.0, False, max_new_tokens=13)
        check(output, wanted)
        assert output.sequences[0].tokens[:2] == [
            START, model.generation_config.forced_bos_token_id,
        ]  # fmt: skip
