# SPDX-License-Identifier: Apache-2.0
"""What a device platform tells the engine and does for it.

Torch is imported inside the methods that need it, so that the command line can ask a platform about
its config without paying for the import. docs/platforms.md lists every hook, and a test keeps that
list complete.
"""

from __future__ import annotations

import enum
import functools
import os
import platform as host
from typing import TYPE_CHECKING, Any, NamedTuple

from vllm.logger import init_logger

if TYPE_CHECKING:
    from contextlib import AbstractContextManager
    from types import ModuleType

    import torch

    from vllm.config import VllmConfig
    from vllm.sampling_params import SamplingParams
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

logger = init_logger(__name__)


@functools.cache
def in_wsl() -> bool:
    """Whether this is Windows Subsystem for Linux, where pinned memory does not work."""
    return "microsoft" in " ".join(host.uname()).lower()


class PlatformEnum(enum.Enum):
    """The kind of a platform; every out-of-tree platform is OOT."""

    CUDA = enum.auto()
    ROCM = enum.auto()
    TPU = enum.auto()
    XPU = enum.auto()
    CPU = enum.auto()
    OOT = enum.auto()
    UNSPECIFIED = enum.auto()


class CpuArchEnum(enum.Enum):
    """Instruction-set families of the host."""

    X86 = enum.auto()
    ARM = enum.auto()
    POWERPC = enum.auto()
    S390X = enum.auto()
    RISCV = enum.auto()
    OTHER = enum.auto()
    UNKNOWN = enum.auto()


_ARCH_OF_MACHINE = {
    "x86_64": CpuArchEnum.X86,
    "amd64": CpuArchEnum.X86,
    "i386": CpuArchEnum.X86,
    "i686": CpuArchEnum.X86,
    "s390x": CpuArchEnum.S390X,
}
_ARCH_OF_PREFIX = {
    "arm": CpuArchEnum.ARM,
    "aarch": CpuArchEnum.ARM,
    "ppc": CpuArchEnum.POWERPC,
    "riscv": CpuArchEnum.RISCV,
}


class DeviceCapability(NamedTuple):
    """A device's compute capability: (9, 0) is 9.0, or 90 as one integer."""

    major: int
    minor: int

    def as_version_str(self) -> str:
        """`"9.0"`."""
        return f"{self.major}.{self.minor}"

    def to_int(self) -> int:
        """`90`. The minor version must be one digit."""
        if not 0 <= self.minor < 10:
            raise ValueError(f"minor version {self.minor} of a device capability is not one digit")
        return self.major * 10 + self.minor


def _as_capability(capability: tuple[int, int] | int) -> DeviceCapability:
    if isinstance(capability, int):
        return DeviceCapability(*divmod(capability, 10))
    return DeviceCapability(*capability)


