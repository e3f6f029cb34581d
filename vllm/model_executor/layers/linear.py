# SPDX-License-Identifier: Apache-2.0
"""Linear layers whose weights may be shared among devices, and how checkpoints are read into them.

Weights are (output_size, input_size), as in torch. A column-parallel layer holds a range of
outputs, a row-parallel one a range of inputs. Fused layers keep several projections in one weight,
their shards one below the other; `pending_shards` on each parameter says which have not been
loaded.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from torch import nn
from torch.nn import Parameter

from vllm.distributed import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    split_tensor_along_last_dim,
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.custom_op import PluggableLayer
from vllm.model_executor.layers.matmul import UnquantizedGemm, WeightPacking
from vllm.model_executor.layers.quantization.base_config import (
    QuantizationConfig,
    QuantizeMethodBase,
)
from vllm.model_executor.utils import set_weight_attrs


class LinearMethodBase(QuantizeMethodBase):
    """How a linear layer keeps its weights."""

    @abstractmethod
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
        """Register the layer's parameters for this partition; the sizes without `partition` are
        whole."""

    @abstractmethod
    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x (..., input_size_per_partition) -> (..., sum(output_partition_sizes))."""


class UnquantizedLinearMethod(LinearMethodBase):
    """Weights in the model's dtype."""

    def __init__(self) -> None:
        self._gemm = UnquantizedGemm().dispatch_forward()
        self._packing = WeightPacking().dispatch_forward()

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
        weight = Parameter(
            torch.empty(sum(output_partition_sizes), input_size_per_partition, dtype=params_dtype),
            requires_grad=False,
        )
        set_weight_attrs(weight, {"input_dim": 1, "output_dim": 0, **extra_weight_attrs})
        layer.register_parameter("weight", weight)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """In place: layers that share the parameter see the packed one."""
        layer.weight.data = self._packing(layer.weight.data)

    def apply(
        self, layer: nn.Module, x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        return self._gemm(x, layer.weight, bias)


class LinearBase(PluggableLayer):
    """What linear layers share: sizes, the rank they are cut by, the method that keeps the weights.

    `forward` returns (output, bias): the bias is None unless `skip_bias_add` leaves adding it to
    the caller. With `return_bias=False` it returns the output alone.
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        super().__init__()
        self.input_size = input_size
        self.output_size = output_size
        self.has_bias = bias
        self.skip_bias_add = skip_bias_add
        self.params_dtype = params_dtype or torch.get_default_dtype()
        self.quant_config = quant_config
        self.prefix = prefix
        self.return_bias = return_bias
        self.disable_tp = disable_tp
        self.tp_rank = (
            0 if disable_tp else get_tensor_model_parallel_rank() if tp_rank is None else tp_rank
        )
        self.tp_size = 1 if disable_tp else tp_size or get_tensor_model_parallel_world_size()
        method = quant_config.get_quant_method(self, prefix) if quant_config is not None else None
        self.quant_method: QuantizeMethodBase = method or UnquantizedLinearMethod()

    def _create_weights(
        self, input_size_per_partition: int, output_partition_sizes: list[int], **attrs: Any
    ) -> None:
        self.input_size_per_partition = input_size_per_partition
        self.output_partition_sizes = output_partition_sizes
        self.output_size_per_partition = sum(output_partition_sizes)
        attrs = {"weight_loader": self.weight_loader, **attrs}
        self.quant_method.create_weights(
            layer=self,
            input_size_per_partition=input_size_per_partition,
            output_partition_sizes=output_partition_sizes,
            input_size=self.input_size,
            output_size=self.output_size,
            params_dtype=self.params_dtype,
            **attrs,
        )
        if not self.has_bias:
            self.register_parameter("bias", None)
            return
        self.bias = Parameter(
            torch.empty(self.output_size_per_partition, dtype=self.params_dtype),
            requires_grad=False,
        )
        # Each parameter keeps its own set of shards still to come.
        pending = (
            {"pending_shards": set(attrs["pending_shards"])} if "pending_shards" in attrs else {}
        )
        set_weight_attrs(self.bias, {"output_dim": 0, **attrs, **pending})

    def weight_loader(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        raise NotImplementedError

    def _result(self, output: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Parameter | None]:
        if not self.return_bias:
            return output
        return output, self.bias if self.skip_bias_add else None

    def extra_repr(self) -> str:
        return (
            f"in_features={self.input_size}, out_features={self.output_size_per_partition}, "
            f"bias={self.has_bias}, tp_size={self.tp_size}"
        )


def copy_shard(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a checkpoint's tensor into its place, converting dtype. Raises ValueError on another
    shape."""
    if target.shape != source.shape:
        raise ValueError(
            f"its shape in the checkpoint is {tuple(source.shape)}, the model's is "
            f"{tuple(target.shape)}"
        )
    target.copy_(source)


@PluggableLayer.register("replicated_linear")
class ReplicatedLinear(LinearBase):
    """A linear layer that every device holds whole."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        self._create_weights(input_size, [output_size])

    def weight_loader(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        copy_shard(param.data, loaded_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Parameter | None]:
        return self._result(
            self.quant_method.apply(self, x, None if self.skip_bias_add else self.bias)
        )


@PluggableLayer.register("column_parallel_linear")
class ColumnParallelLinear(LinearBase):
    """A linear layer of which each device holds a range of outputs.

    `output_sizes` (a subclass's attribute, set before) lists the outputs of fused projections.
    """

    output_sizes: list[int]

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        tp_rank: int | None = None,
        tp_size: int | None = None,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
            tp_rank=tp_rank,
            tp_size=tp_size,
        )
        self.gather_output = gather_output
        self._create_column_weights()

    def _create_column_weights(self) -> None:
        self._create_weights(self.input_size, [divide(self.output_size, self.tp_size)])

    def weight_loader(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        """Read this device's rows of a whole weight or bias."""
        size = param.shape[param.output_dim]
        copy_shard(param.data, self._rows(loaded_weight, param, self.tp_rank, size))

    def _rows(self, loaded: torch.Tensor, param: Parameter, rank: int, size: int) -> torch.Tensor:
        if loaded.dim() == 0 or loaded.shape[param.output_dim] < (rank + 1) * size:
            raise ValueError(
                f"its shape in the checkpoint is {tuple(loaded.shape)}, of which rows "
                f"{rank * size} to {(rank + 1) * size} were expected"
            )
        if self.tp_size == 1:
            return loaded  # copy_shard checks that nothing is left over
        return loaded.narrow(param.output_dim, rank * size, size)

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Parameter | None]:
        output = self.quant_method.apply(self, input_, None if self.skip_bias_add else self.bias)
        if self.gather_output and self.tp_size > 1:
            output = tensor_model_parallel_all_gather(output)
        return self._result(output)


class _FusedColumnParallelLinear(ColumnParallelLinear):
    """Several projections of one input in one weight; a shard is one of them, on this device."""

    def _shard_range(self, shard_id: Any) -> tuple[int, int]:
        """First row and number of rows of a shard in this device's weight."""
        raise NotImplementedError

    def _shard_rank(self, shard_id: Any) -> int:
        """Which part of the whole projection this device holds."""
        return self.tp_rank

    def _load_shard(self, param: Parameter, loaded_weight: torch.Tensor, shard_id: Any) -> None:
        offset, size = self._shard_range(shard_id)
        source = self._rows(loaded_weight, param, self._shard_rank(shard_id), size)
        copy_shard(param.data.narrow(param.output_dim, offset, size), source)
        param.pending_shards.discard(shard_id)


class MergedColumnParallelLinear(_FusedColumnParallelLinear):
    """Projections side by side, such as gate and up; shard ids are their positions."""

    def __init__(
        self,
        input_size: int,
        output_sizes: list[int],
        bias: bool = True,
        gather_output: bool = False,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        self.output_sizes = output_sizes
        super().__init__(
            input_size,
            sum(output_sizes),
            bias,
            gather_output,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _create_column_weights(self) -> None:
        sizes = [divide(size, self.tp_size) for size in self.output_sizes]
        self._create_weights(self.input_size, sizes, pending_shards=set(range(len(sizes))))

    def _shard_range(self, shard_id: int) -> tuple[int, int]:
        return sum(self.output_partition_sizes[:shard_id]), self.output_partition_sizes[shard_id]

    def weight_loader(
        self, param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: int | None = None
    ) -> None:
        """Read one projection, or (no id) all of them from a checkpoint that fuses them as well."""
        if loaded_shard_id is not None:
            self._load_shard(param, loaded_weight, loaded_shard_id)
            return
        for index, part in enumerate(loaded_weight.split(self.output_sizes, dim=param.output_dim)):
            self._load_shard(param, part, index)


class QKVParallelLinear(_FusedColumnParallelLinear):
    """Query, key and value projections in one weight; shard ids are "q", "k" and "v".

    Devices share the heads. Where there are fewer key/value heads than devices, several devices
    hold the same one. With total_num_heads=0 it is the key and value projection alone, such as
    cross-attention has.
    """

    def __init__(
        self,
        hidden_size: int,
        head_size: int,
        total_num_heads: int,
        total_num_kv_heads: int | None = None,
        bias: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
        v_head_size: int | None = None,
    ) -> None:
        self.hidden_size = hidden_size
        self.head_size = head_size
        self.v_head_size = v_head_size or head_size
        self.total_num_heads = total_num_heads
        self.total_num_kv_heads = total_num_kv_heads or total_num_heads
        tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.num_heads = divide(total_num_heads, tp_size)
        if tp_size >= self.total_num_kv_heads:
            self.num_kv_heads = 1
            self.num_kv_head_replicas = divide(tp_size, self.total_num_kv_heads)
        else:
            self.num_kv_heads = divide(self.total_num_kv_heads, tp_size)
            self.num_kv_head_replicas = 1
        self._sizes = {
            "q": self.num_heads * self.head_size,
            "k": self.num_kv_heads * self.head_size,
            "v": self.num_kv_heads * self.v_head_size,
        }
        self.output_sizes = [size * tp_size for size in self._sizes.values()]
        super().__init__(
            hidden_size,
            sum(self.output_sizes),
            bias,
            False,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )

    def _create_column_weights(self) -> None:
        self._create_weights(
            self.input_size,
            list(self._sizes.values()),
            pending_shards={shard_id for shard_id, size in self._sizes.items() if size},
        )

    def _shard_range(self, shard_id: str) -> tuple[int, int]:
        offsets = {"q": 0, "k": self._sizes["q"], "v": self._sizes["q"] + self._sizes["k"]}
        return offsets[shard_id], self._sizes[shard_id]

    def _shard_rank(self, shard_id: str) -> int:
        return self.tp_rank if shard_id == "q" else self.tp_rank // self.num_kv_head_replicas

    def weight_loader(
        self, param: Parameter, loaded_weight: torch.Tensor, loaded_shard_id: str | None = None
    ) -> None:
        """Read one projection, or (no id) all three from a checkpoint that fuses them as well."""
        if loaded_shard_id is not None:
            self._load_shard(param, loaded_weight, loaded_shard_id)
            return
        whole = [
            self.total_num_heads * self.head_size,
            self.total_num_kv_heads * self.head_size,
            self.total_num_kv_heads * self.v_head_size,
        ]
        for shard_id, part in zip("qkv", loaded_weight.split(whole, dim=param.output_dim)):
            self._load_shard(param, part, shard_id)


@PluggableLayer.register("row_parallel_linear")
class RowParallelLinear(LinearBase):
    """A linear layer of which each device holds a range of inputs; outputs are summed over
    devices."""

    def __init__(
        self,
        input_size: int,
        output_size: int,
        bias: bool = True,
        input_is_parallel: bool = True,
        skip_bias_add: bool = False,
        params_dtype: torch.dtype | None = None,
        reduce_results: bool = True,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        return_bias: bool = True,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            input_size,
            output_size,
            bias,
            skip_bias_add,
            params_dtype,
            quant_config,
            prefix,
            return_bias=return_bias,
            disable_tp=disable_tp,
        )
        if bias and not reduce_results and not skip_bias_add and self.tp_size > 1:
            raise ValueError(
                "a bias added on every device is counted several times when results are not reduced"
            )
        self.input_is_parallel = input_is_parallel
        self.reduce_results = reduce_results
        self._create_weights(divide(input_size, self.tp_size), [output_size])

    def weight_loader(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        """Read this device's columns of a weight; a bias is held whole."""
        if self.tp_size > 1 and param is not self.bias:
            size = param.shape[param.input_dim]
            loaded_weight = loaded_weight.narrow(param.input_dim, self.tp_rank * size, size)
        copy_shard(param.data, loaded_weight)

    def forward(self, input_: torch.Tensor) -> torch.Tensor | tuple[torch.Tensor, Parameter | None]:
        if not self.input_is_parallel and self.tp_size > 1:
            input_ = split_tensor_along_last_dim(input_, self.tp_size)[self.tp_rank]
        # One device adds the bias, or the sum would hold it several times.
        bias = None if self.skip_bias_add or self.tp_rank > 0 else self.bias
        output = self.quant_method.apply(self, input_, bias)
        if self.reduce_results and self.tp_size > 1:
            output = tensor_model_parallel_all_reduce(output)
        return self._result(output)
