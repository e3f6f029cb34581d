# SPDX-License-Identifier: Apache-2.0
"""Roles of third-party backends, found by probing: never by the sizes of a real cache."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vllm.v1.kv_cache_geometry import ROLES, probe_roles

KNOWN = {
    "kv_first": (
        lambda nb, bs, h, d, dtype="auto": (2, nb, bs, h, d),
        ("kv", "block", "token", "head", "content"),
    ),
    "blocks_first": (
        lambda nb, bs, h, d, dtype="auto": (nb, 2, bs, h, d),
        ("block", "kv", "token", "head", "content"),
    ),
    "fused": (
        lambda nb, bs, h, d, dtype="auto": (nb, h, bs, 2 * d),
        ("block", "head", "token", "content"),
    ),
    "with scales": (
        lambda nb, bs, h, d, dtype="auto": (nb, h, bs, 2 * (d + 4)),
        ("block", "head", "token", "content"),
    ),
    "latent": (
        lambda nb, bs, h, d, dtype="auto": (nb, bs, d),
        ("block", "token", "content"),
    ),
    "latent of one head": (
        lambda nb, bs, h, d, dtype="auto": (nb, bs, 1, d),
        ("block", "token", "head", "content"),
    ),
    "one dimension for all": (
        lambda nb, bs, h, d, dtype="auto": (2, nb, bs * h * d),
        ("kv", "block", "content"),
    ),
    "elements in groups of 8": (
        lambda nb, bs, h, d, dtype="auto": (nb, h, d // 8, bs, 8),
        ("block", "head", "content", "token", "content"),
    ),
    "state pages": (
        lambda nb, bs, h, d, dtype="auto": (nb, 1, bs, h, d),
        ("block", "content", "token", "head", "content"),
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_known_layouts(name):
    shape, roles = KNOWN[name]
    assert probe_roles(shape) == roles


@given(st.permutations(ROLES[1:]))
def test_any_order_of_dimensions(roles):
    """Two heads, two blocks, one block, a head size equal to the block size: none of them matters,
    since nothing is asked for with such sizes."""

    def shape(nb, bs, h, d, dtype):
        sizes = {"block": nb, "token": bs, "head": h, "content": d, "kv": 2}
        return tuple(sizes[role] for role in roles)

    assert probe_roles(shape) == tuple(roles)


def test_backends_that_refuse_odd_sizes():
    """Some raise for blocks that are no multiple of 16 tokens, or heads of odd size."""

    def shape(nb, bs, h, d, dtype):
        if bs % 16 or d % 8:
            raise ValueError("a multiple of 16 tokens, and of 8 elements, please")
        return (nb, 2, bs, h, d)

    assert probe_roles(shape) == ("block", "kv", "token", "head", "content")


def test_backends_with_a_few_sizes():
    """Where only some sizes are taken those are tried, even if a block holds as many tokens as a
    head has elements."""

    def shape(nb, bs, h, d, dtype):
        assert bs in (16, 32, 64) and d in (64, 128)
        return (2, nb, bs, h, d)

    sizes = dict(block_sizes=[16, 32, 64], head_sizes=[64, 128])
    assert probe_roles(shape, **sizes) == ("kv", "block", "token", "head", "content")


def test_backends_with_one_block_size():
    """The dimension that never changes and has that size; no other can have it."""

    def shape(nb, bs, h, d, dtype):
        assert bs == 16
        return (nb, 2, bs, h, d)

    roles = probe_roles(shape, block_sizes=[16])
    assert roles == ("block", "kv", "token", "head", "content")


def test_the_dtype_reaches_the_backend():
    """A cache may have other dimensions when it is quantised."""

    def shape(nb, bs, h, d, dtype):
        return (nb, 2, bs, h, d) if dtype == "auto" else (2, nb, bs, h, d + 4)

    assert probe_roles(shape, "int8_per_token_head")[0] == "kv"


@pytest.mark.parametrize(
    ("shape", "why"),
    [
        (lambda nb, bs, h, d, t: (2, nb * bs, h, d), "depends on block and token"),
        (lambda nb, bs, h, d, t: (nb + 1, 2, bs, h, d), "a dimension of 10008 depends on block"),
        (lambda nb, bs, h, d, t: (nb, 2, 2, bs, h, d), "seem to be block, kv, kv"),
        (lambda nb, bs, h, d, t: (nb, nb, bs, h, d), "seem to be block, block"),
        (lambda nb, bs, h, d, t: (2, bs, h, d), "seem to be kv, token, head, content"),
        (
            lambda nb, bs, h, d, t: (nb, 2, bs, h, d) if h == 37 else (nb, 2, bs, d),
            "the number of dimensions depends on the head size",
        ),
    ],
)
def test_what_cannot_be_told_is_refused(shape, why):
    """With what to do: a guess would be right for most sizes, and corrupt text for the others."""
    with pytest.raises(ValueError, match=why) as refusal:
        probe_roles(shape, name="ODD_ATTN")
    assert "ODD_ATTN" in str(refusal.value)
    assert "get_kv_cache_roles()" in str(refusal.value)


def test_a_backend_that_takes_nothing():
    def shape(*sizes):
        raise NotImplementedError("no cache")

    with pytest.raises(ValueError, match=r"refuses every size.*no cache.*get_kv_cache_roles"):
        probe_roles(shape)


def test_probes_are_distinct_primes():
    """Guards against sizes of which one is a multiple of another."""
    asked = []

    def shape(*sizes):
        asked.append(sizes[:4])
        return sizes[0], 2, *sizes[1:4]

    probe_roles(shape)
    numbers = {size for sizes in asked for size in sizes}
    assert all(n > 2 and all(n % i for i in range(2, math.isqrt(n) + 1)) for n in numbers)
    assert all(len(set(sizes)) == 4 for sizes in asked)
