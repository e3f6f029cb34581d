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


@pytest.mark.slow
def test_tensors_and_padding_equal_transformers(tmp_path):
    """Guards against plugins, whose processors call the tokenizer as they do elsewhere, getting
    lists where they want tensors, or no batch axis for a single text."""
    from transformers import AutoTokenizer

    config = {"tokenizer_class": "TokenizersBackend", "pad_token": "</s>"}
    path = byte_level(tmp_path, config, with_bos_processor=True)
    ours, theirs = get_tokenizer(path), AutoTokenizer.from_pretrained(str(path))
    for text, options in [
        ("hello world", {"return_tensors": "pt"}),
        (["hello world", "two"], {"return_tensors": "pt", "padding": True}),
        (["hello world", "two"], {"padding": "longest"}),
        (["hello"], {"return_tensors": "np", "add_special_tokens": False}),
    ]:
        got, expected = ours(text, **options), theirs(text, **options)
        for key in ("input_ids", "attention_mask"):
            assert type(got[key]) is type(expected[key])
            assert list(map(list, got[key])) == list(map(list, expected[key]))
    assert ours("hello", return_tensors="pt").input_ids.shape == (1, 2)
    without = get_tokenizer(byte_level(tmp_path, CONFIGS["no_class"]))
    with pytest.raises(ValueError, match="no padding token"):
        without(["a", "b"], padding=True)


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


SPACE = "\u2581"
PIECES = {
    SPACE: 3,
    "h": 4,
    "e": 5,
    "l": 6,
    "o": 7,
    "w": 8,
    "r": 9,
    "d": 10,
    "he": 11,
    "ll": 12,
    f"{SPACE}w": 13,
    f"{SPACE}he": 14,
}
MERGES = [("h", "e"), ("l", "l"), (SPACE, "w"), (SPACE, "he")]


def make_of_class(name: str):
    """A small tokenizer of one of Transformers' classes."""
    import transformers

    bytes_ = {f"<0x{byte:02X}>": 20 + byte for byte in range(256)}
    if name in ("LlamaTokenizer", "GemmaTokenizer"):
        vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **PIECES, **bytes_}
        if name == "GemmaTokenizer":
            vocab |= {"<pad>": 300, "<eos>": 301, "<bos>": 302, "<mask>": 303}
        return getattr(transformers, name)(vocab=vocab, merges=MERGES)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: index for index, letter in enumerate(alphabet)}
    vocab |= {"he": 256, "ll": 257, "<|endoftext|>": 258}
    return getattr(transformers, name)(vocab=vocab, merges=[("h", "e"), ("l", "l")])


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "GemmaTokenizer", "GPT2Tokenizer", "Qwen2Tokenizer"]
)
def test_known_classes_equal_transformers(tmp_path, name):
    """The classes that are served without Transformers add nothing to the files they write."""
    from transformers import AutoTokenizer

    make_of_class(name).save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    ours, theirs = get_tokenizer(tmp_path), AutoTokenizer.from_pretrained(str(tmp_path))
    assert isinstance(ours, FastTokenizer)
    for text in [
        *TEXTS,
        "hello 123",
        "  hello\n\nworld  ",
        "\u00f6 \U0001f600",
        "<|endoftext|>x</s>",
    ]:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == theirs.encode(text, add_special_tokens=special)
            assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_token_id, ours.eos_token_id) == (theirs.bos_token_id, theirs.eos_token_id)
    assert (len(ours), ours.vocab_size) == (len(theirs), theirs.vocab_size)


@pytest.mark.slow
def test_other_classes_go_through_transformers(tmp_path):
    """A class that does more than its files say must not be served by the thin one."""
    path = byte_level(tmp_path, {"tokenizer_class": "BertTokenizer"})
    assert not isinstance(get_tokenizer(path), FastTokenizer)
