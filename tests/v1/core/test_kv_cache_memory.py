# SPDX-License-Identifier: Apache-2.0
"""Groups of layers, and how many pages fit: what is promised is what is allocated."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.core.utils import cross_spec, full_spec, make_config, window_spec
from vllm.v1.core.kv_cache_utils import (
    check_enough_kv_cache_memory,
    estimate_max_model_len,
    generate_scheduler_kv_cache_config,
    get_kv_cache_capacity,
    get_kv_cache_configs,
    get_kv_cache_groups,
    get_max_concurrency_for_kv_cache_config,
    is_kv_cache_spec_uniform,
    resolve_kv_cache_block_sizes,
    unify_kv_cache_spec_page_size,
    update_kv_cache_capacity,
)
from vllm.v1.kv_cache_interface import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantMode,
)

PAGE = full_spec().page_size_bytes


def layers(full: int, windows: int, window: int = 64) -> dict[str, KVCacheSpec]:
    specs: dict[str, KVCacheSpec] = {f"full.{i}": full_spec() for i in range(full)}
    return specs | {f"window.{i}": window_spec(window) for i in range(windows)}


def lengths(specs: dict[str, KVCacheSpec], **config) -> list[int]:
    return [len(g.layer_names) for g in get_kv_cache_groups(make_config(**config), specs)]


def test_equal_layers_make_one_group():
    """A plain decoder has one block table."""
    assert lengths(layers(8, 0)) == [8]
    assert is_kv_cache_spec_uniform(layers(0, 3)) and not is_kv_cache_spec_uniform(layers(1, 1))
    assert lengths({}) == []


@pytest.mark.parametrize(
    ("full", "windows", "expected"),
    [
        (1, 1, [1, 1]),
        (4, 22, [4, 4, 4, 4, 4, 3, 3]),
        (24, 28, [24, 28]),
        (8, 8, [8, 8]),
        (2, 6, [2, 2, 2, 2]),
    ],
)
def test_hybrid_layers_make_even_groups(full: int, windows: int, expected: list[int]):
    """Groups of one length share tensors without gaps; Gemma 3's 4 + 22 leave 2 of 28 places
    unused. A wrong split wastes a third of the cache."""
    groups = get_kv_cache_groups(make_config(), layers(full, windows))
    assert sorted(len(g.layer_names) for g in groups) == sorted(expected)
    names = [name for g in groups for name in g.layer_names]
    assert sorted(names) == sorted(layers(full, windows))
    for group in groups:
        assert len({name.split(".")[0] for name in group.layer_names}) == 1


def test_tensors_are_shared_across_groups():
    """Tensor i holds layer i of every group: no layer twice in one, none of the same group."""
    (config,) = get_kv_cache_configs(make_config(), [layers(2, 6)], [PAGE * 2 * 300])
    assert config.num_blocks == 300
    assert [len(t.shared_by) for t in config.kv_cache_tensors] == [4, 4]
    assert {t.size for t in config.kv_cache_tensors} == {300 * PAGE}
    group_of = {n: i for i, g in enumerate(config.kv_cache_groups) for n in g.layer_names}
    for tensor in config.kv_cache_tensors:
        assert len({group_of[name] for name in tensor.shared_by}) == 4


def test_smaller_pages_get_more_tokens():
    """Layers with half the bytes a token get pages of twice the tokens, so that pages are
    alike."""
    specs = {"a": full_spec(num_kv_heads=4), "b": window_spec(64, num_kv_heads=2)}
    groups = get_kv_cache_groups(make_config(), specs)
    assert [g.kv_cache_spec.block_size for g in groups] == [16, 32]
    (config,) = get_kv_cache_configs(make_config(), [specs], [1 << 24])
    assert resolve_kv_cache_block_sizes(config, make_config()) == (32, 16)


def test_pages_that_are_no_multiples_are_padded():
    """int8 with a scale for each token and head: 520 and 1032 bytes. Refusing such a model, or
    giving 520 a page of its own for each token, would lose it or half the memory."""
    int8 = dict(num_kv_heads=1, dtype="int8", kv_quant_mode=KVQuantMode.INT8_PER_TOKEN_HEAD)
    specs = {"a": full_spec(head_size=256, **int8), "b": window_spec(64, head_size=512, **int8)}
    assert [s.page_size_bytes for s in specs.values()] == [16 * 520, 16 * 1032]
    a, b = (g.kv_cache_spec for g in get_kv_cache_groups(make_config(), specs))
    assert (a.block_size, b.block_size) == (32, 16)
    assert (a.page_size_bytes, b.page_size_bytes) == (16640, 16640)
    assert b.real_page_size_bytes == 16 * 1032
    (config,) = get_kv_cache_configs(make_config(), [specs], [1 << 24])
    assert {t.size for t in config.kv_cache_tensors} == {config.num_blocks * 16640}


@given(
    heads=st.lists(st.integers(1, 9), min_size=2, max_size=5),
    head_size=st.integers(1, 130),
    block_size=st.sampled_from([1, 4, 16, 48]),
)
def test_any_pages_can_be_made_alike(heads: list[int], head_size: int, block_size: int):
    """One page size, no layer's bytes cut, padding that any number of kernel blocks can share, and
    never more than half of a page lost."""
    specs = {
        f"l{i}": full_spec(block_size, num_kv_heads=n, head_size=head_size)
        for i, n in enumerate(heads)
    }
    unified = unify_kv_cache_spec_page_size(specs)
    (page_size,) = {spec.page_size_bytes for spec in unified.values()}
    for name, spec in unified.items():
        assert spec.block_size % block_size == 0
        assert spec.real_page_size_bytes <= page_size
        if spec.real_page_size_bytes < page_size:
            assert page_size % (8 * spec.block_size) == 0


def test_pages_that_cannot_be_padded_are_refused_by_name():
    """A spec of an unknown kind cannot say what its padding means."""

    @dataclass(frozen=True)
    class Odd(KVCacheSpec):
        page_size_bytes = 100

    with pytest.raises(NotImplementedError, match="layer model.b .* Odd of 100 bytes"):
        get_kv_cache_groups(make_config(), {"model.a": full_spec(), "model.b": Odd(16)})


def test_hybrid_manager_off_keeps_windows_whole():
    """One group of full attention; the window itself stays known to the layers' kernels."""
    config = make_config(disable_hybrid_kv_cache_manager=True)
    (group,) = get_kv_cache_groups(config, layers(2, 6))
    assert isinstance(group.kv_cache_spec, FullAttentionSpec)
    assert len(group.layer_names) == 8


