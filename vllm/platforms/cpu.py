# SPDX-License-Identifier: Apache-2.0
"""The CPU: a device of its own, and what a machine without an accelerator gets."""

from __future__ import annotations

import platform as host
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from vllm import envs
from vllm.logger import init_logger
from vllm.utils.mem_utils import GiB, host_memory

from .attention_choice import TORCH_ATTN, Candidate, choose_backend
from .interface import CpuArchEnum, Platform, PlatformEnum

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.config.cache import CacheConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)

CPU_WORKER = "vllm.v1.worker.cpu_worker.CPUWorker"
ATTENTION_BACKENDS = (Candidate("CPU_ATTN"), TORCH_ATTN)
# Instructions without which torch multiplies bfloat16 matrices far slower than float32 ones.
_FAST_BF16_FLAGS = {"avx512bw", "avx512_bf16", "amx_bf16", "bf16"}


@cache
def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    """Instruction-set extensions as Linux names them; empty where that is not known."""
    try:
        lines = cpuinfo.read_text().splitlines()
    except OSError:
        return frozenset()
    for line in lines:
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()


def prefers_bfloat16() -> bool:
    """Whether bfloat16 is at least as fast as float32 here."""
    if host.system() == "Darwin":
        return False
    if Platform.get_cpu_architecture() in (CpuArchEnum.X86, CpuArchEnum.ARM):
        return bool(_FAST_BF16_FLAGS & cpu_flags())
    return False


class CpuPlatform(Platform):
    """Runs models on the host's cores; KV cache and weights in host memory."""

    _enum = PlatformEnum.CPU
    device_name = "cpu"
    device_type = "cpu"
    dispatch_key = "CPU"
    dist_backend = "gloo"
    device_control_env_var = "CPU_VISIBLE_MEMORY_NODES"
    supported_quantization = ["int8", "int4", "gguf"]

    @classmethod
    def _preferred_dtype_names(cls) -> list[str]:
        """bfloat16 first where the CPU has instructions for it, float32 first elsewhere."""
        if prefers_bfloat16():
            return ["bfloat16", "float16", "float32"]
        return ["float32", "bfloat16", "float16"]

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        return choose_backend(
            cls.device_name,
            cls._attention_candidates(attn_selector_config.attn_type),
            selected_backend,
            attn_selector_config,
            None,
        )

    @classmethod
    def _attention_candidates(cls, attn_type: str) -> tuple[Candidate, ...]:
        return ATTENTION_BACKENDS

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of host memory that this process may use: a cgroup's limit counts as the size."""
        return host_memory().total_bytes

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Cores that this process may use."""
        from .cpu_threads import usable_cpus

        return len(usable_cpus())

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.model_executor.layers.cpu_ops.program.KernelProgram"

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Decode steps are programs of kernels, unless the user says otherwise."""
        from vllm.config import CUDAGraphMode

        compilation = vllm_config.compilation_config
        if compilation.cudagraph_mode is None:
            compilation.cudagraph_mode = CUDAGraphMode.FULL_DECODE_ONLY
            compilation.cudagraph_mode_is_default = True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner reads its KV caches by layer name."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = CPU_WORKER
        cache_config = vllm_config.cache_config
        if cache_config.block_size is None:
            cache_config.block_size = cache_config.DEFAULT_BLOCK_SIZE
        cls._set_kv_cache_memory(cache_config)
        cls._warn_of_options_without_effect(vllm_config)

    @staticmethod
    def _set_kv_cache_memory(cache_config: CacheConfig) -> None:
        space_gib = envs.VLLM_CPU_KVCACHE_SPACE
        if not space_gib:
            return
        if space_gib < 0:
            raise ValueError(
                f"VLLM_CPU_KVCACHE_SPACE={space_gib:g} is negative; it is GiB of KV cache"
            )
        space_bytes = int(space_gib * GiB)
        if cache_config.kv_cache_memory_bytes not in (None, space_bytes):
            logger.warning(
                "VLLM_CPU_KVCACHE_SPACE=%g has no effect beside --kv-cache-memory-bytes %d",
                space_gib,
                cache_config.kv_cache_memory_bytes,
            )
            return
        cache_config.kv_cache_memory_bytes = space_bytes

    @staticmethod
    def _warn_of_options_without_effect(vllm_config: VllmConfig) -> None:
        given = vllm_config.cache_config.gpu_memory_utilization
        if given != type(vllm_config.cache_config)().gpu_memory_utilization:
            logger.warning(
                "--gpu-memory-utilization %g has no effect on a CPU; --kv-cache-memory-bytes or "
                "VLLM_CPU_KVCACHE_SPACE (GiB) sets the size of the KV cache",
                given,
            )
