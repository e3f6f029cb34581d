# SPDX-License-Identifier: Apache-2.0
"""Attention backends in plain torch, alike but for the layout of their KV cache. Each reads and
writes K and V through two strided views of whatever tensor it is handed, as a kernel that takes strides
does."""

import torch
from vllm.v1.attention.backend import AttentionBackend, AttentionImpl, AttentionMetadataBuilder


class Builder(AttentionMetadataBuilder):
    """What the runner knows of the batch is all that is needed."""

    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        return common_attn_metadata


class Impl(AttentionImpl):
    def __init__(self, num_heads, head_size, scale, num_kv_heads, alibi_slopes=None,
                 sliding_window=None, *args, **kwargs):  # fmt: skip
        self.num_heads, self.head_size, self.scale = num_heads, head_size, scale
        self.num_kv_heads, self.window = num_kv_heads, sliding_window

    def forward(self, layer, query, key, value, kv_cache, attn_metadata, output=None, *args, **kwargs):
        if attn_metadata is None or not kv_cache.numel():
            return output.zero_()
        caches = layer.attn_backend.key_value(kv_cache)
        count, tokens = attn_metadata.num_actual_tokens, caches[0].shape[1]
        slots = attn_metadata.slot_mapping[:count]
        for cache, new in zip(caches, (key, value)):
            new = new[:count].view(count, self.num_kv_heads, self.head_size)
            cache[slots // tokens, slots % tokens] = new.to(cache.dtype)
        starts = attn_metadata.query_start_loc.tolist()
        lengths = attn_metadata.seq_lens.tolist()
        query = query.view(-1, self.num_heads, self.head_size)
        result = output.view(-1, self.num_heads, self.head_size)
        for row, length in enumerate(lengths[: len(starts) - 1]):
            first, last = starts[row], starts[row + 1]
            if first == last:
                continue
            blocks = attn_metadata.block_table_tensor[row, : -(-length // tokens)].long()
            past = [cache[blocks].flatten(0, 1)[:length] for cache in caches]
            result[first:last] = self.attend(query[first:last], *past)
        return output

    def attend(self, query, key, value):
        """`query`: the last of the `key.shape[0]` tokens, (tokens, heads, head size)."""
        total, new = key.shape[0], query.shape[0]
        here, there = torch.arange(total - new, total)[:, None], torch.arange(total)[None]
        seen = there <= here
        if self.window is not None:
            seen &= there > here - self.window
        repeats = self.num_heads // self.num_kv_heads
        key, value = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (key, value))
        scores = query.transpose(0, 1) @ key.transpose(1, 2) * self.scale
        weights = scores.masked_fill(~seen, float("-inf")).float().softmax(-1)
        return (weights.to(value.dtype) @ value).transpose(0, 1)


class Mixed(AttentionBackend):
    """`order`: dimensions of the shape from the slowest to the fastest in memory."""

    order: tuple[int, ...]
    accept_output_buffer = True
    supported_dtypes = [torch.float32, torch.bfloat16]
    forward_includes_kv_cache_update = True

    @staticmethod
    def get_name():
        # vLLM takes names that it lists only; the class says which one it is.
        return "CUSTOM"

    @staticmethod
    def get_impl_cls():
        return Impl

    @staticmethod
    def get_builder_cls():
        return Builder

    @staticmethod
    def get_supported_kernel_block_sizes():
        return [16]

    @classmethod
    def get_kv_cache_stride_order(cls, include_num_layers_dimension=False):
        if include_num_layers_dimension:
            raise NotImplementedError
        return cls.order


class KVFirst(Mixed):
    order = (0, 1, 2, 3, 4)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (2, num_blocks, block_size, num_kv_heads, head_size)

    @staticmethod
    def key_value(cache):
        return cache[0], cache[1]


class BlocksFirst(Mixed):
    order = (0, 1, 2, 3, 4)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, 2, block_size, num_kv_heads, head_size)

    @staticmethod
    def key_value(cache):
        return cache[:, 0], cache[:, 1]


class BlocksFirstHND(BlocksFirst):
    order = (0, 1, 3, 2, 4)


class Fused(Mixed):
    order = (0, 2, 1, 3)

    @staticmethod
    def get_kv_cache_shape(num_blocks, block_size, num_kv_heads, head_size, cache_dtype_str="auto"):
        return (num_blocks, num_kv_heads, block_size, 2 * head_size)

    @staticmethod
    def key_value(cache):
        return cache.transpose(1, 2).chunk(2, dim=-1)


class FusedHND(Fused):
    order = (0, 1, 2, 3)


class HeadsFirst(Fused):
    """All blocks of one head, then all of the next."""

    order = (1, 0, 2, 3)
