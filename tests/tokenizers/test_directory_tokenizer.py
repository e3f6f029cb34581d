# SPDX-License-Identifier: Apache-2.0
"""Tokenizers of model directories: the thin class must equal Transformers' AutoTokenizer."""

from __future__ import annotations

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from vllm.tokenizers import get_tokenizer
from vllm.tokenizers.fast import FastTokenizer

TEXTS = ["hello world", " two  spaces", "<s>hello</s> <extra>x", "naïve ☃ 123", "", "hello<mask>"]


def byte_level(tmp_path, config: dict, with_bos_processor: bool = False):
    """A small byte-level BPE saved as a model directory."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>", "<unk>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["hello world two spaces hello hello world"], trainer)
    if with_bos_processor:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)]
        )
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]})
    )
    return tmp_path


CONFIGS = {
    "plain": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
    "no_class": {"eos_token": "</s>"},
    "token_objects": {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": {"__type": "AddedToken", "content": "<s>", "special": True},
        "extra_special_tokens": ["<extra>"],
    },
    "new_special": {
        "tokenizer_class": "TokenizersBackend",
        "mask_token": "<mask>",
        "eos_token": "</s>",
    },
    "add_bos": {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
    },
    "add_both": {
        "tokenizer_class": "TokenizersBackend",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "add_bos_token": True,
        "add_eos_token": True,
    },
    "llama_class": {
        "tokenizer_class": "LlamaTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("with_bos_processor", [False, True])
def test_thin_tokenizer_equals_transformers(tmp_path, name, with_bos_processor):
    """Guards against special tokens lost from tokenizer_config.json and against a lost or
    doubled BOS."""
    from transformers import AutoTokenizer

    path = byte_level(tmp_path, CONFIGS[name], with_bos_processor)
    ours, theirs = get_tokenizer(path), AutoTokenizer.from_pretrained(str(path))
    assert isinstance(ours, FastTokenizer)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids, skip_special_tokens=special) == theirs.decode(
                ids, skip_special_tokens=special
            )
        cut = ours.encode(text, truncation=True, max_length=4)
        assert cut == theirs.encode(text, truncation=True, max_length=4)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert set(theirs.all_special_ids) <= set(ours.all_special_ids)
    assert len(ours) == len(theirs)


def test_chat_templates_from_files(tmp_path):
    """A template file comes before the config's; several templates are told apart by name and
    tools."""
    path = byte_level(tmp_path, {"chat_template": "old", "bos_token": "<s>"})
    assert get_tokenizer(path).get_chat_template() == "old"
    (path / "chat_template.jinja").write_text("new {{ bos_token }}{{ x }}")
    tokenizer = get_tokenizer(path)
    assert tokenizer.apply_chat_template([{"role": "user"}], tokenize=False, x=1) == "new <s>1"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text("tools")
    tokenizer = get_tokenizer(path)
    assert tokenizer.get_chat_template(tools=[{}]) == "tools"
    assert tokenizer.get_chat_template("tool_use") == "tools"
    assert tokenizer.get_chat_template("given") == "given"
    assert tokenizer.get_chat_template().startswith("new")


def test_no_chat_template_is_a_value_error(tmp_path):
    """A base model has none: the chat route must say so."""
    with pytest.raises(ValueError, match="--chat-template"):
        get_tokenizer(byte_level(tmp_path, {})).apply_chat_template(
            [{"role": "user", "content": "x"}]
        )


def test_faults_name_the_file(tmp_path):
    """What cannot be read is named; an unknown mode lists what there is."""
    path = byte_level(tmp_path, {})
    with pytest.raises(ValueError, match="supported: auto, hf"):
        get_tokenizer(path, tokenizer_mode="mistral")
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match="tokenizer.json cannot be read"):
        get_tokenizer(path)
    (path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ValueError, match="must hold a JSON object"):
        get_tokenizer(path)
