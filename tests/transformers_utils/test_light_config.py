# SPDX-License-Identifier: Apache-2.0
"""Configs without Transformers' classes have the classes' fields."""

from __future__ import annotations

import subprocess
import sys

import pytest

from vllm.transformers_utils.config import build_hf_config
from vllm.transformers_utils.light_config import make_light_config

CONFIGS = [
    {},
    {"num_attention_heads": 16, "hidden_size": 512},
    {"head_dim": None},
    {"num_key_value_heads": 4, "head_dim": 64, "attention_bias": True, "mlp_bias": True},
    {"rope_theta": 5e5, "tie_word_embeddings": True},
    {"rope_scaling": None, "torch_dtype": "bfloat16"},
    {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}, "dtype": "float16"},
    {"sliding_window": None, "eos_token_id": [1, 2], "made_up": 3},
]


@pytest.mark.parametrize("model_type", ["llama", "mistral"])
@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_fields_are_those_of_transformers(model_type, changes):
    """Guards against defaults that drift from Transformers' as it is updated."""
    config = {"model_type": model_type, "architectures": ["X"], **changes}
    light = make_light_config(config)
    theirs = build_hf_config(config)
    for name, value in light.to_dict().items():
        expected = getattr(theirs, name)
        is_dtype = name == "dtype" and expected is not None
        assert value == (str(expected).removeprefix("torch.") if is_dtype else expected), name
    missing = theirs.to_dict().keys() - light.to_dict().keys()
    # What no model reads: training, generation, bookkeeping.
    assert missing <= {
        "attention_dropout", "pretraining_tp", "transformers_version", "_name_or_path",
        "chunk_size_feed_forward", "id2label", "label2id", "output_attentions",
        "output_hidden_states", "problem_type", "return_dict",
    }  # fmt: skip


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "qwen2"},
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"model_type": "llama", "rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"model_type": "mistral", "layer_types": ["full_attention"]},
        {},
    ],
    ids=str,
)
def test_others_need_the_class(config):
    assert make_light_config(config) is None


def test_no_import():
    """The point of it all."""
    code = (
        "import sys; from vllm.transformers_utils.light_config import make_light_config; "
        "assert make_light_config({'model_type': 'llama'}).get_text_config().head_dim == 128; "
        "print({'torch', 'transformers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "set()"
