# SPDX-License-Identifier: Apache-2.0
"""A platform that declares its runner fit for several KV caches of one layer index."""


def register() -> str | None:
    """The dotted name of the platform."""
    return "vllm_multi_layer_platform.platform.MultiLayerPlatform"
