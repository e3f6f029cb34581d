# SPDX-License-Identifier: Apache-2.0
"""Names for the content of full blocks: a chain of hashes, each over its parent, its tokens and
whatever else changes the keys and values of those tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, overload

from vllm.utils.math_utils import exact_div
from vllm.v1.core.kv_cache_block import BlockHash

if TYPE_CHECKING:
    from vllm.v1.request import Request

HashFunction = Callable[[Any], bytes]
BlockHasher = Callable[["Request"], list[BlockHash]]

NONE_HASH = BlockHash(os.urandom(32))
"""Parent of every first block. Random, so that nobody can make up a prompt that collides with
another tenant's; fixed by PYTHONHASHSEED where processes must agree."""


def init_none_hash(hash_fn: HashFunction) -> None:
    """Sets `NONE_HASH` anew. Called once, before the first block is hashed."""
    global NONE_HASH
    seed = os.getenv("PYTHONHASHSEED")
    NONE_HASH = BlockHash(hash_fn(seed) if seed is not None else os.urandom(32))


def generate_block_hash_extra_keys(
    request: Request, start_token_idx: int, end_token_idx: int, start_mm_idx: int
) -> tuple[tuple[Any, ...] | None, int]:
    """What besides its tokens decides the content of block `[start_token_idx, end_token_idx)`.

    Each key is tagged with its kind, so that a salt and an adapter of the same name differ. Salt
    and adapter are in the first block only: the chain carries them on.

    Args:
        start_mm_idx: first of `request.mm_features` that can reach into the block.

    Returns:
        The keys, None for none, and the `start_mm_idx` of the next block.
    """
    keys: list[Any] = []
    if start_token_idx == 0:
        if request.cache_salt:
            keys.append(("salt", request.cache_salt))
        if request.lora_request is not None:
            keys.append(("lora", request.lora_request.lora_int_id))
    mm_idx = start_mm_idx
    for feature in request.mm_features[start_mm_idx:]:
        position = feature.mm_position
        if position.offset >= end_token_idx:
            break
        if position.offset + position.length > start_token_idx:
            keys.append(("mm", feature.identifier, position.offset - start_token_idx))
        if position.offset + position.length <= end_token_idx:
            mm_idx += 1
    return (tuple(keys) or None), mm_idx


def hash_block_tokens(
    hash_function: HashFunction,
    parent_block_hash: BlockHash | None,
    curr_block_token_ids: Sequence[int],
    extra_keys: tuple[Any, ...] | None = None,
) -> BlockHash:
    """The hash of a full block. `parent_block_hash` None: it is a request's first."""
    parent = parent_block_hash or NONE_HASH
    return BlockHash(hash_function((parent, tuple(curr_block_token_ids), extra_keys)))


def get_request_block_hasher(
    hash_block_size: int, caching_hash_fn: HashFunction
) -> BlockHasher:
    """A function that returns the hashes of a request's full blocks that it does not have yet."""

    def hash_new_blocks(request: Request) -> list[BlockHash]:
        known = request.block_hashes
        start = len(known) * hash_block_size
        if request.num_tokens < start + hash_block_size:
            return []
        new: list[BlockHash] = []
        parent = known[-1] if known else None
        tokens = request.all_token_ids
        mm_idx = 0
        for begin in range(start, request.num_tokens - hash_block_size + 1, hash_block_size):
            end = begin + hash_block_size
            keys, mm_idx = generate_block_hash_extra_keys(request, begin, end, mm_idx)
            parent = hash_block_tokens(caching_hash_fn, parent, tokens[begin:end], keys)
            new.append(parent)
        return new

    return hash_new_blocks


def encoder_block_hashes(request: Request, num_blocks: int) -> list[BlockHash]:
    """Names for the blocks that hold keys and values of the request's encoder output: those of the
    same inputs, salt and adapter have the same. Longer than hashes of tokens, so never one of them.
    """
    adapter = request.lora_request.lora_int_id if request.lora_request is not None else None
    identifiers = [feature.identifier for feature in request.mm_features]
    whole = hashlib.sha256(repr((identifiers, request.cache_salt, adapter)).encode()).digest()
    return [BlockHash(whole + b"encoder" + i.to_bytes(4, "big")) for i in range(num_blocks)]


class BlockHashListWithBlockSize:
    """A request's hashes seen in larger blocks.

    A hash covers everything before it too, so that of the last small block in a large one names the
    large one: with r = target_block_size / hash_block_size, item i is `block_hashes[(i + 1)r - 1]`.
    """

    def __init__(
        self, block_hashes: list[BlockHash], hash_block_size: int, target_block_size: int
    ) -> None:
        self._hashes = block_hashes
        self._ratio = exact_div(target_block_size, hash_block_size)

    def __len__(self) -> int:
        return len(self._hashes) // self._ratio

    @overload
    def __getitem__(self, idx: int) -> BlockHash: ...
    @overload
    def __getitem__(self, idx: slice) -> list[BlockHash]: ...

    def __getitem__(self, idx):
        if self._ratio == 1:
            return self._hashes[idx]
        if isinstance(idx, slice):
            return [self[i] for i in range(*idx.indices(len(self)))]
        if not -len(self) <= idx < len(self):
            raise IndexError(f"block hash {idx} of {len(self)}")
        return self._hashes[(idx % len(self) + 1) * self._ratio - 1]


BlockHashList = list[BlockHash] | BlockHashListWithBlockSize


def resolve_block_hashes(
    block_hashes: BlockHashList, hash_block_size: int, block_size: int
) -> BlockHashList:
    """`block_hashes`, which are over `hash_block_size` tokens, for blocks of `block_size`."""
    if block_size == hash_block_size or isinstance(block_hashes, BlockHashListWithBlockSize):
        return block_hashes
    return BlockHashListWithBlockSize(block_hashes, hash_block_size, block_size)
