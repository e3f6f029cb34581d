# SPDX-License-Identifier: Apache-2.0
"""Configs of the most usual models without Transformers' classes.

Importing one of those classes takes 1.4 s of CPU time, a quarter of a start. What a class does to
the fields of these models is little: defaults, and two fields derived from others.
"""

from __future__ import annotations

from typing import Any

from vllm.transformers_utils import nemotron_parse

_COMMON: dict[str, Any] = dict(
    architectures=None,
    bos_token_id=1,
    dtype=None,
    eos_token_id=2,
    hidden_act="silu",
    hidden_size=4096,
    initializer_range=0.02,
    is_encoder_decoder=False,
    num_attention_heads=32,
    num_hidden_layers=32,
    pad_token_id=None,
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    use_cache=True,
    vocab_size=32000,
)
# model_type -> Transformers' defaults.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": dict(
        **_COMMON,
        attention_bias=False,
        head_dim=None,
        intermediate_size=11008,
        max_position_embeddings=2048,
        mlp_bias=False,
        num_key_value_heads=None,
    ),
    "mistral": dict(
        **_COMMON,
        head_dim=None,
        intermediate_size=14336,
        max_position_embeddings=131072,
        num_key_value_heads=8,
        sliding_window=4096,
    ),
}


class LightConfig:
    """A config's fields as attributes, with what models call of Transformers' `PretrainedConfig`."""

    def __init__(self, fields: dict[str, Any]) -> None:
        self.__dict__.update(fields)

    def to_dict(self) -> dict[str, Any]:
        """The fields."""
        return dict(self.__dict__)

    def get_text_config(self, decoder: bool | None = None, encoder: bool | None = None):
        """Itself: these models take text alone."""
        return self

    def __repr__(self) -> str:
        return f"LightConfig({self.__dict__!r})"


def make_light_config(config: dict[str, Any]) -> LightConfig | None:
    """The config of a raw dict with the fields that Transformers' class would have; None where the
    class is needed."""
    from vllm.transformers_utils.config import get_rope_parameters

    if config.get("model_type") == nemotron_parse.MODEL_TYPE:
        return LightConfig(config)  # complete already, and unknown to Transformers
    defaults = _DEFAULTS.get(config.get("model_type", ""))
    rope = get_rope_parameters(config)
    # Other ropes get parameters from elsewhere in the config.
    if defaults is None or rope["rope_type"] != "default" or "layer_types" in config:
        return None
    fields = {**defaults, **config, "rope_parameters": rope}
    fields.pop("rope_scaling", None)
    fields.pop("rope_theta", None)
    heads = fields["num_attention_heads"]
    fields["head_dim"] = fields["head_dim"] or fields["hidden_size"] // heads
    fields["num_key_value_heads"] = fields["num_key_value_heads"] or heads
    fields["dtype"] = fields.pop("torch_dtype", None) or fields["dtype"]
    return LightConfig(fields)
