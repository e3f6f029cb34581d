# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import field
from typing import Any, TypeVar

from pydantic import ConfigDict, Field

from vllm import envs
from vllm.config.attention import AttentionConfig
from vllm.config.cache import CacheConfig
from vllm.config.compilation import CompilationConfig, CUDAGraphMode
from vllm.config.device import DeviceConfig
from vllm.config.kv_transfer import KVTransferConfig
from vllm.config.load import LoadConfig
from vllm.config.model import ModelConfig
from vllm.config.observability import ObservabilityConfig
from vllm.config.parallel import ParallelConfig
from vllm.config.scheduler import SchedulerConfig
from vllm.config.utils import config, hash_factors, seal
from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig

logger = init_logger(__name__)
T = TypeVar("T")

# Upstream lists here the architectures that get the V2 runner. Here all do; plugins add theirs.
DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES: frozenset[str] = frozenset()


@config(config=ConfigDict(arbitrary_types_allowed=True))
class VllmConfig:
    """Every config of one engine. The platform's and the model's hooks may change fields while
    this is made and until `seal`, which the engine calls once it has started."""

    model_config: ModelConfig = None  # type: ignore[assignment]
    """The model."""
    cache_config: CacheConfig = Field(default_factory=CacheConfig)
    """The KV cache."""
    parallel_config: ParallelConfig = Field(default_factory=ParallelConfig)
    """Devices and workers."""
    scheduler_config: SchedulerConfig = Field(default_factory=SchedulerConfig.default_factory)
    """Steps."""
    device_config: DeviceConfig = Field(default_factory=DeviceConfig)
    """The device."""
    load_config: LoadConfig = Field(default_factory=LoadConfig)
    """Weights."""
    attention_config: AttentionConfig = Field(default_factory=AttentionConfig)
    """Attention backends."""
    observability_config: ObservabilityConfig = Field(default_factory=ObservabilityConfig)
    """Metrics."""
    compilation_config: CompilationConfig = Field(default_factory=CompilationConfig)
    """Compiled code and the registry of layers."""
    kv_transfer_config: KVTransferConfig | None = None
    """Keys and values from and to other engines; left out: none travel."""
    additional_config: dict[str, Any] = Field(default_factory=dict)
    """Options of an out-of-tree platform, read by it alone."""
    instance_id: str = ""
    """Name of this engine; made up if left out."""
    shutdown_timeout: int = Field(default=0, ge=0)
    """Seconds that running requests get to finish when the server is told to stop."""
    quant_config: QuantizationConfig | None = field(default=None, init=False)
    """How the model's layers keep their weights; set by the constructor. None: in its dtype."""
    lora_config: None = field(default=None, init=False)
    """No LoRA adapters are supported."""

    def __post_init__(self) -> None:
        from vllm.platforms import current_platform

        self.instance_id = self.instance_id or uuid.uuid4().hex[:5]
        if envs.VLLM_USE_V2_MODEL_RUNNER is False:
            raise ValueError(
                "VLLM_USE_V2_MODEL_RUNNER=0 asks for the V1 runner, which this project does not "
                "have: unset it or set it to 1"
            )
        if self.model_config is not None:
            self._update_for_model(self.model_config)
            self.quant_config = self.get_quantization_config(self.model_config, self.load_config)
            self.cache_config.sliding_window = self.model_config.get_sliding_window()
            self.scheduler_config.verify_max_model_len(self.model_config.max_model_len)
        if self.scheduler_config.disable_hybrid_kv_cache_manager is None:
            supported = current_platform.support_hybrid_kv_cache()
            self.scheduler_config.disable_hybrid_kv_cache_manager = not supported
        current_platform.apply_config_platform_defaults(self)
        current_platform.check_and_update_config(self)
        if self.cache_config.block_size is None:
            self.cache_config.block_size = CacheConfig.DEFAULT_BLOCK_SIZE
        self._resolve_cudagraph_mode()

    @staticmethod
    def get_quantization_config(
        model_config: ModelConfig, load_config: LoadConfig
    ) -> QuantizationConfig | None:
        """The config of the quantisation that the model's config names, if it is one of ours."""
        from vllm.model_executor.layers.quantization import (
            QUANTIZATION_METHODS,
            get_quantization_config,
        )

        if model_config.quantization not in QUANTIZATION_METHODS:
            return None
        return get_quantization_config(model_config.quantization)()

    def _resolve_cudagraph_mode(self) -> None:
        from vllm.platforms import current_platform

        compilation = self.compilation_config
        asked = compilation.cudagraph_mode
        eager = self.model_config is not None and self.model_config.enforce_eager
        if asked in (None, CUDAGraphMode.NONE):
            compilation.cudagraph_mode = CUDAGraphMode.NONE
            if eager:
                logger.warning("--enforce-eager has no effect: no graphs are asked for")
            return
        if eager:
            if not compilation.cudagraph_mode_is_default:
                logger.warning(
                    "--enforce-eager: no graphs are recorded, though %s asks for them", asked.name
                )
            compilation.cudagraph_mode = CUDAGraphMode.NONE
            return
        if not current_platform.support_static_graph_mode():
            raise ValueError(
                f"cudagraph_mode {asked.name}: the platform {current_platform.device_name} has no "
                "graphs (supported: NONE); leave it out of --compilation-config"
            )
        compilation.set_cudagraph_sizes(self.scheduler_config.max_num_seqs)

    def _update_for_model(self, model_config: ModelConfig) -> None:
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP

        for architecture in model_config.architectures:
            if architecture in MODELS_CONFIG_MAP:
                MODELS_CONFIG_MAP[architecture].verify_and_update_config(self)

    def seal(self) -> None:
        """Makes this and every config in it read-only in this process."""
        seal(self)

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        parts = (self.model_config, self.cache_config, self.parallel_config, self.scheduler_config)
        return hash_factors({type(p).__name__: p.compute_hash() for p in parts if p is not None})


_current: ContextVar[VllmConfig | None] = ContextVar("vllm_config", default=None)


@contextmanager
def set_current_vllm_config(
    vllm_config: VllmConfig, check_compile: bool = False, prefix: str | None = None
) -> Iterator[None]:
    """Layers made inside read `vllm_config` and enter its registry. `check_compile` and `prefix`
    are upstream's; neither has an effect here."""
    token = _current.set(vllm_config)
    try:
        yield
    finally:
        _current.reset(token)


def get_current_vllm_config() -> VllmConfig:
    """The config that `set_current_vllm_config` set.

    Raises:
        RuntimeError: none is set.
    """
    current = _current.get()
    if current is None:
        raise RuntimeError(
            "no VllmConfig is set: make layers and models inside `set_current_vllm_config(...)`"
        )
    return current


def get_current_vllm_config_or_none() -> VllmConfig | None:
    """The config that `set_current_vllm_config` set, or None."""
    return _current.get()


def get_layers_from_vllm_config(
    vllm_config: VllmConfig, layer_type: type[T], layer_names: Iterable[str] | None = None
) -> dict[str, T]:
    """The model's layers of type `layer_type` by name, in the order they were made."""
    layers = vllm_config.compilation_config.static_forward_context
    names = layers.keys() if layer_names is None else layer_names
    return {name: layers[name] for name in names if isinstance(layers[name], layer_type)}
