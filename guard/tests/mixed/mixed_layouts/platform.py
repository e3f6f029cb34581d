# SPDX-License-Identifier: Apache-2.0
"""The CPU platform with a backend of its own for each kind of layer."""

import os

from vllm.platforms.cpu import CpuPlatform


class MixedPlatform(CpuPlatform):
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None, **kwargs):
        full, sliding = os.environ["MIXED_LAYOUTS"].split(",")
        name = sliding if attn_selector_config.has_sliding_window else full
        return f"mixed_layouts.backends.{name}"
