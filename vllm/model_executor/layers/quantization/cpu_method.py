# SPDX-License-Identifier: Apache-2.0
"""Layers with weights of 8 and 4 bits on a CPU."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from vllm.model_executor.layers.cpu_ops.quant_format import FORMAT_BY_NAME, QuantFormat
from vllm.model_executor.layers.cpu_ops.quant_linear import (
    quantized_embedding,
    quantized_linear,
    warmup_quantized,
)
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.parameter import QuantizedParameter
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs


def make_method(
    layer: nn.Module, linear_format: str | None, table_format: str | None
) -> QuantizeMethodBase | None:
    """The method of a layer; formats by name, None keeps weights as the checkpoint has them."""
    if isinstance(layer, VocabParallelEmbedding):
        wanted = None if table_format is None else FORMAT_BY_NAME[table_format]
        return CpuQuantizedMethod(wanted, UnquantizedEmbeddingMethod())
    if isinstance(layer, LinearBase):
        wanted = None if linear_format is None else FORMAT_BY_NAME[linear_format]
        return CpuQuantizedMethod(wanted, UnquantizedLinearMethod())
    return None


class CpuQuantizedMethod(LinearMethodBase):
    """Weights of 8 or 4 bits; `plain` serves those that cannot be, such as of sizes that do not
    fill panels."""

    def __init__(self, wanted: QuantFormat | None, plain: UnquantizedLinearMethod) -> None:
        self._wanted, self._plain = wanted, plain

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        plain_loader = extra_weight_attrs.pop("weight_loader")
        weight = QuantizedParameter(
            sum(output_partition_sizes),
            input_size_per_partition,
            input_size,
            params_dtype,
            self._wanted,
        )

        def load(param: QuantizedParameter, loaded: torch.Tensor, *shard_id: Any) -> None:
            param.load(plain_loader, loaded, *shard_id)

        attrs = {"input_dim": 1, "output_dim": 0, "weight_loader": load}
        set_weight_attrs(weight, {**attrs, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        layer.weight.finish()
        if layer.weight.format is None:
            self._plain.process_weights_after_loading(layer)
        else:
            warmup_quantized(layer.weight.format, layer.weight.plain_dtype)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        weight = layer.weight
        if weight.format is None:
            return self._plain.apply(layer, x, bias)
        return quantized_linear(x, weight, weight.format, bias)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        weight = layer.weight
        if weight.format is None:
            return self._plain.embedding(layer, input_)
        return quantized_embedding(input_, weight, weight.format, weight.plain_dtype)
