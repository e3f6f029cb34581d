# SPDX-License-Identifier: Apache-2.0
"""Block tables: prefix hits, windows that slide, several groups, encoder tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.v1.core.utils import full_spec, make_kv_cache_config, make_request, window_spec
from vllm.v1.core.kv_cache_coordinator import (
    HybridKVCacheCoordinator,
    KVCacheCoordinatorNoPrefixCache,
    UnitaryKVCacheCoordinator,
)
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.single_type_kv_cache_manager import (
    FullAttentionManager,
    SlidingWindowManager,
    get_manager_class,
)
from vllm.v1.kv_cache_interface import CrossAttentionSpec, KVCacheSpec
from vllm.v1.request import Request


def cross_spec(block_size: int = 16) -> CrossAttentionSpec:
    return CrossAttentionSpec(block_size=block_size, num_kv_heads=2, head_size=64, dtype="float32")


def make_manager(usable_pages: int, *specs: KVCacheSpec, **options) -> KVCacheManager:
    specs = specs or (full_spec(),)
    sizes = {spec.block_size for spec in specs}
    return KVCacheManager(
        make_kv_cache_config(usable_pages, *specs),
        max_model_len=4096,
        scheduler_block_size=max(sizes),
        hash_block_size=min(sizes),
        log_stats=True,
        **options,
    )


def start(manager: KVCacheManager, request: Request, num_tokens: int | None = None, **options):
    """Admits a request with its hits and computes `num_tokens` more; returns the hit's length."""
    hits, num_hit = manager.get_computed_blocks(request)
    num_tokens = num_tokens or request.num_tokens - num_hit
    assert manager.allocate_slots(request, num_tokens, num_hit, hits, **options) is not None
    request.num_computed_tokens = num_hit + num_tokens
    manager.check_integrity()
    return num_hit


def go_on(manager: KVCacheManager, request: Request, num_tokens: int = 1, token: int = 5):
    """Samples a token if all are computed, and computes the next ones."""
    if request.num_computed_tokens == request.num_tokens:
        request.append_output_token_ids(token)
    assert manager.allocate_slots(request, num_tokens) is not None
    request.num_computed_tokens += num_tokens
    manager.check_integrity()


@pytest.mark.parametrize(("length", "hit"), [(15, 0), (16, 0), (17, 16), (32, 16), (33, 32)])
def test_the_last_token_is_always_computed(length: int, hit: int):
    """A prompt that is cached whole, also of exactly 1 or 2 pages, must still give logits: its last
    token is computed again."""
    manager = make_manager(10)
    prompt = list(range(length))
    assert start(manager, make_request("a", prompt)) == 0
    assert start(manager, make_request("b", prompt)) == hit


def test_shared_pages_are_shared():
    """A hit holds the same pages, not copies; they stay while one holder is left."""
    manager = make_manager(10)
    prompt = list(range(40))
    a, b = make_request("a", prompt), make_request("b", prompt + [7, 8])
    start(manager, a)
    assert start(manager, b) == 32
    assert manager.get_block_ids("a")[0][:2] == manager.get_block_ids("b")[0][:2]
    assert manager.block_pool.get_num_free_blocks() == 10 - 4
    manager.free(a)
    manager.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == 10 - 3
    manager.free(b)
    assert manager.usage == 0.0


def test_hits_are_held_before_new_pages_are_taken():
    """A found page may be the oldest free one: handing it out as a new page for the very request
    that found it would give it one page twice."""
    manager = make_manager(4)
    prompt = list(range(33))
    a = make_request("a", prompt)
    start(manager, a)
    manager.free(a)
    b = make_request("b", prompt + list(range(100, 130)))
    assert start(manager, b) == 32
    table = manager.get_block_ids("b")[0]
    assert len(set(table)) == len(table) == 4


