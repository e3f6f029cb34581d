# SPDX-License-Identifier: Apache-2.0
"""Which class serves which architecture. Imports no torch: classes are named and imported when
needed."""

from __future__ import annotations

import importlib
from collections.abc import Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from vllm.logger import init_logger
from vllm.model_executor.models.interfaces import supports_multimodal
from vllm.model_executor.models.interfaces_base import is_text_generation_model, is_vllm_model
from vllm.transformers_utils.architectures import (
    causal_lm_architectures,
    seq_to_seq_lm_architectures,
)

if TYPE_CHECKING:
    from torch import nn

    from vllm.config import ModelConfig

logger = init_logger(__name__)

# Architecture (as in config.json) -> (module beside this one, class).
_TEXT_GENERATION_MODELS = {
    "GPT2LMHeadModel": ("gpt2", "GPT2LMHeadModel"),
    "Gemma2ForCausalLM": ("gemma2", "Gemma2ForCausalLM"),
    "Gemma3ForCausalLM": ("gemma3", "Gemma3ForCausalLM"),
    "LlamaForCausalLM": ("llama", "LlamaForCausalLM"),
    "MistralForCausalLM": ("llama", "LlamaForCausalLM"),
    "Qwen2ForCausalLM": ("qwen2", "Qwen2ForCausalLM"),
    "Qwen3ForCausalLM": ("qwen3", "Qwen3ForCausalLM"),
}

# Models with an encoder, whose inputs come beside the decoder's tokens.
_MULTIMODAL_MODELS = {
    "BartForConditionalGeneration": ("bart", "BartForConditionalGeneration"),
    "MBartForConditionalGeneration": ("mbart", "MBartForConditionalGeneration"),
    "NemotronParseForConditionalGeneration": (
        "nemotron_parse",
        "NemotronParseForConditionalGeneration",
    ),
}

# What serves architectures that have no class here.
_FALLBACK = ("vllm.model_executor.models.transformers", "TransformersForCausalLM")
_ENCODER_DECODER_FALLBACK = (_FALLBACK[0], "TransformersForSeq2SeqLM")
# Sub-configs by which a config shows that its model takes more than text.
_OTHER_INPUTS = ("vision_config", "audio_config", "image_config", "video_config")


@dataclass(frozen=True)
class _LazyModel:
    """A class by name, imported on first use."""

    module_name: str
    class_name: str

    def load(self) -> type[nn.Module]:
        module = importlib.import_module(self.module_name)
        try:
            return getattr(module, self.class_name)
        except AttributeError:
            raise ValueError(f"{self.module_name} has no model class {self.class_name}") from None


