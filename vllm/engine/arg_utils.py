# SPDX-License-Identifier: Apache-2.0
"""Arguments of an engine: a Python class, and flags made from the config dataclasses."""

from __future__ import annotations

import argparse
import dataclasses
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from vllm.config import (
    AttentionConfig,
    CacheConfig,
    CompilationConfig,
    KVTransferConfig,
    LoadConfig,
    ModelConfig,
    MultiModalConfig,
    ObservabilityConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.config.cache import CacheDType, PrefixCachingHashAlgo
from vllm.config.model import LogprobsMode, ModelDType, ModelImpl, TokenizerMode
from vllm.config.scheduler import SchedulerPolicy
from vllm.engine.arg_flags import add_config_flags, first_error
from vllm.logger import init_logger
from vllm.utils.argparse_utils import FlexibleArgumentParser

logger = init_logger(__name__)

# A running request gets this long when the server is told to stop, unless the user says otherwise.
DEFAULT_SHUTDOWN_TIMEOUT_S = 120

# The arguments that make each config, where they bear the name of its field.
_CONFIG_ARGS: dict[type, tuple[str, ...]] = {
    ModelConfig: (
        "model", "served_model_name", "dtype", "max_model_len", "tokenizer", "tokenizer_mode",
        "skip_tokenizer_init", "trust_remote_code", "revision", "code_revision",
        "tokenizer_revision", "hf_config_path", "hf_overrides", "hf_token", "quantization",
        "enforce_eager", "seed", "max_logprobs", "logprobs_mode", "generation_config",
        "override_generation_config", "model_impl", "logits_processors", "allowed_media_domains",
    ),
    MultiModalConfig: ("limit_mm_per_prompt", "mm_processor_kwargs"),
    LoadConfig: (
        "load_format", "download_dir", "model_loader_extra_config", "ignore_patterns",
        "use_tqdm_on_load",
    ),
    CacheConfig: (
        "block_size", "gpu_memory_utilization", "kv_cache_memory_bytes", "kv_cache_dtype",
        "num_gpu_blocks_override", "enable_prefix_caching", "prefix_caching_hash_algo",
    ),
    SchedulerConfig: (
        "max_num_batched_tokens", "max_num_seqs", "enable_chunked_prefill",
        "long_prefill_token_threshold", "scheduling_policy", "scheduler_cls",
        "disable_hybrid_kv_cache_manager", "watermark", "async_scheduling", "stream_interval",
    ),
    ParallelConfig: (
        "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size",
        "decode_context_parallel_size", "prefill_context_parallel_size",
        "distributed_executor_backend", "worker_cls", "worker_extension_cls",
    ),
    AttentionConfig: ("attention_backend",),
    ObservabilityConfig: ("show_hidden_metrics_for_version",),
    VllmConfig: (
        "attention_config", "compilation_config", "kv_transfer_config", "additional_config",
        "shutdown_timeout",
    ),
}  # fmt: skip
# Where upstream's flag and the config's field have different names.
_FIELD_OF_ARG = {
    "kv_cache_dtype": "cache_dtype",
    "scheduling_policy": "policy",
    "limit_mm_per_prompt": "limit_per_prompt",
    "attention_backend": "backend",
}
_SHORT_FLAGS = {
    "tensor_parallel_size": "-tp",
    "pipeline_parallel_size": "-pp",
    "data_parallel_size": "-dp",
    "decode_context_parallel_size": "-dcp",
    "prefill_context_parallel_size": "-pcp",
    "quantization": "-q",
    "compilation_config": "-cc",
    "attention_config": "-ac",
}
_WITHOUT_EFFECT = {
    "hf_token": "models are read from the local cache, nothing is fetched",
    "show_hidden_metrics_for_version": "no metric is hidden",
}


@dataclass
class EngineArgs:
    """What an engine is made from. Each argument is documented at its config's field; None means
    that the config, the model or the platform chooses.

    Raises:
        ValueError: by `create_engine_config`, one line that names the flag and what it takes.
    """

    model: str = ModelConfig.model
    served_model_name: str | list[str] | None = ModelConfig.served_model_name
    tokenizer: str | None = ModelConfig.tokenizer
    hf_config_path: str | None = ModelConfig.hf_config_path
    skip_tokenizer_init: bool = ModelConfig.skip_tokenizer_init
    tokenizer_mode: TokenizerMode | str = ModelConfig.tokenizer_mode
    trust_remote_code: bool = ModelConfig.trust_remote_code
    download_dir: str | None = LoadConfig.download_dir
    load_format: str = LoadConfig.load_format
    dtype: ModelDType | Any = ModelConfig.dtype
    kv_cache_dtype: CacheDType = CacheConfig.cache_dtype
    seed: int = ModelConfig.seed
    max_model_len: int | None = ModelConfig.max_model_len
    distributed_executor_backend: str | type | None = ParallelConfig.distributed_executor_backend
    pipeline_parallel_size: int = ParallelConfig.pipeline_parallel_size
    tensor_parallel_size: int = ParallelConfig.tensor_parallel_size
    prefill_context_parallel_size: int = ParallelConfig.prefill_context_parallel_size
    decode_context_parallel_size: int = ParallelConfig.decode_context_parallel_size
    data_parallel_size: int = ParallelConfig.data_parallel_size
    block_size: int | None = None
    enable_prefix_caching: bool | None = None
    prefix_caching_hash_algo: PrefixCachingHashAlgo = CacheConfig.prefix_caching_hash_algo
    gpu_memory_utilization: float = CacheConfig.gpu_memory_utilization
    kv_cache_memory_bytes: int | None = CacheConfig.kv_cache_memory_bytes
    max_num_batched_tokens: int | None = None
    long_prefill_token_threshold: int = SchedulerConfig.long_prefill_token_threshold
    max_num_seqs: int | None = None
    max_logprobs: int = ModelConfig.max_logprobs
    logprobs_mode: LogprobsMode = ModelConfig.logprobs_mode
    disable_log_stats: bool = False
    revision: str | None = ModelConfig.revision
    code_revision: str | None = ModelConfig.code_revision
    hf_token: bool | str | None = ModelConfig.hf_token
    hf_overrides: dict[str, Any] = field(default_factory=dict)
    tokenizer_revision: str | None = ModelConfig.tokenizer_revision
    quantization: str | None = ModelConfig.quantization
    enforce_eager: bool = ModelConfig.enforce_eager
    num_gpu_blocks_override: int | None = CacheConfig.num_gpu_blocks_override
    model_loader_extra_config: dict[str, Any] = field(default_factory=dict)
    ignore_patterns: str | list[str] = field(default_factory=lambda: LoadConfig().ignore_patterns)
    enable_chunked_prefill: bool | None = None
    watermark: float = SchedulerConfig.watermark
    disable_hybrid_kv_cache_manager: bool | None = SchedulerConfig.disable_hybrid_kv_cache_manager
    show_hidden_metrics_for_version: str | None = None
    scheduling_policy: SchedulerPolicy = SchedulerConfig.policy
    scheduler_cls: str | type[object] | None = SchedulerConfig.scheduler_cls
    compilation_config: CompilationConfig | dict[str, Any] | None = None
    attention_config: AttentionConfig | dict[str, Any] | None = None
    worker_cls: str = ParallelConfig.worker_cls
    worker_extension_cls: str = ParallelConfig.worker_extension_cls
    generation_config: str = ModelConfig.generation_config
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    model_impl: ModelImpl = ModelConfig.model_impl
    logits_processors: list[str | type] | None = ModelConfig.logits_processors
    allowed_media_domains: list[str] | None = ModelConfig.allowed_media_domains
    limit_mm_per_prompt: dict[str, Any] = field(default_factory=dict)
    mm_processor_kwargs: dict[str, Any] | None = MultiModalConfig.mm_processor_kwargs
    attention_backend: Any = AttentionConfig.backend
    kv_transfer_config: KVTransferConfig | dict[str, Any] | None = None
    additional_config: dict[str, Any] = field(default_factory=dict)
    use_tqdm_on_load: bool = LoadConfig.use_tqdm_on_load
    async_scheduling: bool | None = SchedulerConfig.async_scheduling
    stream_interval: int = SchedulerConfig.stream_interval
    shutdown_timeout: int = DEFAULT_SHUTDOWN_TIMEOUT_S

    def __post_init__(self) -> None:
        from vllm.plugins import load_general_plugins

        load_general_plugins()

    @staticmethod
    def add_cli_args(parser: FlexibleArgumentParser) -> FlexibleArgumentParser:
        """Adds a flag for each argument, in a group for each config; a platform may add more."""
        from vllm.platforms import current_platform

        for config, names in _CONFIG_ARGS.items():
            add_config_flags(
                parser, config, {name: _field_name(name) for name in names}, EngineArgs, _SHORT_FLAGS
            )
        parser.add_argument(
            "--disable-log-stats",
            action="store_true",
            help="Neither log engine statistics nor count them for /metrics.",
        )
        current_platform.pre_register_and_update(parser)
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """The arguments among what was parsed."""
        names = (f.name for f in dataclasses.fields(cls))
        return cls(**{name: getattr(args, name) for name in names if name in args})

    def create_model_config(self) -> ModelConfig:
        """Reads the model's config and resolves what was left out."""
        return self._make(
            ModelConfig,
            download_dir=self.download_dir,
            multimodal_config=self._make(MultiModalConfig),
        )

    def create_load_config(self) -> LoadConfig:
        """Where weights come from."""
        return self._make(LoadConfig)

    def create_engine_config(
        self, usage_context: object | None = None, headless: bool = False
    ) -> VllmConfig:
        """The configs of an engine, validated. Imports no torch.

        Both parameters are upstream's; neither has an effect here.

        Raises:
            ValueError: one line that names the flag, its value and what is supported.
        """
        from vllm.platforms import current_platform

        current_platform.pre_register_and_update()
        self._warn_of_args_without_effect()
        model_config = self.create_model_config()
        if not model_config.is_encoder_decoder:
            self._warn_of_args_of_encoders()
        return self._make(
            VllmConfig,
            model_config=model_config,
            load_config=self.create_load_config(),
            cache_config=self._make(CacheConfig),
            parallel_config=self._make(ParallelConfig),
            scheduler_config=self._create_scheduler_config(model_config),
            attention_config=self._create_attention_config(),
            observability_config=self._make(ObservabilityConfig),
        )

    def _create_scheduler_config(self, model_config: ModelConfig) -> SchedulerConfig:
        """What was left out adapts to what was given, so that the two fit each other."""
        max_tokens = self.max_num_batched_tokens
        if max_tokens is None:
            max_tokens = max(
                SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS,
                self.max_num_seqs or 0,
                model_config.max_model_len if self.enable_chunked_prefill is False else 0,
            )
        max_num_seqs = self.max_num_seqs
        if max_num_seqs is None:
            max_num_seqs = min(SchedulerConfig.DEFAULT_MAX_NUM_SEQS, max(max_tokens, 1))
        return self._make(
            SchedulerConfig,
            max_model_len=model_config.max_model_len,
            is_encoder_decoder=model_config.is_encoder_decoder,
            max_num_batched_tokens=max_tokens,
            max_num_seqs=max_num_seqs,
        )

    def _create_attention_config(self) -> AttentionConfig:
        given = self.attention_config
        if given is None:
            return self._make(AttentionConfig)
        named = given.get("backend") if isinstance(given, dict) else given.backend
        if self.attention_backend is not None and named is not None:
            raise ValueError(
                "--attention-backend and --attention-config both name a backend; pass one of them"
            )
        return self._make(AttentionConfig, **given) if isinstance(given, dict) else given

    def _make(self, config: type, **made: Any) -> Any:
        """An instance of `config` from `made` and, where that has nothing, from the arguments."""
        values = {
            _field_name(name): getattr(self, name)
            for name in _CONFIG_ARGS[config]
            if getattr(self, name) is not None
        }
        try:
            return config(**{**values, **made})
        except ValidationError as error:
            flags = {_field_name(name): _flag(name) for name in _CONFIG_ARGS[config]}
            raise ValueError(first_error(error, flags)) from error

    def _warn_of_args_of_encoders(self) -> None:
        for name in ("allowed_media_domains", *_CONFIG_ARGS[MultiModalConfig]):
            if getattr(self, name):
                logger.warning("%s has no effect: the model takes text only", _flag(name))

    def _warn_of_args_without_effect(self) -> None:
        for name, reason in _WITHOUT_EFFECT.items():
            if getattr(self, name) not in (None, False):
                logger.warning("%s has no effect: %s", _flag(name), reason)


@dataclass
class AsyncEngineArgs(EngineArgs):
    """`EngineArgs` for a server."""

    enable_log_requests: bool = False

    @staticmethod
    def add_cli_args(
        parser: FlexibleArgumentParser, async_args_only: bool = False
    ) -> FlexibleArgumentParser:
        """As `EngineArgs.add_cli_args`, and what a server has besides; `async_args_only`: that."""
        if not async_args_only:
            EngineArgs.add_cli_args(parser)
        parser.add_argument(
            "--enable-log-requests",
            action=argparse.BooleanOptionalAction,
            default=AsyncEngineArgs.enable_log_requests,
            help="Log each request's id, length and parameters.",
        )
        return parser


def _field_name(arg: str) -> str:
    return _FIELD_OF_ARG.get(arg, arg)


def _flag(arg: str) -> str:
    return "--" + arg.replace("_", "-")