def test_found_free_pages_count_as_taken():
    """Pages found in the free queue leave it: with 4 pages, a hit of 2 leaves 2, not 4."""
    manager = make_manager(4)
    a = make_request("a", list(range(33)))
    start(manager, a)
    manager.free(a)
    b = make_request("b", list(range(32)) + list(range(100, 150)))  # 6 pages, 2 of them found
    hits, num_hit = manager.get_computed_blocks(b)
    assert num_hit == 32
    assert manager.allocate_slots(b, b.num_tokens - 32, 32, hits) is None
    manager.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == 4


def test_refusal_changes_nothing():
    """A request that does not fit must leave no trace, or pages leak on every try."""
    manager = make_manager(3)
    request = make_request("a", 64)
    for _ in range(3):
        assert manager.allocate_slots(request, 64) is None
    manager.check_integrity()
    assert manager.block_pool.get_num_free_blocks() == 3
    with pytest.raises(ValueError, match="room for 0 tokens"):
        manager.allocate_slots(request, 0)


def test_full_sequence_must_fit_looks_beyond_the_chunk():
    """A prompt admitted for its first chunk alone could block itself and others half-way."""
    manager = make_manager(3)
    request = make_request("a", 64)
    assert manager.allocate_slots(request, 16, full_sequence_must_fit=True) is None
    assert manager.allocate_slots(request, 16) is not None


def test_admission_respects_promises_and_watermark():
    """Pages promised to running prompts, and the watermark's, are not given to newcomers; running
    requests may take them."""
    manager = make_manager(10, watermark=0.2)
    request = make_request("a", 16 * 8)
    admit = {"full_sequence_must_fit": True}
    assert manager.allocate_slots(request, 16, reserved_blocks=3, **admit) is None
    assert (
        manager.allocate_slots(request, 16, reserved_blocks=3, has_scheduled_reqs=False, **admit)
        is None
    )
    assert manager.allocate_slots(request, 16, reserved_blocks=1, **admit) is None
    assert manager.allocate_slots(request, 16, **admit) is not None
    request.num_computed_tokens = 16
    request.append_output_token_ids(list(range(32)))
    assert manager.allocate_slots(request, 16 * 9) is not None


def test_caching_off_finds_nothing():
    """With prefix caching off nothing is found and nothing kept."""
    manager = make_manager(10, enable_caching=False)
    assert isinstance(manager.coordinator, KVCacheCoordinatorNoPrefixCache)
    prompt = list(range(40))
    for name in "ab":
        assert start(manager, make_request(name, prompt)) == 0
    assert len(manager.block_pool.cached_block_hash_to_block) == 0


def test_prompt_logprobs_are_computed_not_found():
    """Found tokens have no logits: a request that wants logprobs of its prompt computes it all."""
    manager = make_manager(10)
    prompt = list(range(40))
    start(manager, make_request("a", prompt))
    assert start(manager, make_request("b", prompt, prompt_logprobs=1)) == 0
    assert start(manager, make_request("c", prompt, skip_reading_prefix_cache=True)) == 0


def test_salted_requests_share_nothing():
    """A tenant's salt keeps its prompts from being probed by others."""
    manager = make_manager(20)
    prompt = list(range(40))
    start(manager, make_request("a", prompt, cache_salt="x"))
    assert start(manager, make_request("b", prompt)) == 0
    assert start(manager, make_request("c", prompt, cache_salt="x")) == 32


def test_generated_tokens_are_found_by_the_next_turn():
    """A conversation's next prompt contains the last answer: its pages are found."""
    manager = make_manager(20)
    a = make_request("a", list(range(30)), 40)
    start(manager, a)
    for token in range(100, 120):
        go_on(manager, a, token=token)
    manager.free(a)
    follow_up = make_request("b", list(a.all_token_ids) + [3, 4, 5])
    assert start(manager, follow_up) == 48


