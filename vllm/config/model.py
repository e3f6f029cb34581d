# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import os
from dataclasses import field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, field_validator

from vllm.config.multimodal import MultiModalConfig
from vllm.config.utils import config, hash_factors
from vllm.logger import init_logger
from vllm.utils.torch_utils import dtype_name

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from vllm.config.parallel import ParallelConfig

logger = init_logger(__name__)

ModelDType = Literal["auto", "half", "float16", "bfloat16", "float", "float32"]
TokenizerMode = Literal["auto", "hf"]
LogprobsMode = Literal["raw_logprobs"]
ModelImpl = Literal["auto", "vllm", "transformers"]


@config(config=ConfigDict(arbitrary_types_allowed=True, protected_namespaces=()))
class ModelConfig:
    """The model: where it is, what its config says, and what the user wants of it.

    The constructor reads the model's config (config.json or GGUF metadata) and resolves what was
    left out. It imports no torch: `hf_config`, which does, is made on first use.
    """

    model: str = ""
    """A folder with a Hugging Face checkpoint, a .gguf file, or a hub name in the local cache.
    Left out: the embedded model, if it is installed."""
    tokenizer: str = None  # type: ignore[assignment]
    """Where the tokenizer is; left out: with the model."""
    tokenizer_mode: TokenizerMode | str = "auto"
    """auto: without Transformers where that gives the same tokens; hf: Transformers' tokenizer."""
    trust_remote_code: bool = False
    """Run code that comes with the model."""
    dtype: ModelDType | Any = "auto"
    """dtype of weights and activations. auto: the config's, or bfloat16 where the device has it."""
    seed: int = Field(default=0, ge=-(2**63), le=2**63 - 1)
    """Seed of everything random that no request seeds."""
    hf_config_path: str | None = None
    """Where config.json is; left out: with the model."""
    revision: str | None = None
    """Revision of a hub model."""
    code_revision: str | None = None
    """Revision of a hub model's code."""
    tokenizer_revision: str | None = None
    """Revision of a hub tokenizer."""
    max_model_len: int = Field(default=None, ge=-1)  # type: ignore[assignment]
    """Longest request in tokens, prompt and output. Left out: the model's; -1: the model's, or what
    the KV cache can hold if that is less."""
    quantization: str | None = None
    """Weights of fewer bits, on a CPU. int8, int4: any checkpoint's, quantised as they are loaded;
    gguf: a GGUF file's as they are in it. Left out: the model's dtype, GGUF files unpacked into it."""
    enforce_eager: bool = False
    """Compile nothing and record no graphs where the platform would."""
    max_logprobs: int = Field(default=20, ge=-1)
    """Most logprobs a request may ask for at a position; -1: the whole vocabulary."""
    logprobs_mode: LogprobsMode = "raw_logprobs"
    """Logprobs before (raw) any change by sampling parameters."""
    skip_tokenizer_init: bool = False
    """Take and give token ids only."""
    served_model_name: str | list[str] | None = None
    """Names that the API knows the model by; left out: `model`."""
    hf_token: bool | str | None = None
    """Token for the hub."""
    hf_overrides: dict[str, Any] = Field(default_factory=dict)
    """Fields of the model's config to change."""
    generation_config: str = "auto"
    """auto: defaults from the model's generation_config.json; vllm: none; or a folder."""
    override_generation_config: dict[str, Any] = Field(default_factory=dict)
    """Default sampling parameters to change, such as {"temperature": 0.5}."""
    model_impl: ModelImpl = "auto"
    """Whose code runs the model. vllm: this project's own; transformers: Transformers', with this
    project's attention; auto: our own where the architecture has it."""
    logits_processors: list[str | type] | None = None
    """Logits processors besides those of installed packages: classes, or names of the form
    package.module:Class."""
    download_dir: str | None = None
    """Folder of the hub's cache; left out: Hugging Face's own."""
    allowed_media_domains: list[str] | None = None
    """Hosts that images are fetched from over http(s), and no others. Left out: none is fetched."""
    multimodal_config: MultiModalConfig = Field(default_factory=MultiModalConfig)
    """What prompts may have besides tokens."""
    original_max_model_len: int | None = field(init=False, default=None)
    """`max_model_len` as it was given; set by the constructor."""
    hf_config_dict: dict[str, Any] = field(init=False, default_factory=dict)
    """The model's config as read; set by the constructor."""

    def __post_init__(self) -> None:
        from vllm.transformers_utils.config import get_config_dict
        from vllm.transformers_utils.embedded import resolve_model

        given = self.model
        self.model = resolve_model(self.model, self.revision, self.download_dir)
        self.tokenizer = self.tokenizer or self.model
        self.served_model_name = get_served_model_name(given or self.model, self.served_model_name)
        self.hf_config_dict = get_config_dict(
            self.hf_config_path or self.model,
            revision=self.revision,
            download_dir=self.download_dir,
        )
        self.hf_config_dict.update(self.hf_overrides)
        self._verify_architecture()
        self.dtype = self._resolve_dtype()
        self.original_max_model_len = self.max_model_len
        self.max_model_len = self.get_and_verify_max_len(self.max_model_len)
        self._verify_on_platform()

    def _verify_architecture(self) -> None:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.model_executor.models.registry import ModelRegistry

        quantized = self.hf_config_dict.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method", "by an unknown method")
            raise ValueError(
                f"the model's weights are quantised ({method}), which is not supported; supported: "
                "safetensors in float16, bfloat16 or float32, and GGUF"
            )
        architecture = ModelRegistry.check_supported(self.architectures, self)
        if architecture in MODELS_CONFIG_MAP:
            MODELS_CONFIG_MAP[architecture].verify_and_update_model_config(self)

    def _verify_on_platform(self) -> None:
        from vllm.platforms import current_platform

        for architecture in self.architectures:
            current_platform.verify_model_arch(architecture)
        if self.quantization is not None:
            self._verify_quantization()
        self.max_model_len = current_platform.check_max_model_len(self.max_model_len)

    def _verify_quantization(self) -> None:
        from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
        from vllm.platforms import current_platform

        current_platform.verify_quantization(self.quantization)
        # A platform that names methods has them, ours or its own.
        if self.quantization not in current_platform.supported_quantization:
            raise ValueError(
                f"quantization {self.quantization!r} is not supported on "
                f"{current_platform.device_name}; supported: none (a GGUF file's weights are "
                "unpacked as they are read): leave the flag out"
            )
        if self.quantization in QUANTIZATION_METHODS:
            self._verify_own_quantization()

    def _verify_own_quantization(self) -> None:
        from vllm.model_executor.models.registry import ModelRegistry

        if self.quantization == "gguf" and not self.model.endswith(".gguf"):
            raise ValueError(
                f"quantization 'gguf' keeps a GGUF file's weights as they are, and {self.model} is "
                "none; supported for any checkpoint: int8, int4"
            )
        architecture = ModelRegistry.check_supported(self.architectures, self)
        if self.model_impl == "transformers" or architecture not in ModelRegistry.models:
            raise ValueError(
                f"quantization {self.quantization!r} is not supported for {architecture} with "
                "Transformers' code; supported: the project's own models "
                f"({', '.join(sorted(ModelRegistry.models))})"
            )

    @field_validator("dtype", mode="before")
    @classmethod
    def _dtype_by_name(cls, value: Any) -> str:
        return "auto" if value in (None, "auto") else dtype_name(value)

    @field_validator("allowed_media_domains")
    @classmethod
    def _are_host_names(cls, value: list[str] | None) -> list[str] | None:
        if value is not None:
            from vllm.multimodal.media.address import check_host_name

            for host in value:
                check_host_name(host)
        return value

    def _resolve_dtype(self) -> str:
        from vllm.platforms import current_platform

        supported = current_platform.supported_dtype_names
        if self.dtype != "auto":
            if self.dtype not in supported:
                raise ValueError(
                    f"dtype {self.dtype} is not supported on {current_platform.device_name}; "
                    f"supported: {', '.join(supported)}"
                )
            return self.dtype
        text = self.hf_text_config_dict
        wanted = text.get("dtype") or text.get("torch_dtype") or self.hf_config_dict.get("dtype")
        wanted = dtype_name(wanted) if wanted else supported[0]
        if wanted == "float32" and "bfloat16" in supported[:1]:
            wanted = "bfloat16"
        return wanted if wanted in supported else supported[0]

    @cached_property
    def hf_config(self) -> PretrainedConfig:
        """The config as Transformers' class, or, for the most usual models, as an object with the
        same fields: importing such a class takes more than a second and brings torch along."""
        from vllm.transformers_utils.light_config import make_light_config

        return make_light_config(self.hf_config_dict) or self.make_transformers_config()

    def make_transformers_config(self) -> PretrainedConfig:
        """The config as Transformers' class."""
        from vllm.transformers_utils.config import build_hf_config

        return build_hf_config(
            self.hf_config_dict,
            self.hf_config_path or self.model,
            trust_remote_code=self.trust_remote_code,
            revision=self.code_revision or self.revision,
        )

    @cached_property
    def hf_text_config(self) -> PretrainedConfig:
        """The part of `hf_config` that describes the language model."""
        return self.hf_config.get_text_config()

    @property
    def hf_text_config_dict(self) -> dict[str, Any]:
        """The part of `hf_config_dict` that describes the language model."""
        return self.hf_config_dict.get("text_config") or self.hf_config_dict

    @property
    def architectures(self) -> list[str]:
        """Names of the model classes that the config gives."""
        return self.hf_config_dict.get("architectures") or []

    @property
    def is_encoder_decoder(self) -> bool:
        """Whether the model has an encoder whose output the decoder attends to."""
        return bool(self.hf_config_dict.get("is_encoder_decoder", False))

    def get_multimodal_config(self) -> MultiModalConfig:
        """What prompts may have besides tokens."""
        return self.multimodal_config

    def get_vocab_size(self) -> int:
        """Rows of the logits; may be more than the tokenizer has tokens."""
        return self.hf_text_config_dict["vocab_size"]

    def get_hidden_size(self) -> int:
        """Width of the hidden states."""
        return self._first_of("hidden_size", "n_embd", "d_model")

    def get_total_num_attention_heads(self) -> int:
        """Query heads of a (decoder) layer."""
        return self._first_of("num_attention_heads", "n_head", "decoder_attention_heads")

    def _first_of(self, *names: str) -> int:
        """What the config has under one of these names, by which families call the same thing."""
        text = self.hf_text_config_dict
        found = next((name for name in names if text.get(name)), None)
        if found is None:
            raise ValueError(f"the model's config has none of {', '.join(names)}")
        return text[found]

    def get_num_attention_heads(self, parallel_config: ParallelConfig) -> int:
        """Query heads of a layer on one device."""
        return self.get_total_num_attention_heads() // parallel_config.tensor_parallel_size

    def get_head_size(self) -> int:
        """Width of a head."""
        head_dim = self.hf_text_config_dict.get("head_dim")
        return head_dim or self.get_hidden_size() // self.get_total_num_attention_heads()

    def get_total_num_kv_heads(self) -> int:
        """Key/value heads of a layer."""
        text = self.hf_text_config_dict
        return text.get("num_key_value_heads") or self.get_total_num_attention_heads()

    def get_num_kv_heads(self, parallel_config: ParallelConfig) -> int:
        """Key/value heads of a layer on one device."""
        return max(1, self.get_total_num_kv_heads() // parallel_config.tensor_parallel_size)

    def get_total_num_hidden_layers(self) -> int:
        """Layers of the (decoder of the) model."""
        return self._first_of("num_hidden_layers", "n_layer", "decoder_layers")

    def get_num_layers(self, parallel_config: ParallelConfig) -> int:
        """Layers on one pipeline stage."""
        return self.get_total_num_hidden_layers() // parallel_config.pipeline_parallel_size

    def get_sliding_window(self) -> int | None:
        """The model's sliding window in tokens, if its layers have one."""
        text = self.hf_text_config_dict
        return text.get("sliding_window") if text.get("use_sliding_window", True) else None

    def get_and_verify_max_len(self, max_model_len: int | None) -> int:
        """The longest request: what the user asked for, within what the model was made for.

        Raises:
            ValueError: more than the model's positions, which would give garbage.
        """
        text = self.hf_text_config_dict
        derived = text.get("max_position_embeddings") or text.get("n_positions") or 2048
        if max_model_len is None or max_model_len == -1:
            return derived
        if max_model_len < 1:
            raise ValueError(f"max_model_len must be at least 1 (or -1), not {max_model_len}")
        if max_model_len > derived:
            raise ValueError(
                f"max_model_len ({max_model_len}) is more than the model's {derived} positions; "
                f"pass --max-model-len {derived} or less"
            )
        return max_model_len

    def try_get_generation_config(self) -> dict[str, Any]:
        """The model's generation_config.json as a dict; empty if there is none or none is wanted."""
        from vllm.transformers_utils.config import get_generation_config_dict

        if self.generation_config == "vllm":
            return {}
        where = self.model if self.generation_config == "auto" else self.generation_config
        return get_generation_config_dict(
            where, revision=self.revision, download_dir=self.download_dir
        )

    def get_diff_sampling_param(self) -> dict[str, Any]:
        """Default sampling parameters: the model's, then `override_generation_config`."""
        from vllm.transformers_utils.generation_defaults import sampling_defaults

        return sampling_defaults(
            self.try_get_generation_config(),
            self.is_encoder_decoder,
            self.override_generation_config,
        )

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors(
            {
                "config": self.hf_config_dict,
                "dtype": self.dtype,
                "quantization": self.quantization,
            }
        )

    def __getstate__(self) -> dict[str, Any]:
        made_on_use = ("hf_config", "hf_text_config")
        return {name: value for name, value in self.__dict__.items() if name not in made_on_use}


def get_served_model_name(model: str, served_model_name: str | list[str] | None) -> str | list[str]:
    """The names the API knows the model by: as given, or the model's own."""
    if served_model_name:
        return served_model_name
    if os.path.isfile(model):
        return os.path.splitext(os.path.basename(model))[0]
    return model
