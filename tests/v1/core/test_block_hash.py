# SPDX-License-Identifier: Apache-2.0
"""Names for block content: equal exactly when the keys and values are."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.core.utils import make_feature, make_request
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core.kv_cache_utils import (
    BlockHashListWithBlockSize,
    generate_block_hash_extra_keys,
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    hash_block_tokens,
    make_block_hash_with_group_id,
)
from vllm.v1.request import Request


@dataclass
class Lora:
    lora_int_id: int


def hashes(prompt: list[int], block_size: int = 4, **fields) -> list[bytes]:
    request = Request(
        "r",
        prompt,
        SamplingParams(),
        block_hasher=get_request_block_hasher(block_size, sha256),
        **fields,
    )
    return request.block_hashes


def test_only_full_blocks_are_hashed():
    """A hash of a block that still grows would name two contents."""
    assert [len(hashes(list(range(n)))) for n in (1, 3, 4, 5, 8)] == [0, 0, 1, 1, 2]


def test_hash_covers_everything_before():
    """The same tokens after another beginning have other keys and values."""
    a, b = hashes([1, 2, 3, 4, 5, 6, 7, 8]), hashes([9, 2, 3, 4, 5, 6, 7, 8])
    assert a[0] != b[0] and a[1] != b[1]
    assert hashes([1, 2, 3, 4, 0, 0, 0, 0])[0] == a[0]


def test_growing_gives_the_same_hashes():
    """Sampled tokens must be found by a later prompt that contains them: conversations grow."""
    prompt = list(range(2, 23))
    request = make_request("r", prompt[:5], hash_block_size=4)
    for token in prompt[5:]:
        request.append_output_token_ids(token)
    assert request.block_hashes == hashes(prompt)


@given(st.lists(st.integers(0, 3), max_size=12), st.lists(st.integers(0, 3), max_size=12))
def test_equal_hashes_mean_equal_prefixes(a: list[int], b: list[int]):
    """For any two prompts: block i has the same hash exactly if all tokens up to its end agree."""
    if not a or not b:
        return
    for i, (x, y) in enumerate(zip(hashes(a, 2), hashes(b, 2))):
        assert (x == y) == (a[: 2 * i + 2] == b[: 2 * i + 2])


def test_salt_and_adapter_separate():
    """Tenants with a salt of their own share nothing; an adapter changes keys and values; a salt
    and an adapter that look alike are not the same."""
    prompt = list(range(8))
    kinds = [
        hashes(prompt),
        hashes(prompt, cache_salt="1"),
        hashes(prompt, cache_salt="2"),
        hashes(prompt, lora_request=Lora(1)),
    ]
    for position in range(2):
        assert len({kind[position] for kind in kinds}) == len(kinds)
    assert hashes(prompt, cache_salt="1") == kinds[1]


def test_encoder_inputs_separate_from_where_they_begin():
    """Placeholder tokens are alike for every image: what it shows must be in the hash, in the
    blocks it reaches into and, through the chain, in all after them."""
    prompt = list(range(16))
    plain = hashes(prompt)
    cat = hashes(prompt, mm_features=[make_feature("cat", 4, offset=5)])
    dog = hashes(prompt, mm_features=[make_feature("dog", 4, offset=5)])
    assert plain[0] == cat[0] == dog[0]
    for i in (1, 2, 3):
        assert len({plain[i], cat[i], dog[i]}) == 3
    moved = hashes(prompt, mm_features=[make_feature("cat", 4, offset=6)])
    assert moved[1] != cat[1]


def test_encoder_keys_name_the_features_of_the_block():
    """Each block has the features that reach into it, no more, and its successor starts its search
    where it may."""
    features = [make_feature("a", 2, offset=0), make_feature("b", 6, offset=3), make_feature("c", 1, offset=10)]
    request = Request("r", list(range(12)), SamplingParams(), mm_features=features)
    keys, next_idx = generate_block_hash_extra_keys(request, 0, 4, 0)
    assert keys == (("mm", "a", 0), ("mm", "b", 3)) and next_idx == 1
    keys, next_idx = generate_block_hash_extra_keys(request, 4, 8, next_idx)
    assert keys == (("mm", "b", -1),) and next_idx == 1
    keys, next_idx = generate_block_hash_extra_keys(request, 8, 12, next_idx)
    assert keys == (("mm", "b", -5), ("mm", "c", 2)) and next_idx == 3
    assert generate_block_hash_extra_keys(request, 12, 16, next_idx) == (None, 3)


def test_encoding_is_unambiguous():
    """Values that print alike are not alike: 1 and "1", bytes and text, nesting."""
    values = [1, "1", b"1", None, (1,), ((1,),), (1, None), (1, 1), "", ()]
    assert len({sha256(value) for value in values}) == len(values)
    assert sha256((1, 2)) == sha256([1, 2])


def test_unsupported_hash_is_refused_by_name():
    """A wish for another hash must not silently give sha256."""
    for name in ("sha256_cbor", "xxhash", "md5"):
        with pytest.raises(ValueError, match=f"{name}.*supported: sha256"):
            get_hash_fn_by_name(name)
    assert get_hash_fn_by_name("sha256") is sha256


def test_hashes_agree_between_processes_with_a_fixed_seed():
    """Processes that exchange pages by hash agree if PYTHONHASHSEED is set; without it the root is
    random, so that nobody can prepare collisions."""
    code = (
        "from vllm.v1.core import block_hash as b; from vllm.utils.hashing import sha256;"
        "b.init_none_hash(sha256); print(b.hash_block_tokens(sha256, None, [1, 2]).hex())"
    )

    def run(seed: str | None) -> str:
        env = {k: v for k, v in os.environ.items() if k != "PYTHONHASHSEED"}
        env |= {"PYTHONHASHSEED": seed} if seed else {}
        command = [sys.executable, "-c", code]
        return subprocess.run(command, env=env, capture_output=True, check=True).stdout.decode()

    assert run("7") == run("7") != run("8")
    assert run(None) != run(None)


def test_group_id_travels_with_the_hash():
    """Both parts of a key come out as they went in."""
    block_hash = hash_block_tokens(sha256, None, (1, 2))
    for group_id in (0, 1, 300):
        key = make_block_hash_with_group_id(block_hash, group_id)
        assert (get_block_hash(key), get_group_id(key)) == (block_hash, group_id)


def test_larger_blocks_are_named_by_their_last_hash():
    """A block of 8 tokens over hashes of 4: equal if and only if all 8 and those before agree."""
    seen = BlockHashListWithBlockSize(hashes(list(range(20))), 4, 8)
    assert list(seen[:]) == [hashes(list(range(20)))[i] for i in (1, 3)]
    assert len(seen) == 2 and seen[-1] == seen[1]
    with pytest.raises(IndexError):
        seen[2]
    with pytest.raises(ValueError):
        BlockHashListWithBlockSize([], 4, 6)
