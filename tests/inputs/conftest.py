# SPDX-License-Identifier: Apache-2.0
"""A model's folder without weights, of the shape of BART's, with a tokenizer that knows some
words."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
WORDS = ["the", "cat", "sat", "on", "a", "mat"]


def write_tokenizer(folder):
    vocabulary = {word: i for i, word in enumerate([*SPECIAL, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 2)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {"bos_token": "<s>", "pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **names}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_model(folder, architecture="TextEncoderForTest", generation=None, **config):
    """config.json, generation_config.json and the tokenizer; returns the folder's name."""
    write_tokenizer(folder)
    fields = {
        "architectures": [architecture],
        "model_type": "bart",
        "is_encoder_decoder": True,
        "vocab_size": 16,
        "max_position_embeddings": 12,
        "d_model": 8,
        "decoder_attention_heads": 2,
        "encoder_attention_heads": 2,
        "decoder_layers": 1,
        "encoder_layers": 1,
        "decoder_start_token_id": 2,
        "num_attention_heads": 2,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        **config,
    }
    (folder / "config.json").write_text(json.dumps(fields))
    generation = {"forced_bos_token_id": 0} if generation is None else generation
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return str(folder)


@pytest.fixture
def make_model(tmp_path):
    """`write_model` in a folder of its own."""

    def make(architecture="TextEncoderForTest", generation=None, **config):
        return write_model(tmp_path, architecture, generation, **config)

    return make
