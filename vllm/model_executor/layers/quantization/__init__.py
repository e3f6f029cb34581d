# SPDX-License-Identifier: Apache-2.0
"""Where quantised weights would come in; none are supported yet."""

from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)

__all__ = ["QuantizationConfig", "QuantizeMethodBase"]
