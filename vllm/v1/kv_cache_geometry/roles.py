# SPDX-License-Identifier: Apache-2.0
"""What each dimension of a backend's cache means, found by asking for caches of telling sizes.

Actual sizes do not tell: two heads look like K and V, and so do two blocks. So each parameter is
given a prime that no other has, and then changed alone: the dimensions that follow it are its.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import NamedTuple

ShapeFunction = Callable[..., Sequence[int]]


class _Sizes(NamedTuple):
    """The arguments of `get_kv_cache_shape`, by the roles that they are the sizes of."""

    block: int
    token: int
    head: int
    content: int


_BLOCKS, _HEADS = (10007, 10009), (37, 41)
# Some backends take only multiples: of 16 tokens, of 8 elements.
_TOKENS = ((101, 103), (16 * 101, 16 * 103), (256 * 101, 256 * 103))
_CONTENTS = ((211, 223), (64 * 211, 64 * 223))


def probe_roles(
    get_kv_cache_shape: ShapeFunction,
    cache_dtype: str = "auto",
    *,
    block_sizes: Sequence[int] = (),
    head_sizes: Sequence[int] = (),
    name: str = "the backend",
) -> tuple[str, ...]:
    """Roles of the dimensions of the shape that `get_kv_cache_shape(num_blocks, block_size,
    num_kv_heads, head_size, cache_dtype)` returns.

    Args:
        block_sizes, head_sizes: the only sizes that it takes, if so.
        name: for errors.

    Raises:
        ValueError: no dimension, or not one alone, is the number of blocks; or two may be K and V.
    """

    def shape(sizes: _Sizes) -> tuple[int, ...]:
        return tuple(get_kv_cache_shape(*sizes, cache_dtype))

    first, second = _accepted_sizes(shape, block_sizes, head_sizes, name)
    base = shape(first)
    follows: list[list[str]] = [[] for _ in base]
    for role in _Sizes._fields:
        changed = shape(first._replace(**{role: getattr(second, role)}))
        if len(changed) != len(base):
            raise _untold(name, base, f"the number of dimensions depends on the {role} size")
        for dim, (before, after) in enumerate(zip(base, changed)):
            if before != after:
                follows[dim].append(role)
    fixed = {role for role in _Sizes._fields if getattr(first, role) == getattr(second, role)}
    roles = [_role(name, base, size, by, first, fixed) for size, by in zip(base, follows)]
    return tuple(_settle_ones(name, base, roles))


def _accepted_sizes(
    shape: Callable[[_Sizes], tuple[int, ...]],
    block_sizes: Sequence[int],
    head_sizes: Sequence[int],
    name: str,
) -> tuple[_Sizes, _Sizes]:
    """Two sets of sizes that the backend takes, all different where it lets us choose."""
    tokens = [*_TOKENS, *_pairs(block_sizes)]
    contents = [*_CONTENTS, *_pairs(head_sizes)]
    refusal: Exception | None = None
    for (token, token2), (content, content2) in itertools.product(tokens, contents):
        one = _Sizes(_BLOCKS[0], token, _HEADS[0], content)
        other = _Sizes(_BLOCKS[1], token2, _HEADS[1], content2)
        try:
            shape(one), shape(other)
        except (ValueError, AssertionError, KeyError, NotImplementedError) as error:
            refusal = error
        else:
            return one, other
    raise ValueError(
        f"{name} refuses every size of a KV cache that would tell its dimensions apart "
        f"({refusal}); give it get_kv_cache_roles()"
    ) from refusal


def _pairs(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Pairs to compare; of a single size there is nothing to compare with."""
    sizes = sorted(set(sizes))
    return list(itertools.combinations(sizes, 2)) or [(size, size) for size in sizes]


def _role(
    name: str, base: tuple[int, ...], size: int, follows: list[str], sizes: _Sizes, fixed: set[str]
) -> str:
    """`fixed`: parameters that could not be changed, so that no dimension can follow them.

    Blocks must be a dimension of their own; whatever else mixes heads, tokens and elements, or is
    always of one size, lies inside a block and is called content.
    """
    if "block" in follows:
        if follows != ["block"] or size != sizes.block:
            raise _untold(name, base, f"a dimension of {size} depends on {' and '.join(follows)}")
        return "block"
    if not follows and size in (1, 2):
        return "kv" if size == 2 else "one"
    if not follows and fixed == {"token"} and size == sizes.token:
        return "token"
    if follows in (["token"], ["head"]) and size == getattr(sizes, follows[0]):
        return follows[0]
    return "content"


def _settle_ones(name: str, base: tuple[int, ...], roles: list[str]) -> list[str]:
    """A dimension of size 1 stands for heads where nothing else does, as in MLA."""
    if "one" in roles and "head" not in roles:
        roles[roles.index("one")] = "head"
    roles = ["content" if role == "one" else role for role in roles]
    if roles.count("block") != 1 or any(roles.count(r) > 1 for r in ("token", "head", "kv")):
        raise _untold(name, base, f"its dimensions seem to be {', '.join(roles)}")
    return roles


def _untold(name: str, base: tuple[int, ...], why: str) -> ValueError:
    return ValueError(
        f"cannot tell the dimensions of {name}'s KV cache apart: {why} (asked for distinct sizes, "
        f"it answered {base}); give it get_kv_cache_roles()"
    )
