# SPDX-License-Identifier: Apache-2.0
"""What a layer needs of the KV cache per page, and how layers are put together.

Pure arithmetic, importable without torch: a spec's dtype is a torch dtype or its name. *Where* the
bytes of a page lie is not said here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, TypeVar

from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import dtype_name, get_dtype_size

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig

_SpecT = TypeVar("_SpecT", bound="KVCacheSpec")


_SCALE_BYTES = 4


class KVQuantMode(IntEnum):
    """How the numbers of a cache become those of the model. PER_TOKEN_HEAD: K and V of each token
    and head are followed by a float32 scale of their own."""

    NONE = 0
    FP8_PER_TENSOR = 1
    INT8_PER_TOKEN_HEAD = 2
    FP8_PER_TOKEN_HEAD = 3

    @property
    def is_per_token_head(self) -> bool:
        return self in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD)


def get_kv_quant_mode(kv_cache_dtype: str) -> KVQuantMode:
    """The mode of a `--kv-cache-dtype`."""
    for mode in (KVQuantMode.INT8_PER_TOKEN_HEAD, KVQuantMode.FP8_PER_TOKEN_HEAD):
        if kv_cache_dtype == mode.name.lower():
            return mode
    return KVQuantMode.FP8_PER_TENSOR if kv_cache_dtype.startswith("fp8") else KVQuantMode.NONE


class KVCacheSpecKind(str, Enum):
    """The kinds of spec by name, as options and logs say them."""

    FULL_ATTENTION = "full_attention"
    SLIDING_WINDOW = "sliding_window"
    CROSS_ATTENTION = "cross_attention"
    MAMBA = "mamba"
    UNKNOWN = "unknown"


# Those that an attention backend serves.
ATTENTION_KINDS = (
    KVCacheSpecKind.FULL_ATTENTION,
    KVCacheSpecKind.SLIDING_WINDOW,
    KVCacheSpecKind.CROSS_ATTENTION,
)


@dataclass(frozen=True)
class KVCacheSpec:
    """The cache of one layer. `block_size`: tokens in a page."""

    block_size: int

    @property
    def page_size_bytes(self) -> int:
        """Bytes of a page of this layer."""
        raise NotImplementedError

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """Bytes that one request of `max_model_len` can take at most."""
        raise NotImplementedError

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """Pages that a block table must have room for, for a request of `max_len` tokens."""
        return cdiv(max_len, self.block_size)

    def copy_with_new_block_size(self: _SpecT, block_size: int) -> _SpecT:
        """The same layer with pages of `block_size` tokens."""
        return dataclasses.replace(self, block_size=block_size)

    @classmethod
    def merge(cls: type[_SpecT], specs: list[_SpecT]) -> _SpecT:
        """The spec of a group of layers.

        Raises:
            ValueError: the layers differ.
        """
        if any(spec != specs[0] for spec in specs[1:]):
            raise ValueError(f"layers of one KV cache group differ: {specs}")
        return specs[0]

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        """Whether all of `kv_cache_specs` are of this kind, so that one block table serves them."""
        return all(type(spec) is type(self) for spec in kv_cache_specs.values())


@dataclass(frozen=True, kw_only=True)
class AttentionSpec(KVCacheSpec):
    """K and V of one attention layer: `block_size` tokens of `num_kv_heads` heads, `head_size`
    elements of K and `head_size_v` (the same unless given) of V each.

    `page_size_padded`: bytes of a page when it is padded to be as large as another layer's.
    """

    num_kv_heads: int
    head_size: int
    dtype: torch.dtype | str
    head_size_v: int = None  # type: ignore[assignment]
    kv_quant_mode: KVQuantMode = KVQuantMode.NONE
    page_size_padded: int | None = None

    def __post_init__(self) -> None:
        if self.head_size_v is None:
            object.__setattr__(self, "head_size_v", self.head_size)
        if self.page_size_padded is not None and self.page_size_padded < self.real_page_size_bytes:
            raise ValueError(
                f"a page of {self.real_page_size_bytes} bytes cannot be padded to "
                f"{self.page_size_padded}"
            )

    @property
    def real_page_size_bytes(self) -> int:
        """Bytes of a page that hold K and V, and their scales."""
        per_head = (self.head_size + self.head_size_v) * get_dtype_size(self.dtype)
        if self.kv_quant_mode.is_per_token_head:
            per_head += 2 * _SCALE_BYTES
        return self.block_size * self.num_kv_heads * per_head

    @property
    def unpadded_page_size_bytes(self) -> int:
        """Upstream's other name for `real_page_size_bytes`."""
        return self.real_page_size_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes from one page to the next."""
        return self.page_size_padded or self.real_page_size_bytes


@dataclass(frozen=True, kw_only=True)
class FullAttentionSpec(AttentionSpec):
    """Every token attends to all before it. With `sliding_window` the layer attends to fewer, but
    keeps the pages of all (the hybrid manager is off)."""

    sliding_window: int | None = None

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_model_len = vllm_config.model_config.max_model_len
        return cdiv(max_model_len, self.block_size) * self.page_size_bytes

    @classmethod
    def merge(cls, specs: list[FullAttentionSpec]) -> FullAttentionSpec:
        """As `KVCacheSpec.merge`; a window in some layers only is kept by those layers themselves."""
        windows = {spec.sliding_window for spec in specs}
        window = windows.pop() if len(windows) == 1 else None
        plain = [dataclasses.replace(spec, sliding_window=None) for spec in specs]
        if any(spec != plain[0] for spec in plain[1:]):
            raise ValueError(f"layers of one KV cache group differ: {specs}")
        return dataclasses.replace(plain[0], sliding_window=window)


@dataclass(frozen=True, kw_only=True)
class SlidingWindowSpec(AttentionSpec):
    """A token attends to itself and the `sliding_window - 1` before it; older pages are freed."""

    sliding_window: int

    def max_admission_blocks_per_request(
        self, max_in_flight_tokens: int, max_model_len: int
    ) -> int:
        """Pages a request can hold at once: those of the window and of a step's tokens."""
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        # The window may begin in the middle of a page.
        return cdiv(tokens, self.block_size) + 1

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        pages = self.max_admission_blocks_per_request(
            vllm_config.scheduler_config.max_num_batched_tokens,
            vllm_config.model_config.max_model_len,
        )
        return pages * self.page_size_bytes

    def is_uniform_with_collection(self, kv_cache_specs: dict[str, KVCacheSpec]) -> bool:
        return all(
            isinstance(spec, SlidingWindowSpec) and spec.sliding_window == self.sliding_window
            for spec in kv_cache_specs.values()
        )