def test_delayed_pages_are_known_only_when_said():
    """Pages that a connector still fills must not be found; afterwards they are."""
    manager = make_manager(20)
    prompt = list(range(48))
    a = make_request("a", prompt)
    assert manager.allocate_slots(
        a, 16, num_external_computed_tokens=32, delay_cache_blocks=True
    )
    assert len(manager.get_block_ids("a")[0]) == 3
    probe = make_request("b", prompt)
    assert manager.get_computed_blocks(probe)[1] == 0
    manager.cache_blocks(a, 48)
    assert manager.get_computed_blocks(probe)[1] == 32


def test_lookahead_slots_are_not_cached():
    """Slots for guessed tokens have pages but no known content."""
    manager = make_manager(20)
    a = make_request("a", list(range(20)))
    manager.allocate_slots(a, 20, num_lookahead_tokens=30)
    assert len(manager.get_block_ids("a")[0]) == 4
    assert len(manager.block_pool.cached_block_hash_to_block) == 1
    assert len(manager.get_blocks("a").get_unhashed_block_ids()) == 3


# --- Sliding window ---


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 31, 32, 33, 50])
def test_window_keeps_what_the_next_token_sees(window: int):
    """At every length: the pages of the last `window` tokens are held and no others; freeing one
    too many corrupts, one too few leaks."""
    manager = make_manager(40, window_spec(window, block_size=8))
    request = make_request("a", list(range(20)), 200, hash_block_size=8)
    start(manager, request, 7)
    go_on(manager, request, 13)
    for _ in range(80):
        go_on(manager, request)
        computed = request.num_computed_tokens
        # allocate_slots freed what the token just computed, at computed - 1, does not see.
        first_seen = max(0, computed - window)
        table = manager.get_blocks("a").blocks[0]
        for page, block in enumerate(table):
            assert block.is_null == ((page + 1) * 8 <= first_seen), (computed, page)
        assert len(table) == -(-computed // 8)


def naive_window_hit(cached: list[bool], max_length: int, window: int, align: int) -> int:
    """The longest aligned length of which the window's pages are all cached; pages of 4 tokens."""
    for length in range(max_length // align * align, 0, -align):
        first_seen = max(0, length - window + 1)
        if length // 4 <= len(cached) and all(cached[first_seen // 4 : length // 4]):
            return length
    return 0


@given(
    cached=st.lists(st.booleans(), min_size=1, max_size=12),
    window=st.integers(2, 30),
    tail=st.integers(1, 3),
    align=st.sampled_from([4, 8]),
)
def test_window_hit_is_the_longest(cached: list[bool], window: int, tail: int, align: int):
    """For any set of cached pages the hit is the longest beginning whose window is there, and holds
    null pages before it."""
    manager = make_manager(30, window_spec(window, block_size=4))
    pool = manager.block_pool
    request = make_request("a", list(range(4 * len(cached) + tail)), hash_block_size=4)
    blocks = pool.get_new_blocks(len(cached))
    pool.cache_full_blocks(request, blocks, 0, len(cached), 4, 0)
    pool.evict_blocks({b.block_id for b, keep in zip(blocks, cached) if not keep})
    (found,), length = SlidingWindowManager.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1, [0], pool, window_spec(window, 4), align
    )
    assert length == naive_window_hit(cached, request.num_tokens - 1, window, align)
    assert len(found) == length // 4
    first_page = max(0, length - window + 1) // 4
    assert [b.is_null for b in found] == [page < first_page for page in range(len(found))]
    assert found[first_page:] == blocks[first_page : length // 4]


def test_full_hit_is_aligned():
    """With an alignment of 2 pages a hit of 3 counts as 2."""
    manager = make_manager(10)
    start(manager, make_request("a", list(range(48))))
    request = make_request("b", list(range(60)))
    (found,), length = FullAttentionManager.find_longest_cache_hit(
        request.block_hashes, 59, [0], manager.block_pool, full_spec(), 32
    )
    assert (len(found), length) == (2, 32)


def test_window_hit_after_the_beginning_is_gone():
    """What a window no longer needs may be evicted; the prompt is found all the same."""
    manager = make_manager(8, window_spec(8, block_size=4))
    prompt = list(range(33))
    a = make_request("a", prompt, hash_block_size=4)
    start(manager, a, 16)
    go_on(manager, a, 17)
    manager.free(a)
    manager.block_pool.evict_blocks(
        {b.block_id for b in manager.block_pool.blocks if b.block_hash} - _last_hashed(manager, 2)
    )
    b = make_request("b", prompt + [99], hash_block_size=4)
    assert start(manager, b) == 32
    assert manager.get_block_ids("b")[0][:6] == [0] * 6


def _last_hashed(manager: KVCacheManager, count: int) -> set[int]:
    request = make_request("probe", list(range(33)), hash_block_size=4)
    found = (manager.block_pool.get_cached_block(h, [0]) for h in request.block_hashes[-count:])
    return {blocks[0].block_id for blocks in found if blocks}


def test_window_admission_needs_the_window_not_the_prompt():
    """A long prompt computed in chunks holds a window and a chunk at once: it is admitted into a
    pool that could not hold it whole."""
    manager = make_manager(8, window_spec(32), max_in_flight_tokens=64)
    request = make_request("a", 16 * 40)
    assert manager.can_ever_hold(request.num_tokens)
    assert manager.allocate_slots(request, 64, full_sequence_must_fit=True) is not None
    for _ in range(9):
        request.num_computed_tokens += 64
        assert manager.allocate_slots(request, 64) is not None
        manager.check_integrity()
    assert not make_manager(6, window_spec(32), max_in_flight_tokens=64).can_ever_hold(16 * 40)


# --- Several groups ---


def test_coordinator_is_chosen_by_the_groups():
    """One group, several groups, or no group that can be found by a prefix."""
    assert isinstance(make_manager(9).coordinator, UnitaryKVCacheCoordinator)
    hybrid = make_manager(9, full_spec(), window_spec(32))
    assert isinstance(hybrid.coordinator, HybridKVCacheCoordinator)
    cross_only = make_manager(9, cross_spec()).coordinator
    assert isinstance(cross_only, KVCacheCoordinatorNoPrefixCache)


def test_unknown_spec_is_refused_by_name():
    """A layer whose cache nobody manages must not fall to full attention in silence."""
    with pytest.raises(ValueError, match="KVCacheSpec; supported: FullAttentionSpec"):
        get_manager_class(KVCacheSpec(16))
    assert get_manager_class(full_spec()) is FullAttentionManager


def naive_hybrid_hit(full: list[bool], window: list[bool], max_length: int, size: int) -> int:
    for length in range(max_length // 4 * 4, 0, -4):
        pages = length // 4
        first_page = max(0, length - size + 1) // 4
        if pages <= len(full) and all(full[:pages]) and all(window[first_page:pages]):
            return length
    return 0


@given(
    pages=st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=10),
    size=st.integers(2, 20),
)
def test_hybrid_hit_is_the_longest_common(pages: list[tuple[bool, bool]], size: int):
    """For any pages cached in two groups: the longest beginning that both have, which may need
    several rounds when one shortens the other."""
    manager = make_manager(40, window_spec(size, 4), full_spec(4))
    pool = manager.block_pool
    request = make_request("a", list(range(4 * len(pages) + 1)), hash_block_size=4)
    for group_id, keep in ((0, [w for _, w in pages]), (1, [f for f, _ in pages])):
        blocks = pool.get_new_blocks(len(pages))
        pool.cache_full_blocks(request, blocks, 0, len(pages), 4, group_id)
        pool.evict_blocks({b.block_id for b, k in zip(blocks, keep) if not k})
    found, length = manager.coordinator.find_longest_cache_hit(
        request.block_hashes, request.num_tokens - 1
    )
    full, window = [f for f, _ in pages], [w for _, w in pages]
    assert length == naive_hybrid_hit(full, window, request.num_tokens - 1, size)
    assert [len(group) for group in found] == [length // 4] * 2
    assert not any(block.is_null for block in found[1])


def test_groups_of_different_block_sizes():
    """Pages of 16 and 32 tokens: a hit is a multiple of both, and each table has its own length."""
    manager = make_manager(30, full_spec(32), window_spec(64, 16))
    prompt = list(range(100))
    start(manager, make_request("a", prompt))
    assert start(manager, make_request("b", prompt)) == 96
    assert start(manager, make_request("c", prompt[:90] + [0] * 10)) == 64
    assert [len(table) for table in manager.get_block_ids("c")] == [4, 7]


@pytest.mark.parametrize(("encoder_tokens", "pages"), [(1, 1), (16, 1), (17, 2), (1024, 64)])
def test_cross_attention_takes_pages_by_the_encoder_length(encoder_tokens: int, pages: int):
    """ceil(n / 16) pages for n encoder tokens, taken once, held to the end, given back; decoder
    pages are found by their prefix as ever."""
    manager = make_manager(200, full_spec(), cross_spec())
    prompt = list(range(40))
    for name, hit in (("a", 0), ("b", 32)):
        request = make_request(name, prompt, 50)
        assert start(manager, request, num_encoder_tokens=encoder_tokens) == hit
        for _ in range(30):
            go_on(manager, request)
        assert len(manager.get_block_ids(name)[1]) == pages
        assert len(manager.get_block_ids(name)[0]) == 5
        manager.free(request)
        manager.check_integrity()
    assert manager.usage == 0.0


def test_fits_alone():
    """Tells a request that can never grow from one that has to wait for others."""
    manager = make_manager(10)
    a, b = make_request("a", 150, 100), make_request("b", 10)
    start(manager, a)
    a.append_output_token_ids(list(range(10)))
    assert manager.fits_alone(a, 10)
    assert not manager.fits_alone(a, 11)
    manager.free(a)
    start(manager, b)
    assert manager.fits_alone(b, 150) and manager.can_ever_hold(160)
    assert not manager.fits_alone(b, 151) and not manager.can_ever_hold(161)


def test_the_tail_is_forgotten_first():
    """A prompt's beginning is found again more often than its end: when pages run short, those of
    the end go first, in every group."""
    manager = make_manager(6, full_spec(), full_spec(num_kv_heads=4))
    prompt = list(range(49))
    a = make_request("a", prompt[:48])
    start(manager, a)
    manager.free(a)
    lengths = []
    for _ in range(4):
        lengths.append(manager.get_computed_blocks(make_request("probe", prompt))[1])
        if lengths[-1]:
            manager.block_pool.get_new_blocks(2)
    assert lengths == [48, 32, 16, 0]


def test_null_pages_are_not_made_known():
    """A window's pages that a connector never fills are null: known under a hash, the null page
    would be handed to readers as content."""
    manager = make_manager(20, window_spec(16))
    prompt = list(range(80))
    a = make_request("a", prompt)
    assert manager.allocate_slots(a, 16, num_external_computed_tokens=64)
    assert [i == 0 for i in manager.get_block_ids("a")[0]] == [True] * 3 + [False] * 2
    manager.check_integrity()
    assert start(manager, make_request("b", prompt)) == 64


def test_stats_count_admissions_and_not_comebacks():
    """A preempted request finds its own pages: counted as a hit, it would make the cache look
    better the more it thrashes."""
    manager = make_manager(10)
    a = make_request("a", 40)
    manager.record_prefix_cache_stats(a, 16)
    a.num_preemptions = 1
    manager.record_prefix_cache_stats(a, 32)
    stats = manager.make_prefix_cache_stats()
    assert (stats.requests, stats.queries, stats.hits, stats.reset) == (1, 40, 16, False)
    assert manager.reset_prefix_cache()
    assert manager.make_prefix_cache_stats().reset
    assert not manager.make_prefix_cache_stats().reset
