# SPDX-License-Identifier: Apache-2.0
"""Built-in platforms without their devices: for plans of what an engine would do there."""

from __future__ import annotations

import dataclasses

from vllm.utils.import_utils import resolve_obj_by_qualname

from .attention_choice import Candidate
from .interface import DeviceCapability, Platform


@dataclasses.dataclass(frozen=True)
class _Planned:
    """The platform's class, and the capability of the device it is planned for."""

    path: str
    capability: tuple[int, int] | None = None


PLANNED_PLATFORMS = {
    "cpu": _Planned("vllm.platforms.cpu.CpuPlatform"),
    "cuda": _Planned("vllm.platforms.cuda.CudaPlatform", (9, 0)),
    "rocm": _Planned("vllm.platforms.rocm.RocmPlatform", (9, 4)),
    "xpu": _Planned("vllm.platforms.xpu.XPUPlatform"),
}


def planned_platform(name: str) -> Platform:
    """The built-in platform of that name as it answers where its device is (CUDA: of capability
    9.0, ROCm: 9.4) and Triton is installed. It runs no model.

    Raises:
        ValueError: there is no such platform.
    """
    if name not in PLANNED_PLATFORMS:
        raise ValueError(
            f"no built-in platform is called {name!r}; there are {', '.join(PLANNED_PLATFORMS)}"
        )
    planned = PLANNED_PLATFORMS[name]
    base: type[Platform] = resolve_obj_by_qualname(planned.path)
    capability = None if planned.capability is None else DeviceCapability(*planned.capability)

    class PlannedPlatform(base):  # type: ignore[misc, valid-type]
        @classmethod
        def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
            return capability

        @classmethod
        def get_device_name(cls, device_id: int = 0) -> str:
            return f"{name} (planned)"

        @classmethod
        def _attention_candidates(cls, attn_type: str) -> tuple[Candidate, ...]:
            candidates = super()._attention_candidates(attn_type)
            return tuple(dataclasses.replace(one, package=None) for one in candidates)

    return PlannedPlatform()
