# SPDX-License-Identifier: Apache-2.0
"""`--quantization gguf`: the Q8_0, Q4_0 and Q4_1 weights of a GGUF file, value for value.

What the file holds in another type is unpacked into the model's dtype, as without the flag. Imports
no torch.
"""

from __future__ import annotations

from vllm.model_executor.layers.quantization.weight_only import CpuQuantizationConfig


class GGUFConfig(CpuQuantizationConfig):
    """Each weight as its tensor in the file."""

    def get_name(self) -> str:
        return "gguf"

    def formats(self) -> tuple[str | None, str | None]:
        return None, None
