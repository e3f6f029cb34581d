# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import field
from typing import ClassVar, Literal, get_args

from pydantic import Field, field_validator

from vllm.config.utils import config, hash_factors

CacheDType = Literal[
    "auto",
    "float16",
    "bfloat16",
    "float32",
    "fp8",
    "fp8_e4m3",
    "fp8_per_token_head",
    "int8_per_token_head",
]
PrefixCachingHashAlgo = Literal["sha256"]


@config
class CacheConfig:
    """The KV cache: how large, in which pages, shared or not."""

    DEFAULT_BLOCK_SIZE: ClassVar[int] = 16

    block_size: int = Field(default=None, gt=0)  # type: ignore[assignment]
    """Tokens in a page of the KV cache. Left out: the platform's choice (16 on a CPU)."""
    user_specified_block_size: bool = field(default=False, init=False)
    """Whether `block_size` was given; set by the constructor."""
    gpu_memory_utilization: float = Field(default=0.92, gt=0, le=1)
    """Share of the device's memory that this engine may take. Without effect on a CPU, where
    `kv_cache_memory_bytes` or VLLM_CPU_KVCACHE_SPACE says how much to take."""
    cache_dtype: CacheDType = "auto"
    """dtype of the KV cache; auto: the model's. fp8 (e4m3, scale 1) and the dtypes with a scale for
    each token and head need an attention backend that has them, such as TRITON_ATTN."""
    num_gpu_blocks_override: int | None = Field(default=None, gt=0)
    """Pages to make, whatever memory there is."""
    sliding_window: int | None = None
    """The model's sliding window in tokens; set from the model's config."""
    enable_prefix_caching: bool = True
    """Keep the pages of finished requests and reuse them for requests that begin the same."""
    prefix_caching_hash_algo: PrefixCachingHashAlgo = "sha256"
    """How pages are hashed for prefix caching."""
    num_gpu_blocks: int | None = field(default=None, init=False)
    """Pages made; set once memory was measured."""
    kv_cache_size_tokens: int | None = field(default=None, init=False)
    """Tokens that the KV cache holds; set once memory was measured."""
    kv_cache_max_concurrency: float | None = field(default=None, init=False)
    """Requests of `max_model_len` that the KV cache holds at once; set once memory was measured."""
    kv_cache_memory_bytes: int | None = Field(default=None, gt=0)
    """Bytes of KV cache to make; takes the place of any estimate."""

    def __post_init__(self) -> None:
        self.user_specified_block_size = self.block_size is not None

    @field_validator("cache_dtype", mode="before")
    @classmethod
    def _known_cache_dtype(cls, value: object) -> object:
        if value not in get_args(CacheDType):
            raise ValueError(
                f"kv_cache_dtype {value!r} is not supported; supported: "
                f"{', '.join(get_args(CacheDType))}"
            )
        return value

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"cache_dtype": self.cache_dtype})

    def metrics_info(self) -> dict[str, str]:
        """The fields as labels of the `vllm:cache_config_info` metric."""
        return {name: str(value) for name, value in self.__dict__.items() if name[0] != "_"}
