# SPDX-License-Identifier: Apache-2.0
"""Attention inside an encoder: over the tokens at hand, in both directions, without a cache."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from vllm.model_executor.custom_op import CustomOp
from vllm.v1.attention.ops.cpu import sequence_attention, supports_sequences


@CustomOp.register("mm_encoder_attn")
class MMEncoderAttention(CustomOp):
    """Every token of a sequence attends to all of it. `prefix` is the layer's name, for logs.

    Raises:
        ValueError: the query heads are no multiple of the KV heads.
    """

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float | None = None,
        num_kv_heads: int | None = None,
        prefix: str = "",
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.head_size = head_size
        self.scale = head_size**-0.5 if scale is None else scale
        self.num_kv_heads = num_kv_heads or num_heads
        self.layer_name = prefix
        if num_heads % self.num_kv_heads:
            raise ValueError(
                f"{prefix or 'MMEncoderAttention'}: {num_heads} query heads are no multiple of "
                f"{self.num_kv_heads} KV heads"
            )

    def extra_repr(self) -> str:
        return (
            f"head_size={self.head_size}, num_heads={self.num_heads}, "
            f"num_kv_heads={self.num_kv_heads}"
        )

    def forward_native(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Returns what has the shape of `query`.

        Args:
            query: (seq, hidden), (batch, seq, hidden) or (batch, seq, num_heads, head_size), where
                hidden is num_heads * head_size; key, value: likewise with `num_kv_heads`.
            cu_seqlens: (sequences + 1,) integers: where sequences begin that lie one behind the
                other along seq; None: each batch entry is one.
            max_seqlen, sequence_lengths: not needed here; what they say is in `cu_seqlens`.

        Raises:
            ValueError: `cu_seqlens` with more than one batch entry.
        """
        shape = query.shape
        q, k, v = (self._by_head(x) for x in (query, key, value))
        if cu_seqlens is None or len(cu_seqlens) == 2:
            return self._attend(q, k, v).transpose(1, 2).reshape(shape)
        _check_flat(q.shape[0])
        cuts = cu_seqlens.tolist()
        output = torch.empty_like(q)
        for begin, end in zip(cuts, cuts[1:]):
            part = slice(begin, end)
            output[:, :, part] = self._attend(q[:, :, part], k[:, :, part], v[:, :, part])
        return output.transpose(1, 2).reshape(shape)

    def forward_cpu(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        cu_seqlens: torch.Tensor | None = None,
        max_seqlen: torch.Tensor | None = None,
        sequence_lengths: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """As `forward_native`, by kernels of ours where they do such heads."""
        if not query.numel() or not supports_sequences(self.head_size, query.dtype):
            return self.forward_native(query, key, value, cu_seqlens)
        batch, seq = (1, query.shape[0]) if query.dim() == 2 else query.shape[:2]
        if cu_seqlens is None or len(cu_seqlens) == 2:
            cu_seqlens = torch.arange(0, seq * batch + 1, seq, dtype=torch.int32)
        else:
            _check_flat(batch)
        q, k, v = (self._flat(x) for x in (query, key, value))
        longest = int(cu_seqlens.diff().max())
        attended = sequence_attention(q, k, v, cu_seqlens.int(), longest, self.scale)
        return attended.view(query.shape)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        """(tokens, heads, head_size), the entries of a batch one behind the other."""
        flat = x.flatten(0, 1) if x.dim() > 2 else x
        return flat.view(flat.shape[0], -1, self.head_size) if flat.dim() == 2 else flat

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, heads, seq, head_size)."""
        batch, seq = (1, x.shape[0]) if x.dim() == 2 else x.shape[:2]
        return x.reshape(batch, seq, -1, self.head_size).transpose(1, 2)

    def _attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        """(batch, heads, seq, head_size)."""
        gqa = self.num_kv_heads != self.num_heads
        return F.scaled_dot_product_attention(q, k, v, scale=self.scale, enable_gqa=gqa)


def _check_flat(batch: int) -> None:
    if batch != 1:
        raise ValueError(f"cu_seqlens beside a batch of {batch}; flatten the batch")
