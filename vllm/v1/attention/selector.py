# SPDX-License-Identifier: Apache-2.0
"""Which attention backend a layer gets: what the user asked for, else the platform's choice."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch

from vllm.config import get_current_vllm_config
from vllm.logger import init_logger
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.attention.backend import AttentionBackend, AttentionType
from vllm.v1.attention.backends.registry import AttentionBackendEnum
from vllm.v1.kv_cache_interface import KVCacheSpecKind


logger = init_logger(__name__)


class AttentionSelectorConfig(NamedTuple):
    """What the choice depends on; hashable, so that it is made once for all such layers."""

    head_size: int
    dtype: torch.dtype
    kv_cache_dtype: str | None
    block_size: int | None
    use_mla: bool = False
    has_sink: bool = False
    attn_type: str = AttentionType.DECODER
    has_sliding_window: bool = False
    use_kv_connector: bool = False


def get_attn_spec_kind(
    use_mla: bool, has_sliding_window: bool, attn_type: str
) -> KVCacheSpecKind:
    """The kind of KV cache that such a layer has; MLA's is a full one."""
    if attn_type == AttentionType.ENCODER_DECODER:
        return KVCacheSpecKind.CROSS_ATTENTION
    if has_sliding_window and not use_mla:
        return KVCacheSpecKind.SLIDING_WINDOW
    return KVCacheSpecKind.FULL_ATTENTION


def get_attn_backend(
    head_size: int,
    dtype: torch.dtype,
    kv_cache_dtype: str | None,
    use_mla: bool = False,
    has_sink: bool = False,
    attn_type: str | None = None,
    num_heads: int | None = None,
    has_sliding_window: bool = False,
) -> type[AttentionBackend]:
    """The backend for a layer of the model that is being made.

    Raises:
        ValueError: none, or not the one that was asked for, can serve such a layer.
    """
    vllm_config = get_current_vllm_config()
    cache_config = vllm_config.cache_config
    selector_config = AttentionSelectorConfig(
        head_size=head_size,
        dtype=dtype,
        kv_cache_dtype=kv_cache_dtype,
        block_size=cache_config.block_size if cache_config.user_specified_block_size else None,
        use_mla=use_mla,
        has_sink=has_sink,
        attn_type=attn_type or AttentionType.DECODER,
        has_sliding_window=has_sliding_window,
        use_kv_connector=vllm_config.kv_transfer_config is not None,
    )
    attention_config = vllm_config.attention_config
    kind = get_attn_spec_kind(use_mla, has_sliding_window, selector_config.attn_type)
    selected = attention_config.backend_per_kind.get(kind.value) or attention_config.backend
    return _cached_backend(selected, selector_config, num_heads)


@cache
def _cached_backend(
    selected: AttentionBackendEnum | None,
    selector_config: AttentionSelectorConfig,
    num_heads: int | None,
) -> type[AttentionBackend]:
    from vllm.platforms import current_platform

    path = current_platform.get_attn_backend_cls(selected, selector_config, num_heads)
    if not path:
        raise ValueError(
            f"{current_platform.device_name} has no attention backend for {selector_config}"
        )
    backend = resolve_obj_by_qualname(path)
    logger.info_once(
        "%s serves %s attention%s",
        backend.get_name(),
        AttentionType(selector_config.attn_type).value,
        " with a sliding window" if selector_config.has_sliding_window else "",
    )
    return backend
