# SPDX-License-Identifier: Apache-2.0
"""From engine arguments to a report of the KV cache, without weights, device or tensors."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import use_platform
from vllm.platforms.planned import planned_platform
from vllm.plugins import load_general_plugins

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec
    from vllm.v1.worker.kv_cache_places import KVCacheReport

# Enough to see how pages lie; a start has as many as fit into memory.
DEFAULT_NUM_PAGES = 4


def plan_kv_layout(
    engine_args: EngineArgs, platform: str | None = None, aligned: bool = True
) -> KVCacheReport:
    """What a start with these arguments would do with its KV cache.

    Args:
        platform: a built-in one that need not be here; None: this machine's.
        aligned: see `report_kv_cache`.

    Raises:
        ValueError: the arguments, or the layers' pages, do not fit.
        RuntimeError: a platform is asked for and the process has another one already.
    """
    if platform is not None:
        use_platform(planned_platform(platform))
    if engine_args.num_gpu_blocks_override is None:
        engine_args.num_gpu_blocks_override = DEFAULT_NUM_PAGES
    load_general_plugins()
    vllm_config = engine_args.create_engine_config()
    specs = _specs(vllm_config)
    from vllm.platforms import current_platform
    from vllm.v1.worker.gpu.attn_utils import group_layers
    from vllm.v1.worker.kv_cache_report import report_kv_cache
    from vllm.v1.worker.utils import prepare_kernel_block_sizes

    name = os.path.basename(os.path.normpath(vllm_config.model_config.model))
    kv_cache_config = _config(vllm_config, specs)
    groups = group_layers(kv_cache_config, vllm_config)
    return report_kv_cache(
        f"{name} on {current_platform.device_name}",
        [attn_group for attn_groups in groups for attn_group in attn_groups],
        kv_cache_config,
        vllm_config.cache_config.cache_dtype,
        prepare_kernel_block_sizes(kv_cache_config, groups),
        aligned,
    )


def _specs(vllm_config: VllmConfig) -> dict[str, KVCacheSpec]:
    """What each layer needs, from a model whose weights have shapes alone."""
    import torch

    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.model_executor.utils import set_default_torch_dtype
    from vllm.utils.torch_utils import str_dtype_to_torch_dtype
    from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec

    dtype = str_dtype_to_torch_dtype(vllm_config.model_config.dtype)
    with set_default_torch_dtype(dtype), torch.device("meta"):
        initialize_model(vllm_config)
    return get_kv_cache_spec(vllm_config)


def _config(vllm_config: VllmConfig, specs: dict[str, KVCacheSpec]) -> KVCacheConfig:
    from vllm.v1.core.kv_cache_groups import get_kv_cache_groups, make_kv_cache_tensors
    from vllm.v1.kv_cache_interface import KVCacheConfig

    groups = get_kv_cache_groups(vllm_config, specs)
    num_pages = vllm_config.cache_config.num_gpu_blocks_override or DEFAULT_NUM_PAGES
    tensors = make_kv_cache_tensors(groups, num_pages) if groups else []
    return KVCacheConfig(num_pages, tensors, groups)