class Platform:
    """Base of every platform. Subclasses set the attributes and override what differs for them."""

    _enum: PlatformEnum
    device_name: str
    """What users call the device: `cpu`, `cuda`, `rocm`."""
    device_type: str
    """torch's name of the device: `torch.device(device_type)`; ROCm's is `cuda`."""
    dispatch_key: str = "CPU"
    """torch's dispatch key for custom operators on this device."""
    device_control_env_var: str = "VLLM_DEVICE_CONTROL_ENV_VAR_PLACEHOLDER"
    """The environment variable that lists the devices a process may see."""
    dist_backend: str = ""
    """torch.distributed's backend between such devices."""
    supported_quantization: list[str] = []
    """Quantisation methods that work; empty: no restriction."""

    # What is this platform?

    def is_cuda(self) -> bool:
        """An NVIDIA GPU."""
        return self._enum is PlatformEnum.CUDA

    def is_rocm(self) -> bool:
        """An AMD GPU."""
        return self._enum is PlatformEnum.ROCM

    def is_tpu(self) -> bool:
        """A TPU; there is no built-in platform for one."""
        return self._enum is PlatformEnum.TPU

    def is_xpu(self) -> bool:
        """An Intel GPU."""
        return self._enum is PlatformEnum.XPU

    def is_cpu(self) -> bool:
        """The built-in CPU platform."""
        return self._enum is PlatformEnum.CPU

    def is_out_of_tree(self) -> bool:
        """A platform that a plugin brought."""
        return self._enum is PlatformEnum.OOT

    def is_unspecified(self) -> bool:
        """No device."""
        return self._enum is PlatformEnum.UNSPECIFIED

    def is_cuda_alike(self) -> bool:
        """A GPU that torch calls `cuda`: NVIDIA or AMD."""
        return self._enum in (PlatformEnum.CUDA, PlatformEnum.ROCM)

    @classmethod
    def get_cpu_architecture(cls) -> CpuArchEnum:
        """The host's instruction-set family."""
        machine = host.machine().lower()
        if not machine:
            return CpuArchEnum.UNKNOWN
        by_prefix = (arch for start, arch in _ARCH_OF_PREFIX.items() if machine.startswith(start))
        return _ARCH_OF_MACHINE.get(machine) or next(by_prefix, CpuArchEnum.OTHER)

    # What can it do?

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        """dtypes a model may run in, the preferred one first."""
        import torch

        return [getattr(torch, name) for name in self._preferred_dtype_names()]

    @property
    def supported_dtype_names(self) -> list[str]:
        """`supported_dtypes` by name, such as `bfloat16`; without torch on built-in platforms."""
        if type(self).supported_dtypes is Platform.supported_dtypes:
            return self._preferred_dtype_names()
        return [str(dtype).removeprefix("torch.") for dtype in self.supported_dtypes]

    @classmethod
    def _preferred_dtype_names(cls) -> list[str]:
        return ["bfloat16", "float16", "float32"]

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        """Refuses a dtype that the device cannot compute in.

        Raises:
            ValueError: says which dtype to use instead.
        """

    @classmethod
    def verify_model_arch(cls, model_arch: str) -> None:
        """Refuses a model architecture that does not work here.

        Raises:
            ValueError: with the reason.
        """

    @classmethod
    def verify_quantization(cls, quant: str) -> None:
        """Refuses a quantisation method that does not work here.

        Raises:
            ValueError: lists `supported_quantization`.
        """
        if cls.supported_quantization and quant not in cls.supported_quantization:
            raise ValueError(
                f"quantization {quant!r} is not supported on {cls.device_name}; "
                f"supported: {', '.join(cls.supported_quantization)}"
            )

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        """Whether layers of different kinds may use KV-cache groups of their own."""
        return False

    # Attention

    @classmethod
    def get_attn_backend_cls(
        cls,
        selected_backend: AttentionBackendEnum | None,
        attn_selector_config: AttentionSelectorConfig,
        num_heads: int | None = None,
    ) -> str:
        """The dotted name of the attention backend for a layer.

        Args:
            selected_backend: what the user asked for with `--attention-backend`, or None.
            attn_selector_config: what the layer needs.
            num_heads: query heads, where known.

        Raises:
            ValueError: no backend of this platform serves the layer, or not the selected one.
        """
        raise NotImplementedError(
            f"{cls.__qualname__} names no attention backend: override get_attn_backend_cls"
        )

    # The device itself

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        """Compute capability of a device, None where there is no such notion."""
        return None

    @classmethod
    def has_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device's capability is at least `capability`: `(8, 0)` or `80`."""
        current = cls.get_device_capability(device_id)
        return current is not None and current >= _as_capability(capability)

    @classmethod
    def is_device_capability(cls, capability: tuple[int, int] | int, device_id: int = 0) -> bool:
        """Whether the device's capability is exactly `capability`."""
        return cls.get_device_capability(device_id) == _as_capability(capability)

    @classmethod
    def is_device_capability_family(cls, capability: int, device_id: int = 0) -> bool:
        """Whether the device's major version is that of `capability`: any 9.x for `90`."""
        current = cls.get_device_capability(device_id)
        return current is not None and current.major == capability // 10

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        """The device's product name."""
        return cls.device_name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        """An identifier of the device that is unique in the world."""
        raise NotImplementedError(f"{cls.__qualname__} has no device identifiers")

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Bytes of memory of the device."""
        return cls.mem_get_info()[1]

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        """Parallel units: multiprocessors of a GPU, cores of a CPU."""
        raise NotImplementedError(f"{cls.__qualname__} does not say how many compute units it has")

    @classmethod
    def device_control_id_to_physical_device_id(cls, device_id: str) -> int:
        """The device that one entry of `device_control_env_var` means."""
        return int(device_id)

    @classmethod
    def device_id_to_physical_device_id(cls, device_id: int) -> int:
        """The device of the machine that this process knows as number `device_id`.

        Raises:
            IndexError: the environment makes fewer devices visible.
        """
        listed = os.environ.get(cls.device_control_env_var)
        if listed is None:
            return device_id
        visible = [part.strip() for part in listed.split(",") if part.strip()]
        if device_id >= len(visible):
            raise IndexError(
                f"device {device_id} is not visible: {cls.device_control_env_var}={listed!r}"
            )
        return cls.device_control_id_to_physical_device_id(visible[device_id])

    # Device access for code that must not know which device it is on

    @classmethod
    def get_torch_device(cls, local_rank: int = 0) -> torch.device:
        """The torch device of the worker number `local_rank` on this machine."""
        import torch

        if cls.device_type == "cpu":
            return torch.device("cpu")
        return torch.device(cls.device_type, local_rank)

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        """Makes `device` the current one of this thread."""
        cls._device_module().set_device(device)

    @classmethod
    def synchronize(cls, device: torch.device | None = None) -> None:
        """Waits for all work queued on the device."""
        cls._device_module().synchronize(device)

    @classmethod
    def empty_cache(cls) -> None:
        """Gives memory that torch holds but does not use back to the device."""
        if cls.device_type != "cpu":  # torch keeps no cache of host memory
            cls._device_module().empty_cache()

    @classmethod
    def zeroed_bytes(cls, num_bytes: int, device: torch.device) -> torch.Tensor:
        """(num_bytes,) int8 zeros on `device`: the memory of a KV cache. On a CPU the host gives a
        page of memory when it is first written, so that an unused cache takes none."""
        import torch

        if cls.device_type == "cpu":
            import numpy as np

            return torch.from_numpy(np.zeros(num_bytes, dtype=np.int8))
        return torch.zeros(num_bytes, dtype=torch.int8, device=device)

    @classmethod
    def mem_get_info(cls, device: torch.device | None = None) -> tuple[int, int]:
        """(free, total) bytes of the device's memory; on a CPU the host's, cgroup limits heeded."""
        if cls.device_type == "cpu":
            from vllm.utils.mem_utils import host_memory

            memory = host_memory()
            return memory.available_bytes, memory.total_bytes
        return cls._device_module().mem_get_info(device)

    @classmethod
    def get_current_memory_usage(cls, device: torch.types.Device | None = None) -> float:
        """Peak bytes of device memory in use by this process; its resident memory on a CPU."""
        if cls.device_type == "cpu":
            import psutil

            return float(psutil.Process().memory_info().rss)
        return float(cls._device_module().max_memory_allocated(device))

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        """Seeds torch's generators of every device of this kind."""
        import torch

        torch.manual_seed(seed)

    @classmethod
    def inference_mode(cls) -> AbstractContextManager:
        """The context that the model runs in: no gradients."""
        import torch

        return torch.inference_mode()

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        """Whether host memory can be page-locked for faster copies to the device."""
        if cls.device_type == "cpu":  # nothing is copied, and torch refuses to pin
            return False
        if in_wsl():
            logger.warning_once("pinned memory is not used: it does not work under WSL")
            return False
        return True

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        """Whether work of the device can be recorded and replayed."""
        return False

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        """The dotted name of the `vllm.platforms.static_graph.StaticGraph` that does it.

        Raises:
            NotImplementedError: nothing does; see `support_static_graph_mode`.
        """
        raise NotImplementedError(f"the platform {cls.device_name} has no graphs")

    @classmethod
    def import_kernels(cls) -> None:
        """Imports compiled kernels, in each process that runs the model."""

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        """The dotted name of the class that moves tensors between devices."""
        package = "vllm.distributed.device_communicators"
        return f"{package}.base_device_communicator.DeviceCommunicatorBase"

    # Config and requests

    @classmethod
    def pre_register_and_update(cls, parser: Any | None = None) -> None:
        """Called before flags are parsed: register quantisation methods, add or change flags."""

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: VllmConfig) -> None:
        """Sets defaults of the platform where the user gave none."""

    @classmethod
    def check_and_update_config(cls, vllm_config: VllmConfig) -> None:
        """Checks the config and fills in what is left to the platform, in place.

        Sets at least `parallel_config.worker_cls` where it is `auto`.

        Raises:
            ValueError: something that the user set does not work here; says what to set.
        """

    @classmethod
    def check_max_model_len(cls, max_model_len: int) -> int:
        """The longest sequence to serve, given what the model's config or the user says."""
        return max_model_len

    @classmethod
    def validate_request(cls, processed_inputs: Any, params: SamplingParams) -> None:
        """Refuses a request that this platform cannot serve.

        Args:
            processed_inputs: `{"type": "token", "prompt_token_ids": [...]}`.
            params: complete, as the engine gets them.

        Raises:
            ValueError: with the reason; only this request fails.
        """

    # KV cache and forward pass

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Declares that the runner takes several KV caches of one layer index.

        Self- and cross-attention of a decoder layer have one index, and so have the first layers of
        a model and of its draft. A platform whose runner reads its caches by layer name overrides
        this with a method that does nothing.

        Raises:
            NotImplementedError: the runner was not declared fit for them.
        """
        raise NotImplementedError(
            "Multiple attention layers with the same layer index are not supported on the current "
            "platform."
        )

    @classmethod
    def set_additional_forward_context(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """What the platform's layers want to find in `ForwardContext.additional_kwargs`.

        Gets `attn_metadata`, `vllm_config` and `num_tokens` of the forward pass by keyword.
        """
        return {}

    # Everything else that torch knows about the device

    @classmethod
    def _device_module(cls) -> ModuleType:
        import torch

        return torch.get_device_module(cls.device_type)

    def __getattr__(self, key: str) -> Any:
        """`Stream`, `Event`, `current_stream`, ...: looked up in `torch.<device_type>`."""
        if key.startswith("_") or key in Platform.__annotations__:
            raise AttributeError(f"{type(self).__qualname__!r} object has no attribute {key!r}")
        try:
            return getattr(self._device_module(), key)
        except (AttributeError, RuntimeError):
            raise AttributeError(
                f"platform {type(self).__qualname__} has no attribute {key!r}, "
                f"nor has torch.{self.device_type}"
            ) from None


class UnspecifiedPlatform(Platform):
    """Stands in where no platform can be used."""

    _enum = PlatformEnum.UNSPECIFIED
    device_name = ""
    device_type = ""
