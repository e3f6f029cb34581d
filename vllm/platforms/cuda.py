# SPDX-License-Identifier: Apache-2.0
"""NVIDIA GPUs. NVML answers where it is installed, as it makes no CUDA context; else torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.logger import init_logger

from .attention_choice import TORCH_ATTN, Candidate, choose_backend
from .gpu_common import set_gpu_worker
from .interface import DeviceCapability, Platform, PlatformEnum

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)
T = TypeVar("T")

ATTENTION_BACKENDS = (
    Candidate("FLASH_ATTN", package="flash_attn"),
    Candidate("FLASHINFER", package="flashinfer"),
    Candidate("TRITON_ATTN", package="triton"),
    TORCH_ATTN,
)


class CudaPlatformBase(Platform):
    """NVIDIA GPUs as torch sees them."""

    _enum = PlatformEnum.CUDA
    device_name = "cuda"
    device_type = "cuda"
    dispatch_key = "CUDA"
    dist_backend = "nccl"
    device_control_env_var = "CUDA_VISIBLE_DEVICES"

    @classmethod
    def _preferred_dtype_names(cls) -> list[str]:
        """bfloat16 first from capability 8.0 on; devices before that lack it."""
        if cls.has_device_capability(80):
            return ["bfloat16", "float16", "float32"]
        return ["float16", "float32"]

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        capability = cls.get_device_capability()
        if str(dtype) == "torch.bfloat16" and (capability is None or capability < (8, 0)):
            version = capability.as_version_str() if capability else "unknown"
            raise ValueError(
                f"bfloat16 needs compute capability 8.0 or higher; {cls.get_device_name()} has "
                f"{version}. Set --dtype float16"
            )

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
            cls.get_device_capability(),
        )

    @classmethod
    def _attention_candidates(cls, attn_type: str) -> tuple[Candidate, ...]:
        return ATTENTION_BACKENDS

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*cls._device_module().get_device_capability(device_id))

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls._device_module().get_device_name(device_id)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return str(cls._device_module().get_device_properties(device_id).uuid)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        return cls._device_module().get_device_properties(device_id).total_memory

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        return cls._device_module().get_device_properties(device_id).multi_processor_count

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return True

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return "vllm.platforms.static_graph.TorchCUDAGraph"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner reads its KV caches by layer name."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        set_gpu_worker(vllm_config)


class CudaPlatform(CudaPlatformBase):
    """NVIDIA GPUs, asked through NVML first."""

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        """NVML's index of an entry of CUDA_VISIBLE_DEVICES: an index or a UUID."""
        if device_id.isdigit():
            return int(device_id)
        with _nvml() as nvml:
            return nvml.nvmlDeviceGetIndex(nvml.nvmlDeviceGetHandleByUUID(device_id))

    @classmethod
    @cache
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return cls._ask_nvml(
            device_id,
            lambda nvml, gpu: DeviceCapability(*nvml.nvmlDeviceGetCudaComputeCapability(gpu)),
            super().get_device_capability,
        )

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        ask = lambda nvml, gpu: _text(nvml.nvmlDeviceGetName(gpu))  # noqa: E731
        return cls._ask_nvml(device_id, ask, super().get_device_name)

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        ask = lambda nvml, gpu: _text(nvml.nvmlDeviceGetUUID(gpu))  # noqa: E731
        return cls._ask_nvml(device_id, ask, super().get_device_uuid)

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        ask = lambda nvml, gpu: int(nvml.nvmlDeviceGetMemoryInfo(gpu).total)  # noqa: E731
        return cls._ask_nvml(device_id, ask, super().get_device_total_memory)

    @classmethod
    def _ask_nvml(
        cls, device_id: int, ask: Callable[[Any, Any], T], else_torch: Callable[[int], T]
    ) -> T:
        """NVML's answer about a device, torch's where NVML is absent, broken, or refuses."""
        try:
            with _nvml() as nvml:
                index = cls.device_id_to_physical_device_id(device_id)
                return ask(nvml, nvml.nvmlDeviceGetHandleByIndex(index))
        except IndexError:
            raise
        except Exception as error:  # pynvml's errors, or ImportError
            logger.debug_once("NVML is not usable, torch is asked instead: %s", str(error))
            return else_torch(device_id)


@contextmanager
def _nvml() -> Iterator[Any]:
    import pynvml

    pynvml.nvmlInit()
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _text(value: str | bytes) -> str:
    """pynvml before version 11.5 answers in bytes."""
    return value.decode() if isinstance(value, bytes) else value
