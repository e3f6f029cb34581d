# SPDX-License-Identifier: Apache-2.0
"""What an attention backend is: four classes that belong together.

A *backend* says what it supports and how its KV cache is shaped, a *builder* turns a batch into the
backend's *metadata* once a step, an *impl* computes one layer.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, ClassVar, Generic, Protocol, TypeVar

import torch

from vllm.v1.kv_cache_geometry import probe_roles

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.platforms.interface import DeviceCapability
    from vllm.v1.kv_cache_interface import KVCacheSpec


class AttentionType(str, Enum):
    """DECODER: causal, over the layer's own KV cache. ENCODER and ENCODER_ONLY: over the tokens at
    hand, no cache. ENCODER_DECODER: over the encoder's output, kept in a cache of its own."""

    DECODER = "decoder"
    ENCODER = "encoder"
    ENCODER_ONLY = "encoder_only"
    ENCODER_DECODER = "encoder_decoder"


class MultipleOf:
    """Any multiple of `base`, in a list of supported block sizes."""

    def __init__(self, base: int) -> None:
        self.base = base

    def __repr__(self) -> str:
        return f"multiples of {self.base}"


class AttentionBackend(ABC):
    """What a backend supports, and the shape of its KV cache. Never instantiated."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16]
    supported_kv_cache_dtypes: ClassVar[list[str]] = ["auto", "float16", "bfloat16"]
    # False: the impl writes K and V in `do_kv_cache_update`, apart from `forward`.
    forward_includes_kv_cache_update: bool = True

    @staticmethod
    def get_supported_kernel_block_sizes() -> list[int | MultipleOf]:
        """Tokens a kernel block may hold."""
        return [MultipleOf(1)]

    @staticmethod
    @abstractmethod
    def get_name() -> str:
        """As in `--attention-backend`."""

    @staticmethod
    @abstractmethod
    def get_impl_cls() -> type[AttentionImpl]:
        """Computes a layer."""

    @staticmethod
    @abstractmethod
    def get_builder_cls() -> type[AttentionMetadataBuilder]:
        """Makes the metadata of a step."""

    @staticmethod
    @abstractmethod
    def get_kv_cache_shape(
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> tuple[int, ...]:
        """Logical shape of one layer's cache."""

    @classmethod
    def get_kv_cache_block_dim(
        cls,
        block_size: int,
        num_kv_heads: int,
        head_size: int,
        cache_dtype_str: str = "auto",
    ) -> int:
        """Which dimension of the shape counts blocks; found by asking for a size no other
        dimension can have."""
        probe = 1_000_003
        shape = cls.get_kv_cache_shape(probe, block_size, num_kv_heads, head_size, cache_dtype_str)
        return shape.index(probe)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False) -> tuple[int, ...]:
        """How the logical dimensions are permuted in memory: physical dimension i is logical
        dimension `order[i]`.

        Raises:
            NotImplementedError: the backend has no order of its own; memory is as the shape says.
        """
        raise NotImplementedError

    @classmethod
    def get_kv_cache_roles(cls, cache_dtype_str: str = "auto") -> tuple[str, ...]:
        """What each dimension of `get_kv_cache_shape` is: block, kv, head, token or content. Found
        by asking for shapes of telling sizes; a backend that says it itself is right sooner.

        Raises:
            ValueError: asking does not tell.
        """
        return probe_backend_roles(cls, cache_dtype_str)

    @classmethod
    def reads_kv_cache_strides(cls) -> bool:
        """Whether kernels address the cache by the strides of its view. Only then can it be padded,
        packed, or share memory with a cache that is laid out otherwise."""
        return True

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and qualified name."""
        return cls.__module__, cls.__qualname__

    @classmethod
    def get_supported_head_sizes(cls) -> list[int]:
        """Supported widths of a head; empty: any."""
        return []

    @classmethod
    def supports_head_size(cls, head_size: int) -> bool:
        sizes = cls.get_supported_head_sizes()
        return not sizes or head_size in sizes

    @classmethod
    def supports_dtype(cls, dtype: torch.dtype) -> bool:
        return dtype in cls.supported_dtypes

    @classmethod
    def supports_kv_cache_dtype(cls, kv_cache_dtype: str | None) -> bool:
        return kv_cache_dtype is None or kv_cache_dtype in cls.supported_kv_cache_dtypes

    @classmethod
    def supports_block_size(cls, block_size: int | None) -> bool:
        """Whether pages of `block_size` tokens can be cut into kernel blocks."""
        if block_size is None:
            return True
        bases = [s.base if isinstance(s, MultipleOf) else s for s in _block_sizes(cls)]
        return any(block_size % base == 0 for base in bases)

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        """Tokens in a page if the user names none."""
        return default_block_size

    @classmethod
    def is_mla(cls) -> bool:
        return False

    @classmethod
    def supports_sink(cls) -> bool:
        return False

    @classmethod
    def supports_sliding_window(cls) -> bool:
        return True

    @classmethod
    def supports_kv_connector(cls) -> bool:
        return True

    @classmethod
    def supports_attn_type(cls, attn_type: str) -> bool:
        return attn_type == AttentionType.DECODER

    @classmethod
    def supports_compute_capability(cls, capability: DeviceCapability) -> bool:
        return True

    @classmethod
    def validate_configuration(
        cls,
        head_size: int,
        dtype: torch.dtype,
        kv_cache_dtype: str | None,
        block_size: int | None,
        use_mla: bool = False,
        has_sink: bool = False,
        device_capability: DeviceCapability | None = None,
        attn_type: str = AttentionType.DECODER,
        has_sliding_window: bool = False,
        use_kv_connector: bool = False,
    ) -> list[str]:
        """Why this backend cannot serve such a layer; empty if it can."""
        checks = [
            (cls.supports_head_size(head_size), f"head size {head_size} is not supported"),
            (cls.supports_dtype(dtype), f"dtype {dtype} is not supported"),
            (
                cls.supports_kv_cache_dtype(kv_cache_dtype),
                f"KV cache dtype {kv_cache_dtype} is not supported",
            ),
            (
                cls.supports_block_size(block_size),
                f"block size {block_size} is not supported ({_block_sizes(cls)} are)",
            ),
            (cls.is_mla() == use_mla, f"MLA is {'not ' if use_mla else 'all that is '}supported"),
            (not has_sink or cls.supports_sink(), "attention sinks are not supported"),
            (
                not has_sliding_window or cls.supports_sliding_window(),
                "sliding windows are not supported",
            ),
            (not use_kv_connector or cls.supports_kv_connector(), "no KV connector is supported"),
            (
                cls.supports_attn_type(attn_type),
                f"{AttentionType(attn_type).value} attention is not supported",
            ),
            (
                device_capability is None or cls.supports_compute_capability(device_capability),
                f"compute capability {device_capability} is not supported",
            ),
        ]
        return [reason for holds, reason in checks if not holds]


def probe_backend_roles(backend: type, cache_dtype_str: str = "auto") -> tuple[str, ...]:
    """Roles of the dimensions of a backend's cache, found by probing; `backend` may be any class
    with a `get_kv_cache_shape`."""
    # Third-party backends may have nothing else.
    block_sizes = getattr(backend, "get_supported_kernel_block_sizes", list)()
    return probe_roles(
        backend.get_kv_cache_shape,
        cache_dtype_str,
        block_sizes=[size for size in block_sizes if isinstance(size, int)],
        head_sizes=getattr(backend, "get_supported_head_sizes", list)(),
        name=backend.__qualname__,
    )


def _block_sizes(backend: type[AttentionBackend]) -> list[int | MultipleOf]:
    return backend.get_supported_kernel_block_sizes()


class AttentionCGSupport(Enum):
    """Batches whose metadata can be recorded in a graph, the numbers upstream's. A recording keeps
    addresses and numbers of the host, so that neither may differ from step to step.

    NEVER: none. UNIFORM_SINGLE_TOKEN_DECODE: those with one token a request. UNIFORM_BATCH: those
    with as many tokens in each request. ALWAYS: any. The last two count as the second here.
    """

    ALWAYS = 3
    UNIFORM_BATCH = 2
    UNIFORM_SINGLE_TOKEN_DECODE = 1
    NEVER = 0


class AttentionMetadata:
    """What a backend's kernels need to know of a batch; each backend has its own."""