def test_cross_attention_is_a_group_of_its_own():
    """Encoder pages are counted by another length: never in the decoder's table."""
    cross = CrossAttentionSpec(block_size=16, num_kv_heads=2, head_size=64, dtype="float32")
    specs = layers(2, 0) | {f"cross.{i}": cross for i in range(2)}
    assert lengths(specs) == [2, 2]



@pytest.mark.parametrize("budget", [64, 4096])
def test_cross_attention_needs_pages_for_the_longest_encoder_input(budget: int):
    """1500 encoder tokens are 94 pages beside the 4 of 64 decoder tokens, in memory as in block
    tables, whatever the batch budget and however short the decoder is."""
    specs = {"own": full_spec(), "cross": cross_spec(max_num_encoder_tokens=1500)}
    config = make_config(
        max_model_len=64, max_num_batched_tokens=budget, is_encoder_decoder=True
    )
    needed = (4 + 94 + 1) * PAGE
    check_enough_kv_cache_memory(config, specs, needed)
    with pytest.raises(ValueError, match="KV cache"):
        check_enough_kv_cache_memory(config, specs, needed - 1)
    assert specs["cross"].max_num_blocks_per_req(config, 64) == 94


def test_error_says_what_is_needed_what_fits_and_what_to_do():
    """A user who sees it knows three ways out."""
    config = make_config(max_model_len=1024)
    with pytest.raises(ValueError) as error:
        check_enough_kv_cache_memory(config, layers(4, 0), PAGE * 4 * 33)
    text = str(error.value)
    assert "1024 tokens" in text and "2.1 MiB" in text and "4.1 MiB" in text
    assert "--max-model-len to 512" in text
    for flag in ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "VLLM_CPU_KVCACHE_SPACE"):
        assert flag in text


def test_null_page_counts():
    """A pool of exactly a request's pages cannot hold it: one page is never handed out."""
    config = make_config(max_model_len=1024)
    check_enough_kv_cache_memory(config, layers(4, 0), PAGE * 4 * 65)
    with pytest.raises(ValueError):
        check_enough_kv_cache_memory(config, layers(4, 0), PAGE * 4 * 64)


def test_nothing_fits():
    """Memory for the null page alone: said so, without advice to set a length of 0."""
    with pytest.raises(ValueError, match="enough for 0 tokens: give the KV cache more memory"):
        check_enough_kv_cache_memory(make_config(), layers(4, 0), PAGE * 4)
    with pytest.raises(ValueError, match="0.0 MiB"):
        check_enough_kv_cache_memory(make_config(), layers(4, 0), -5)