@dataclass
class _ModelRegistry:
    models: dict[str, _LazyModel | type[nn.Module]] = field(default_factory=dict)

    def get_supported_archs(self) -> Set[str]:
        """Architectures with a class, in-tree and registered."""
        return self.models.keys()

    def register_model(self, model_arch: str, model_cls: type[nn.Module] | str) -> None:
        """Serve an architecture with a class, or with "module:Class", which is imported when
        needed.

        Replaces, with a warning, what served it before. Raises TypeError or ValueError for anything
        else.
        """
        if not isinstance(model_arch, str):
            raise TypeError(f"model_arch must be a string, not {type(model_arch).__name__}")
        if isinstance(model_cls, str):
            module_name, separator, class_name = model_cls.partition(":")
            if not separator or not module_name or not class_name or ":" in class_name:
                raise ValueError(f"{model_cls!r} must be of the form '<module>:<class>'")
            entry: _LazyModel | type[nn.Module] = _LazyModel(module_name, class_name)
        elif isinstance(model_cls, type):
            if not is_vllm_model(model_cls):
                raise ValueError(
                    f"{model_cls.__qualname__} cannot serve {model_arch}: it needs __init__(*, "
                    "vllm_config, prefix), "
                    "embed_input_ids and forward"
                )
            entry = model_cls
        else:
            raise TypeError(
                f"model_cls must be a class or '<module>:<class>', not {type(model_cls).__name__}"
            )
        if model_arch in self.models:
            logger.warning(
                "model architecture %s is already registered and now served by %s",
                model_arch,
                model_cls,
            )
        self.models[model_arch] = entry

    def check_supported(
        self, architectures: str | list[str], model_config: ModelConfig | None = None
    ) -> str:
        """The first architecture that can be served, found without importing any model.

        Without `model_config` only classes that are registered count; with it also Transformers'
        own code, as far as `model_impl` allows. Raises ValueError in one line that lists what is
        supported.
        """
        names = [architectures] if isinstance(architectures, str) else architectures
        if not names:
            raise ValueError(
                'the model\'s config names no architectures; add "architectures" to config.json'
            )
        model_impl = "vllm" if model_config is None else model_config.model_impl
        if model_impl != "transformers":
            for name in names:
                if name in self.models:
                    return name
        reason = "it is not registered"
        if model_impl != "vllm":
            reason = _why_no_fallback(names, model_config)
            if reason is None:
                return names[0]
        raise ValueError(
            f"model architecture {' / '.join(names)} is not supported ({reason}); supported: "
            f"{', '.join(sorted(self.models))}, and with Transformers' code (--model-impl auto or "
            "transformers) its other decoder-only language models, and those with a text encoder "
            "whose attention adds no biases: Marian, Pegasus, M2M100, NLLB, Blenderbot, PLBart"
        )

    def resolve_model_cls(
        self, architectures: str | list[str], model_config: ModelConfig
    ) -> tuple[type[nn.Module], str]:
        """The class that serves the first supported architecture, and that architecture."""
        name = self.check_supported(architectures, model_config)
        is_fallback = name not in self.models or (
            model_config is not None and model_config.model_impl == "transformers"
        )
        entry = _fallback(model_config) if is_fallback else self.models[name]
        if not isinstance(entry, _LazyModel):
            return entry, name
        cls = entry.load()
        if not is_vllm_model(cls):
            raise ValueError(
                f"{entry.module_name}:{entry.class_name} is no model: it lacks the engine's "
                "interface"
            )
        return cls, name

    def is_text_generation_model(
        self, architectures: str | list[str], model_config: ModelConfig
    ) -> bool:
        """Whether the class gives logits. Imports it."""
        return is_text_generation_model(self.resolve_model_cls(architectures, model_config)[0])

    def is_multimodal_model(
        self, architectures: str | list[str], model_config: ModelConfig
    ) -> bool:
        """Whether the class has an encoder with inputs of its own. Imports it."""
        return supports_multimodal(self.resolve_model_cls(architectures, model_config)[0])


def _fallback(model_config: ModelConfig) -> _LazyModel:
    has_encoder = model_config.is_encoder_decoder
    return _LazyModel(*(_ENCODER_DECODER_FALLBACK if has_encoder else _FALLBACK))


def _why_no_fallback(names: list[str], model_config: ModelConfig) -> str | None:
    """Why Transformers' code for these architectures cannot be tried; None if it can."""
    config = model_config.hf_config_dict
    others = [key for key in _OTHER_INPUTS if config.get(key) is not None]
    if others:
        return f"it takes more than text: its config has a {others[0]}"
    if model_config.is_encoder_decoder:
        return _why_no_encoder_decoder_fallback(names, config)
    if "AutoModelForCausalLM" in (config.get("auto_map") or {}):
        return None if model_config.trust_remote_code else "its code needs --trust-remote-code"
    known = causal_lm_architectures()
    if known is not None and not known.intersection(names):
        return "Transformers has no causal language model of this name"
    return None


def _why_no_encoder_decoder_fallback(names: list[str], config: dict[str, Any]) -> str | None:
    known = seq_to_seq_lm_architectures()
    if known is not None and not known.intersection(names):
        return "Transformers has no encoder-decoder language model of this name"
    if "relative_attention_num_buckets" in config:
        return "its attention adds relative position biases to its scores, which no backend does"
    if isinstance(config.get("decoder"), dict):
        return "its encoder and decoder have configs of their own"
    decoder_vocab_size = config.get("decoder_vocab_size") or config.get("vocab_size")
    if decoder_vocab_size != config.get("vocab_size"):
        return "its encoder and decoder have vocabularies of their own"
    return None


ModelRegistry = _ModelRegistry(
    {
        arch: _LazyModel(f"vllm.model_executor.models.{module}", cls)
        for arch, (module, cls) in {**_TEXT_GENERATION_MODELS, **_MULTIMODAL_MODELS}.items()
    }
)
