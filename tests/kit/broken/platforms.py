# SPDX-License-Identifier: Apache-2.0
"""Platforms: a sound one whose worker may be another, and some with one fault each in the class."""

from __future__ import annotations

import sys

from vllm.platforms import Platform, PlatformEnum

BACKENDS = "tests.kit.broken.backends"


class SoundPlatform(Platform):
    """Computes on the host; runs encoder-decoder models and hybrid ones."""

    _enum = PlatformEnum.OOT
    device_name = "sound"
    device_type = "cpu"
    backend = "Sound"

    @classmethod
    def check_and_update_config(cls, vllm_config) -> None:
        if vllm_config.parallel_config.worker_cls == "auto":
            vllm_config.parallel_config.worker_cls = "tests.kit.broken.workers.SoundWorker"

    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None) -> str:
        workers = sys.modules.get("tests.kit.broken.workers")
        chosen = getattr(workers and workers.SoundWorker, "chosen", None)
        if chosen is None:
            return f"{BACKENDS}.{cls.backend}"
        window = attn_selector_config.has_sliding_window
        return f"{BACKENDS}.{(chosen.window if window else chosen.full).__name__}"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        pass

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True


class Misspelt(SoundPlatform):
    @classmethod
    def check_runner_kv_cache_multi_layer(cls) -> None:
        pass


class WrongDevice(SoundPlatform):
    @classmethod
    def device_id_to_physical_device_id(cls, device_id: int) -> int:
        return device_id


class AnswersNo(SoundPlatform):
    @classmethod
    def check_runner_kv_caches_multi_layer(cls):
        return False


class AnswersWithAnError(SoundPlatform):
    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        raise TypeError("no")


class NoClassmethod(SoundPlatform):
    def support_hybrid_kv_cache(self) -> bool:
        return True


class MethodForProperty(SoundPlatform):
    @classmethod
    def supported_dtypes(cls):
        return []


class FewParameters(SoundPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config) -> str:
        return f"{BACKENDS}.Sound"


class ForgetsToReturn(SoundPlatform):
    @classmethod
    def check_max_model_len(cls, max_model_len: int) -> int:
        min(max_model_len, 1024)


class Raises(SoundPlatform):
    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return cls.names[device_id]


class NoKind(Platform):
    device_name = "nokind"
    device_type = "cpu"


class TakenForCpu(SoundPlatform):
    _enum = PlatformEnum.CPU


class NoSuchBackend(SoundPlatform):
    backend = "Missing"


class HalfABackend(SoundPlatform):
    backend = "NoImpl"


class NoBackend(Platform):
    _enum = PlatformEnum.OOT
    device_name = "nobackend"
    device_type = "cpu"
