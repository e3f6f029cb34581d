# SPDX-License-Identifier: Apache-2.0
"""Attention backends in plain torch: a sound one, and some with one fault each."""

from __future__ import annotations

import os

import torch

from vllm.v1.attention.backends.torch_attn import TorchAttentionBackend, TorchAttentionImpl


class Sound(TorchAttentionBackend):
    """Fused, token by token in memory."""

    @classmethod
    def get_name(cls) -> str:
        return f"BROKEN_{cls.__name__.upper()}"

    @classmethod
    def get_impl_cls(cls) -> type:
        """The class `<name>Impl` of this module, where there is one."""
        base = globals().get(f"{cls.__name__}Impl", TorchAttentionImpl)
        return type(base.__name__, (base,), {"backend": cls})


class KVFirst(Sound):
    """All K before all V."""

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False):
        raise NotImplementedError

    @classmethod
    def get_kv_cache_roles(cls, cache_dtype_str: str = "auto") -> tuple[str, ...]:
        return ("kv", "block", "token", "head", "content")


class WrongBlockDim(KVFirst):
    """Takes the first dimension for the blocks, as some connectors do."""

    @classmethod
    def get_kv_cache_block_dim(cls, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return 0


class WrongOrder(Sound):
    """Its order in memory is that of a cache of five dimensions."""

    @staticmethod
    def get_kv_cache_stride_order(include_num_layers_dimension: bool = False):
        return (0, 1, 3, 2, 4)


class NoImpl(Sound):
    """Somebody forgot half of it."""

    get_impl_cls = None


class ListsTooMuch(Sound):
    """Lists a kernel block that its shape does not have."""

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [16, 48]

    @classmethod
    def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        if block_size % 32 not in (0, 16) or block_size == 48:
            raise ValueError(f"no kernel for {block_size} tokens")
        return super().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)


class Contiguous(Sound):
    """Declares NHD, and reads memory as HND whatever strides it is given."""


class ContiguousImpl(TorchAttentionImpl):
    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output):
        flat = torch.empty(0, dtype=kv_cache.dtype)
        flat.set_(kv_cache.untyped_storage())
        flat = flat[: kv_cache.numel()].view(kv_cache.shape)
        return super().forward(layer, query, key, value, flat, attn_metadata, output)


class SixteenTokens(Sound):
    """Computes slots as if every block had 16 tokens."""


class SixteenTokensImpl(TorchAttentionImpl):
    def _write(self, key, value, slots):
        size = self._key_cache.shape[1]
        moved = slots // 16 * size + slots % 16 % size
        super()._write(key, value, torch.where(slots < 0, slots, moved))


class Asserts(Sound):
    """Dies of block sizes that it does not have."""

    @classmethod
    def get_kv_cache_shape(cls, num_blocks, block_size, num_kv_heads, head_size, dtype="auto"):
        assert block_size % 16 == 0
        return super().get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size)


class Unmasked(Sound):
    """Weighs whole pages: weights behind a request's end are 0, and so is 0 times a stale number."""


class UnmaskedImpl(TorchAttentionImpl):
    def _attend(self, query, output, batch):
        starts, size = batch.query_start_loc_cpu.tolist(), self._key_cache.shape[1]
        group = self.num_heads // self.num_kv_heads
        for request, seq_len in enumerate(batch.seq_lens.tolist()):
            rows = slice(starts[request], starts[request + 1])
            pages = batch.block_table[request, : -(-seq_len // size)].long()
            key, value = (
                cache[pages].flatten(0, 1).repeat_interleave(group, dim=1)
                for cache in (self._key_cache, self._value_cache)
            )
            places = torch.arange(len(key))
            behind = torch.arange(seq_len - (rows.stop - rows.start), seq_len)[:, None] - places
            hidden = (behind < 0) & batch.causal | (places >= seq_len)
            if self.sliding_window:
                hidden |= behind >= self.sliding_window
            scores = torch.einsum("nhd,khd->hnk", query[rows], key) * self.scale
            weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            output[rows] = torch.einsum("hnk,khd->nhd", weights, value)


class WrongScale(Sound):
    """Every score is a little too large."""


class WrongScaleImpl(TorchAttentionImpl):
    def _attend(self, query, output, batch):
        super()._attend(query * 1.5, output, batch)


class Raises(Sound):
    """Starts, and then cannot compute."""


class RaisesImpl(TorchAttentionImpl):
    def _attend(self, query, output, batch):
        raise ArithmeticError("no such shape")


class Dies(Sound):
    """Takes its process along."""


class DiesImpl(TorchAttentionImpl):
    def _attend(self, query, output, batch):
        os.abort()
