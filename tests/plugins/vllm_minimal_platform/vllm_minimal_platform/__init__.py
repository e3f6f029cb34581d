# SPDX-License-Identifier: Apache-2.0
"""The least that an out-of-tree platform must bring: a platform, a worker, an attention backend."""


def register() -> str | None:
    """The dotted name of the platform; a real plugin returns None where its hardware is absent."""
    return "vllm_minimal_platform.platform.MinimalPlatform"