@dataclass
class CommonAttentionMetadata:
    """A batch, as every backend sees it. Requests lie one after the other in a ragged batch.

    On the device:
        query_start_loc: (num_reqs + 1,) int32, where each request's tokens begin
        seq_lens: (num_reqs,) int32, tokens to attend to, this step's included
        block_table_tensor: (num_reqs, max_blocks) int32, kernel block ids
        slot_mapping: (num_actual_tokens,) int64, where each token's K and V go; -1: nowhere
    On the host: query_start_loc_cpu and the maxima.
    causal: a token attends to itself and those before it.

    Of cross-attention `seq_lens` (and `encoder_seq_lens`) are the lengths of the encoder's output,
    `slot_mapping` has the encoder tokens of this step, and `causal` is False.
    """

    query_start_loc: torch.Tensor
    query_start_loc_cpu: torch.Tensor
    seq_lens: torch.Tensor
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    max_seq_len: int
    block_table_tensor: torch.Tensor
    slot_mapping: torch.Tensor
    causal: bool = True
    encoder_seq_lens: torch.Tensor | None = None
    seq_lens_cpu_upper_bound: torch.Tensor | None = None
    positions: torch.Tensor | None = None

    def batch_size(self) -> int:
        """Requests in the batch."""
        return self.num_reqs

    def replace(self, **changes) -> CommonAttentionMetadata:
        """A copy with `changes`."""
        return dataclasses.replace(self, **changes)