@dataclass(frozen=True, kw_only=True)
class CrossAttentionSpec(AttentionSpec):
    """A decoder layer's K and V of the encoder's output: pages by the encoder's length, of which
    `max_num_encoder_tokens` is the most (None: as many as a request has tokens)."""

    max_num_encoder_tokens: int | None = None

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        max_model_len = vllm_config.model_config.max_model_len
        return self.max_num_blocks_per_req(vllm_config, max_model_len) * self.page_size_bytes

    def max_num_blocks_per_req(self, vllm_config: VllmConfig, max_len: int) -> int:
        """By the longest encoder input, whatever the length of the request."""
        longest = self.max_num_encoder_tokens
        return cdiv(max_len if longest is None else longest, self.block_size)


@dataclass(frozen=True)
class MambaSpec(KVCacheSpec):
    """The states of a recurrent layer, one after the other in a page: arrays of `shapes` and
    `dtypes`, `block_size` tokens apart. No model here has such layers; runners of plugins may."""

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype | str, ...]
    page_size_padded: int | None = None

    @property
    def page_size_bytes(self) -> int:
        used = sum(
            math.prod(shape) * get_dtype_size(dtype)
            for shape, dtype in zip(self.shapes, self.dtypes, strict=True)
        )
        if self.page_size_padded is None:
            return used
        if self.page_size_padded < used:
            raise ValueError(f"states of {used} bytes cannot be padded to {self.page_size_padded}")
        return self.page_size_padded

    def max_memory_usage_bytes(self, vllm_config: VllmConfig) -> int:
        """One page: of a request only the latest state is kept."""
        return self.page_size_bytes


def get_kv_cache_spec_kind(kv_cache_spec: KVCacheSpec) -> KVCacheSpecKind:
    """The spec's kind by name."""
    kinds = {
        FullAttentionSpec: KVCacheSpecKind.FULL_ATTENTION,
        SlidingWindowSpec: KVCacheSpecKind.SLIDING_WINDOW,
        CrossAttentionSpec: KVCacheSpecKind.CROSS_ATTENTION,
        MambaSpec: KVCacheSpecKind.MAMBA,
    }
    matches = (kind for spec, kind in kinds.items() if isinstance(kv_cache_spec, spec))
    return next(matches, KVCacheSpecKind.UNKNOWN)


def describe_spec(spec: AttentionSpec) -> str:
    """One line for logs and errors."""
    return (
        f"{get_kv_cache_spec_kind(spec).value}: {spec.block_size} tokens a page, "
        f"{spec.num_kv_heads} KV heads of {spec.head_size}, {dtype_name(spec.dtype)}, "
        f"{spec.page_size_bytes} bytes a page"
    )


@dataclass
class KVCacheTensor:
    """One allocation of `size` bytes, used by the layers of `shared_by` (one of each group).

    `block_stride` > 0: several layers interleave in blocks of that many bytes, this one `offset`
    bytes into each.
    """

    size: int
    shared_by: list[str]
    offset: int = 0
    block_stride: int = 0


@dataclass
class KVCacheGroupSpec:
    """Layers that share a block table: page i of a request is page i in each of them."""

    layer_names: list[str]
    kv_cache_spec: KVCacheSpec


@dataclass
class KVCacheConfig:
    """The KV cache of one worker: `num_blocks` pages (page 0 is never handed out), the allocations
    they lie in, and the groups of layers."""

    num_blocks: int
    kv_cache_tensors: list[KVCacheTensor]
    kv_cache_groups: list[KVCacheGroupSpec]

    @property
    def needs_kv_cache_zeroing(self) -> bool:
        """Whether stale bytes of a page could reach a computation. No backend here lets them: all
        mask what lies beyond a request's length when they load it."""
        return False


def all_specs(groups: Iterable[KVCacheGroupSpec]) -> dict[str, KVCacheSpec]:
    """Layer name -> its group's spec."""
    return {name: group.kv_cache_spec for group in groups for name in group.layer_names}
