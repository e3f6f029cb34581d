# SPDX-License-Identifier: Apache-2.0
"""Token embeddings and the output projection, whose vocabulary may be shared among devices.

The vocabulary is padded to a multiple of `padding_size` and cut into equal ranges; padding rows are
zero and their logits are cut off by LogitsProcessor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn import Parameter

from vllm.distributed import (
    divide,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_reduce,
)
from vllm.model_executor.custom_op import CustomOp, PluggableLayer
from vllm.model_executor.layers import cpu_ops
from vllm.model_executor.layers.linear import UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.utils import set_weight_attrs

DEFAULT_VOCAB_PADDING_SIZE = 64


@CustomOp.register("embedding_lookup")
class EmbeddingLookup(CustomOp):
    """Rows of a table (rows, size) by ids (...) -> (..., size)."""

    def forward_native(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, table)

    def forward_cpu(self, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        return cpu_ops.embedding(ids, table)


class UnquantizedEmbeddingMethod(UnquantizedLinearMethod):
    """Rows in the model's dtype. Only an output projection is multiplied with, so only its table is
    packed; an embedding that shares it looks its rows up there."""

    def __init__(self) -> None:
        super().__init__()
        self._lookup = EmbeddingLookup().dispatch_forward()

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        if isinstance(layer, ParallelLMHead):
            super().process_weights_after_loading(layer)

    def embedding(self, layer: nn.Module, input_: torch.Tensor) -> torch.Tensor:
        return self._lookup(input_, layer.weight)


def pad_vocab_size(vocab_size: int, pad_to: int = DEFAULT_VOCAB_PADDING_SIZE) -> int:
    """The least multiple of `pad_to` that is not less than `vocab_size`."""
    return -(-vocab_size // pad_to) * pad_to


def vocab_range_from_per_partition_vocab_size(
    per_partition_vocab_size: int, rank: int, offset: int = 0
) -> Sequence[int]:
    """First token of a rank's range, and the first behind it."""
    start = rank * per_partition_vocab_size + offset
    return start, start + per_partition_vocab_size


def vocab_range_from_global_vocab_size(
    global_vocab_size: int, rank: int, world_size: int, offset: int = 0
) -> Sequence[int]:
    """The same, from the size of the whole vocabulary."""
    return vocab_range_from_per_partition_vocab_size(
        divide(global_vocab_size, world_size), rank, offset
    )


@PluggableLayer.register("vocab_parallel_embedding")
class VocabParallelEmbedding(PluggableLayer):
    """Rows of a (num_embeddings, embedding_dim) table by token id."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        super().__init__()
        if org_num_embeddings not in (None, num_embeddings):
            raise ValueError(
                "embeddings added to the model's own are not supported: org_num_embeddings differs"
            )
        self.tp_rank = 0 if disable_tp else get_tensor_model_parallel_rank()
        self.tp_size = 1 if disable_tp else get_tensor_model_parallel_world_size()
        self.num_embeddings = num_embeddings
        self.org_vocab_size = num_embeddings
        self.embedding_dim = embedding_dim
        self.num_embeddings_padded = pad_vocab_size(num_embeddings, padding_size)
        self.vocab_start_index, self.vocab_end_index = vocab_range_from_global_vocab_size(
            self.num_embeddings_padded, self.tp_rank, self.tp_size
        )
        self.num_embeddings_per_partition = self.vocab_end_index - self.vocab_start_index
        method = quant_config.get_quant_method(self, prefix) if quant_config is not None else None
        self.quant_method: Any = method or UnquantizedEmbeddingMethod()
        self.quant_method.create_weights(
            self,
            embedding_dim,
            [self.num_embeddings_per_partition],
            embedding_dim,
            self.num_embeddings_padded,
            params_dtype=params_dtype or torch.get_default_dtype(),
            weight_loader=self.weight_loader,
        )

    def weight_loader(self, param: Parameter, loaded_weight: torch.Tensor) -> None:
        """Read this device's rows of the whole, unpadded table; the padding becomes zero."""
        if loaded_weight.shape[0] != self.org_vocab_size:
            raise ValueError(
                f"the checkpoint has {loaded_weight.shape[0]} rows, the model's vocabulary "
                f"{self.org_vocab_size}"
            )
        rows = loaded_weight[self.vocab_start_index : self.vocab_end_index]
        param.data[: rows.shape[0]].copy_(rows)
        param.data[rows.shape[0] :].zero_()

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        """input_ (...) of token ids -> (..., embedding_dim)."""
        if self.tp_size == 1:
            return self.quant_method.embedding(self, input_)
        elsewhere = (input_ < self.vocab_start_index) | (input_ >= self.vocab_end_index)
        local = (input_ - self.vocab_start_index).masked_fill(elsewhere, 0)
        output = self.quant_method.embedding(self, local).masked_fill(elsewhere.unsqueeze(-1), 0)
        return tensor_model_parallel_all_reduce(output)

    def extra_repr(self) -> str:
        return (
            f"num_embeddings={self.num_embeddings}, embedding_dim={self.embedding_dim}, "
            f"tp_size={self.tp_size}"
        )


@PluggableLayer.register("parallel_lm_head")
class ParallelLMHead(VocabParallelEmbedding):
    """The table as output projection; LogitsProcessor multiplies with it."""

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        bias: bool = False,
        params_dtype: torch.dtype | None = None,
        org_num_embeddings: int | None = None,
        padding_size: int = DEFAULT_VOCAB_PADDING_SIZE,
        quant_config: QuantizationConfig | None = None,
        prefix: str = "",
        *,
        disable_tp: bool = False,
    ) -> None:
        super().__init__(
            num_embeddings,
            embedding_dim,
            params_dtype,
            org_num_embeddings,
            padding_size,
            quant_config,
            prefix,
            disable_tp=disable_tp,
        )
        self.register_parameter("bias", None)
        if bias:
            dtype = params_dtype or torch.get_default_dtype()
            rows = torch.zeros(self.num_embeddings_per_partition, dtype=dtype)
            self.bias = Parameter(rows, requires_grad=False)
            set_weight_attrs(self.bias, {"output_dim": 0, "weight_loader": self.weight_loader})

    def tie_weights(self, embed_tokens: VocabParallelEmbedding) -> ParallelLMHead:
        """Use the embedding's table itself."""
        self.weight = embed_tokens.weight
        return self

    def forward(self, input_: torch.Tensor) -> torch.Tensor:
        raise RuntimeError(
            "ParallelLMHead is not called itself: LogitsProcessor multiplies with its weights"
        )
