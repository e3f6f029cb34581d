# SPDX-License-Identifier: Apache-2.0
"""What the GPU platforms share: the worker, defaults of the config, dtypes that a device lacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vllm.config import VllmConfig

GPU_WORKER = "vllm.v1.worker.gpu_worker.Worker"


def set_gpu_worker(vllm_config: VllmConfig) -> None:
    """Fills in the worker and the tokens per page where they were left to the platform."""
    parallel_config, cache_config = vllm_config.parallel_config, vllm_config.cache_config
    if parallel_config.worker_cls == "auto":
        parallel_config.worker_cls = GPU_WORKER
    if cache_config.block_size is None:
        cache_config.block_size = cache_config.DEFAULT_BLOCK_SIZE