M = TypeVar("M", bound=AttentionMetadata)


class AttentionMetadataBuilder(ABC, Generic[M]):
    """Makes a backend's metadata; one for each group of layers that share a block table."""

    reorder_batch_threshold: int | None = None

    @abstractmethod
    def __init__(
        self,
        kv_cache_spec: KVCacheSpec,
        layer_names: list[str],
        vllm_config: VllmConfig,
        device: torch.device,
    ) -> None:
        self.kv_cache_spec = kv_cache_spec
        self.layer_names = layer_names
        self.vllm_config = vllm_config
        self.device = device

    @classmethod
    def get_cudagraph_support(
        cls, vllm_config: VllmConfig, kv_cache_spec: KVCacheSpec
    ) -> AttentionCGSupport:
        """Which batches of such layers can be recorded. What is built for a recording must follow
        from the addresses of the batch's tensors and its numbers on the host alone, and serve shorter
        requests than those; a request of 0 tokens reads nothing."""
        return AttentionCGSupport.NEVER

    @abstractmethod
    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> M:
        """The metadata of a step. `common_prefix_len`: tokens that all requests share, 0 here."""


class AttentionLayer(Protocol):
    """A layer as an impl sees it."""

    layer_name: str


class AttentionImpl(ABC, Generic[M]):
    """Computes attention for one layer."""

    num_heads: int
    head_size: int
    scale: float
    kv_cache_dtype: str

    @abstractmethod
    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
    ) -> None: ...

    def process_weights_after_loading(self, act_dtype: torch.dtype) -> None:
        """Called once when the weights are in."""

    @abstractmethod
    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: M,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """query: (num_tokens, num_heads, head_size); key, value: (num_tokens, num_kv_heads,
        head_size); output: as query, written in place and returned. Rows beyond
        `num_actual_tokens` stay untouched. Cross-attention's key and value are the encoder's
        tokens', as many as there are slots, or None."""
