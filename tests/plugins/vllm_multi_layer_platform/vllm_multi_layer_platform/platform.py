# SPDX-License-Identifier: Apache-2.0
"""The one override that encoder-decoder models and drafts need."""

from __future__ import annotations

from vllm.platforms import Platform, PlatformEnum


class MultiLayerPlatform(Platform):
    """Its runner reads KV caches by layer name."""

    _enum = PlatformEnum.OOT
    device_name = "multi-layer"
    device_type = "cpu"

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """The runner reads its KV caches by layer name."""