def test_override_takes_the_place_of_the_check():
    """With num_gpu_blocks_override the user has decided; long requests fail one by one."""
    config = make_config(num_gpu_blocks_override=7)
    (made,) = get_kv_cache_configs(config, [layers(4, 0)], [PAGE])
    assert made.num_blocks == 7
    assert {t.size for t in made.kv_cache_tensors} == {7 * PAGE}


@given(
    full=st.integers(0, 5),
    windows=st.integers(0, 9),
    window=st.integers(1, 700),
    pages=st.integers(0, 400),
)
def test_what_is_promised_fits(full: int, windows: int, window: int, pages: int):
    """For any model and memory: the estimated length passes the check, one token more fails it, and
    the pages then allocated hold such a request. Estimate and allocation use the same groups."""
    specs = layers(full, windows, window)
    if not specs:
        return
    memory = pages * PAGE
    longest = estimate_max_model_len(make_config(max_model_len=1024), specs, memory)
    if longest:
        config = make_config(max_model_len=longest)
        check_enough_kv_cache_memory(config, specs, memory)
        (made,) = get_kv_cache_configs(config, [specs], [memory])
        assert sum(tensor.size for tensor in made.kv_cache_tensors) <= memory
        assert get_max_concurrency_for_kv_cache_config(config, made) >= 1.0
    if longest < 1024:
        with pytest.raises(ValueError, match="max_model_len"):
            check_enough_kv_cache_memory(make_config(max_model_len=longest + 1), specs, memory)


def test_workers_agree_on_pages():
    """The worker with the least memory decides; all get tensors for that many pages."""
    configs = get_kv_cache_configs(
        make_config(), [layers(2, 2)] * 2, [PAGE * 2 * 500, PAGE * 2 * 300]
    )
    assert [c.num_blocks for c in configs] == [300, 300]
    assert {t.size for c in configs for t in c.kv_cache_tensors} == {300 * PAGE}
    assert generate_scheduler_kv_cache_config(configs).num_blocks == 300
    configs[1].num_blocks = 299
    with pytest.raises(ValueError, match="disagree"):
        generate_scheduler_kv_cache_config(configs)


def test_workers_with_different_layers():
    """Pipeline stages hold parts of every group, under one numbering of groups."""
    specs = layers(4, 8)
    first = {n: s for n, s in specs.items() if int(n.split(".")[1]) % 2 == 0}
    second = {n: s for n, s in specs.items() if n not in first}
    configs = get_kv_cache_configs(make_config(), [first, second], [1 << 25] * 2)
    assert len({len(c.kv_cache_groups) for c in configs}) == 1
    for config, own in zip(configs, (first, second)):
        names = [n for t in config.kv_cache_tensors for n in t.shared_by]
        assert sorted(names) == sorted(own)
    with pytest.raises(ValueError, match="disagree on the KV cache of layer full.0"):
        get_kv_cache_configs(make_config(), [first, {"full.0": full_spec(8)}], [1 << 25] * 2)


def test_capacity_counts_usable_pages():
    """What the start line promises: tokens besides the null page, and whole requests."""
    config = make_config(max_model_len=512)
    (made,) = get_kv_cache_configs(config, [layers(4, 0)], [PAGE * 4 * 65])
    assert get_kv_cache_capacity(config, made) == (1024, 2.0)
    update_kv_cache_capacity(config, made)
    assert config.cache_config.num_gpu_blocks == 65
    assert config.cache_config.kv_cache_size_tokens == 1024
    assert config.cache_config.kv_cache_max_concurrency == 2.0


def test_windows_make_room_for_more_requests():
    """A window holds fewer pages than a full layer: the estimate must show it."""
    config = make_config(max_model_len=1024, max_num_batched_tokens=64)
    concurrency = []
    for specs in (layers(8, 0), layers(2, 6)):
        (made,) = get_kv_cache_configs(config, [specs], [PAGE * 8 * 200])
        concurrency.append(get_max_concurrency_for_kv_cache_config(config, made))
    assert concurrency[1] > 2 * concurrency[0]


def test_model_without_attention_still_counts_a_page():
    """No layer has a cache: a pool still exists, and nothing is asked of it."""
    (made,) = get_kv_cache_configs(make_config(), [{}], [0])
    assert made.num_blocks == 2 and made.kv_cache_tensors == []
