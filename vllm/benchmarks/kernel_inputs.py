# SPDX-License-Identifier: Apache-2.0
"""The same attention twice: over pages with one of our backends, and over whole tensors with torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from vllm.config import VllmConfig
from vllm.utils.math_utils import cdiv
from vllm.utils.torch_utils import str_dtype_to_torch_dtype
from vllm.v1.attention.backend import AttentionBackend, CommonAttentionMetadata
from vllm.v1.attention.backends.utils import key_value_views
from vllm.v1.attention.kv_cache_plan import plan_layer
from vllm.v1.kv_cache_interface import FullAttentionSpec

if TYPE_CHECKING:
    from vllm.benchmarks.kernels import Shape


class Inputs(NamedTuple):
    """query: (batch, query_len, heads, D); key, value: (batch, context_len, KV heads, D)."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def make_inputs(shape: Shape, device: torch.device) -> Inputs:
    dtype = str_dtype_to_torch_dtype(shape.dtype)

    def random(length: int, heads: int) -> torch.Tensor:
        size = (shape.batch_size, length, heads, shape.head_size)
        return torch.randn(size, dtype=dtype, device=device)

    kv = (random(shape.context_len, shape.num_kv_heads) for _ in range(2))
    return Inputs(random(shape.query_len, shape.num_heads), *kv)


class PagedLayers:
    """Layers of a backend, each with a cache of its own whose blocks lie in random order."""

    def __init__(
        self, shape: Shape, backend: type[AttentionBackend], inputs: Inputs, num_layers: int
    ) -> None:
        device, dtype = inputs.query.device, inputs.query.dtype
        per_request = cdiv(shape.context_len, shape.block_size)
        num_blocks = shape.batch_size * per_request
        spec = FullAttentionSpec(
            block_size=shape.block_size, num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size, dtype=dtype,
        )  # fmt: skip
        nbytes = num_blocks * spec.page_size_bytes
        planned = plan_layer(backend, spec, "auto", shape.block_size, nbytes)
        order = torch.randperm(num_blocks, device=device).view(shape.batch_size, per_request)
        position = torch.arange(shape.context_len, device=device)
        self._blocks = order[:, position // shape.block_size]
        self._places = (position % shape.block_size).expand(shape.batch_size, -1)
        self._caches = []
        for _ in range(num_layers):
            cache = planned.view(torch.zeros(nbytes, dtype=torch.int8, device=device))
            views = key_value_views(cache, planned.roles, shape.head_size)
            views.key[self._blocks, self._places] = inputs.key
            views.value[self._blocks, self._places] = inputs.value
            self._caches.append(cache)
        new = slice(shape.context_len - shape.query_len, None)
        self._query, self._key, self._value = (
            x.flatten(0, 1) for x in (inputs.query, inputs.key[:, new], inputs.value[:, new])
        )
        self._output = torch.empty_like(self._query)
        builder = backend.get_builder_cls()(spec, ["layer"], VllmConfig(), device)
        common = self._common(shape, order.int(), new)
        self._metadata = builder.build(0, common)
        make_impl = backend.get_impl_cls()
        sizes = shape.num_heads, shape.head_size, shape.head_size**-0.5, shape.num_kv_heads
        self._impls = [make_impl(*sizes) for _ in range(num_layers)]

    def _common(self, shape: Shape, table: torch.Tensor, new: slice) -> CommonAttentionMetadata:
        starts = torch.arange(shape.batch_size + 1, dtype=torch.int32) * shape.query_len
        slots = (self._blocks * shape.block_size + self._places)[:, new].flatten()
        return CommonAttentionMetadata(
            query_start_loc=starts.to(table.device),
            query_start_loc_cpu=starts,
            seq_lens=torch.full_like(table[:, 0], shape.context_len),
            num_reqs=shape.batch_size,
            num_actual_tokens=shape.batch_size * shape.query_len,
            max_query_len=shape.query_len,
            max_seq_len=shape.context_len,
            block_table_tensor=table.contiguous(),
            slot_mapping=slots.contiguous(),
        )

    def run_layer(self, index: int) -> torch.Tensor:
        """Writes the new tokens' K and V and attends: (batch * query_len, heads, D)."""
        return self._impls[index].forward(
            None, self._query, self._key, self._value, self._caches[index], self._metadata,
            self._output,
        )  # fmt: skip


class SdpaLayers:
    """torch.nn.functional.scaled_dot_product_attention over K and V of each layer in one piece."""

    def __init__(self, shape: Shape, inputs: Inputs, num_layers: int) -> None:
        self._query = inputs.query.transpose(1, 2).contiguous()
        self._kv = [
            tuple(x.transpose(1, 2).contiguous().clone() for x in (inputs.key, inputs.value))
            for _ in range(num_layers)
        ]
        self._is_causal = shape.query_len > 1 and shape.query_len == shape.context_len
        self._mask = None
        if shape.query_len > 1 and not self._is_causal:
            ones = torch.ones(shape.query_len, shape.context_len, device=inputs.query.device)
            self._mask = ones.tril(shape.context_len - shape.query_len).bool()

    def run_layer(self, index: int) -> torch.Tensor:
        """(batch * query_len, heads, D)."""
        out = torch.nn.functional.scaled_dot_product_attention(
            self._query, *self._kv[index], attn_mask=self._mask, is_causal=self._is_causal,
            enable_gqa=True,
        )  # fmt: skip
        return out.transpose(1, 2).flatten(0, 1)
