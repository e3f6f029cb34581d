# SPDX-License-Identifier: Apache-2.0
"""Triton's paged attention and cache kernels against float64, and the invariances they promise. In
Triton's interpreter, unless TRITON_INTERPRET=0 finds a GPU."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.paged_oracle import NAN, Requests, kernel_device, make_key_value
from vllm.triton_utils import HAS_TRITON, is_interpreted

if not HAS_TRITON:
    pytest.skip("triton is not installed: pip install vllm[triton]", allow_module_level=True)

from vllm.v1.attention.ops.triton import PagedKVCache, TileSizes, paged_attention, reshape_and_cache

DEVICE = kernel_device()
TOLERANCE = {torch.float32: 4e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
# In the interpreter tl.dot of bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16] + ([] if is_interpreted() else [torch.bfloat16])
LAYOUTS = ["blocks_first_nhd", "blocks_first_hnd", "kv_first", "fused_nhd", "fused_hnd"]
MIXED = [(1, 40), (1, 1), (5, 5), (17, 33), (2, 50), (1, 16)]


def run(
    requests: Requests, layout="kv_first", fill=NAN, tile_sizes=None, extra_rows=0, **options
) -> torch.Tensor:
    """What the kernels make of the requests, in a cache whose other slots hold `fill`."""
    query = requests.query.to(DEVICE)
    _, heads, head_size = requests.key.shape
    key, value = make_key_value(
        layout, requests.num_blocks, requests.block_size, heads, head_size, query.dtype, fill, DEVICE
    )
    cache = PagedKVCache(key, value)
    reshape_and_cache(
        requests.key.to(DEVICE), requests.value.to(DEVICE), cache, requests.slots.to(DEVICE)
    )
    out = query.new_full((len(query) + extra_rows, *query.shape[1:]), NAN)
    rows = out[: len(query)]
    scale = head_size**-0.5
    batch = requests.batch(DEVICE)
    paged_attention(query, cache, rows, batch, scale, tile_sizes=tile_sizes, **options)
    return out.cpu()


def check(requests: Requests, layout="kv_first", tile_sizes=None, **options) -> None:
    got = run(requests, layout, tile_sizes=tile_sizes, **options).double()
    difference = (got - requests.expected(**options)).abs().max().item()
    assert difference < TOLERANCE[requests.query.dtype], difference


def floats(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float32, device=DEVICE)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout, dtype):
    """The kernels know strides, not layouts; every slot that is not a key holds NaN."""
    check(Requests(MIXED, dtype=dtype), layout)


@pytest.mark.parametrize("query_len", [1, 3])
def test_lengths_around_block_and_tile_borders(query_len):
    """Off-by-one masks, with tiles of two blocks and of half a block."""
    lengths = [(query_len, n) for n in (3, 15, 16, 17, 31, 32, 33, 47, 48, 49, 65)]
    for keys in (16, 32):
        check(Requests(lengths, heads=1, group=1, head_size=16), tile_sizes=TileSizes(16, keys))
    check(Requests(lengths, heads=1, group=1, head_size=16, block_size=32), tile_sizes=TileSizes(16, 16))


@pytest.mark.parametrize("group", range(1, 9))
def test_grouped_query_heads(group):
    """Rows are padded to a power of two: those of no head must not reach the output."""
    check(Requests([(1, 20), (9, 21)], group=group, head_size=16))


@pytest.mark.parametrize("head_size", [8, 64, 80, 96, 128, 256])
def test_head_sizes(head_size):
    """Sizes that are no power of two: the neighbour in memory must not leak in."""
    check(Requests([(1, 20), (9, 21)], head_size=head_size), "fused_hnd")


@pytest.mark.parametrize("window", [1, 15, 16, 17, 32, 33, 300])
def test_sliding_window(window):
    """Windows that begin within, at and between tiles; keys before them are not even read."""
    check(Requests(MIXED, head_size=16), tile_sizes=TileSizes(16, 16), sliding_window=window)


def test_soft_cap_alibi_and_sinks():
    """Each, and all with a window, mean what their formulas say."""
    slopes, sinks = floats(0.5, 0.25, 0.125, 0.0625), floats(0.0, 2.0, -1.0, 5.0)
    requests = Requests(MIXED, head_size=16)
    check(requests, logits_soft_cap=2.0)
    check(requests, alibi_slopes=slopes)
    check(requests, sinks=sinks)
    options = dict(logits_soft_cap=2.0, alibi_slopes=slopes, sinks=sinks)
    check(requests, sliding_window=17, tile_sizes=TileSizes(16, 16), **options)


def test_cross_attention():
    """Not causal: queries see all keys of their request, as many as there are, or none."""
    lengths = [(1, 33), (1, 0), (7, 30), (3, 1), (1, 50), (2, 0)]
    check(Requests(lengths, causal=False, head_size=16), "blocks_first_nhd")
    with pytest.raises(ValueError, match="sliding window of 4 needs causal"):
        run(Requests(lengths, causal=False, head_size=16), sliding_window=4)


@pytest.mark.parametrize("window", [0, 290])
@pytest.mark.parametrize("sinks", [None, (0.5, -1.0)])
def test_decode_over_several_splits(window, sinks):
    """Keys shared out to several programs and put together again; some requests have fewer."""
    requests = Requests([(1, n) for n in (1, 255, 256, 257, 600)], heads=1, head_size=16)
    options = dict(sinks=floats(*sinks)) if sinks else {}
    check(requests, tile_sizes=TileSizes(16, 64), sliding_window=window, **options)


def test_a_long_decode_is_split_evenly():
    """More keys than all splits hold at their least: each takes more."""
    lengths = [(1, 16 * 256 + 100), (1, 5)]
    check(Requests(lengths, heads=1, group=1, head_size=16), tile_sizes=TileSizes(16, 256))


@pytest.mark.parametrize("block_size", [528, 784, 24])
def test_blocks_that_are_no_whole_tiles(block_size):
    """A tile of 32 over blocks of 528 or 784 tokens would end in the block that happens to lie
    behind; every such slot holds NaN or another request's keys."""
    lengths = [(1, block_size - 1), (1, block_size + 1), (3, 2 * block_size + 5), (2, block_size)]
    requests = Requests(lengths, heads=1, group=1, head_size=16, block_size=block_size)
    check(requests, tile_sizes=TileSizes(16, 32))


def test_stale_bytes_change_no_bit():
    """0 * NaN is NaN: what unused slots hold must not reach a sum, not even its rounding."""
    for options in ({}, {"sliding_window": 7}):
        requests = Requests(MIXED, head_size=16)
        clean = run(requests, fill=0.0, **options)
        for fill in (NAN, float("inf"), -3e4):
            assert torch.equal(run(requests, fill=fill, **options), clean)


def test_neighbours_change_no_bit():
    """A request gets the same bits alone and beside others, longer ones too."""
    lengths = [(1, 300), (1, 20), (6, 30)]
    together = Requests(lengths, head_size=16)
    out = run(together)
    for row, length in enumerate(lengths):
        alone = Requests([length], head_size=16)
        begin, end = together.starts[row], together.starts[row + 1]
        alone.query = together.query[begin:end]
        alone.keys, alone.values = [together.keys[row]], [together.values[row]]
        alone.key, alone.value = alone.keys[0], alone.values[0]
        assert torch.equal(run(alone), out[begin:end])


def test_rows_not_asked_for_stay_untouched():
    """Padding behind the batch's tokens is somebody else's."""
    requests = Requests(MIXED, head_size=16)
    out = run(requests, extra_rows=3)
    assert out[-3:].isnan().all() and not out[:-3].isnan().any()


def test_an_order_of_requests_that_the_runner_does_not_make():
    """One-token requests behind longer ones go with those."""
    check(Requests([(4, 20), (1, 33), (1, 7), (2, 2)], head_size=16))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slots_that_are_not_written(layout):
    """A slot of -1 writes nothing, and no slot is written but those given."""
    key, value = make_key_value(layout, 5, 16, 2, 24, torch.float32, 7.0, DEVICE)
    new = torch.randn(6, 4, 24, device=DEVICE)
    slots = torch.tensor([17, -1, 79, 0, -1, 40], device=DEVICE)
    reshape_and_cache(new[:, ::2], new[:, 1::2], PagedKVCache(key, value), slots)
    for cache, source in ((key, new[:, ::2]), (value, new[:, 1::2])):
        expected = torch.full((80, 2, 24), 7.0, device=DEVICE)
        expected[slots[slots >= 0]] = source[slots >= 0]
        assert torch.equal(cache.reshape(80, 2, 24), expected)


def quantised_cache(dtype: torch.dtype, num_blocks: int, scales: bool) -> PagedKVCache:
    key, value = make_key_value("blocks_first_hnd", num_blocks, 16, 2, 16, dtype, 0.0, DEVICE)
    if not scales:
        return PagedKVCache(key, value)
    return PagedKVCache(
        key, value, *torch.full((2, num_blocks, 16, 2), NAN, device=DEVICE).unbind(0)
    )


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("scales", [True, False])
def test_quantised_caches(dtype, scales):
    """What comes out is exact attention over what the cache holds, and that is within half a step
    of what was written; scales of unused slots are NaN."""
    if dtype is torch.int8 and not scales:
        pytest.skip("int8 needs scales")
    requests = Requests(MIXED, head_size=16)
    if dtype is torch.float8_e4m3fn and is_interpreted():
        # The interpreter rounds 1.99 to 1 there: only what needs no rounding is right.
        for given in (requests.key, requests.value):
            given.mul_(60).copy_(given.to(dtype).float())[..., 0] = 448.0
            given.mul_(2.0**-6)
    cache = quantised_cache(dtype, requests.num_blocks, scales)
    k_scale, v_scale = (1.0, 1.0) if scales else (2.0**-6, 2.0**-6)
    slots = requests.slots.to(DEVICE)
    key, value = requests.key.to(DEVICE), requests.value.to(DEVICE)
    reshape_and_cache(key, value, cache, slots, k_scale, v_scale)
    held = []
    for side, scale, given, unit in (
        (cache.key, cache.key_scale, key, k_scale), (cache.value, cache.value_scale, value, v_scale)
    ):  # fmt: skip
        flat = side.float().reshape(-1, 2, 16)[slots] * unit
        if scale is not None:
            flat = flat * scale.reshape(-1, 2)[slots, :, None]
        largest = given.abs().amax(-1, keepdim=True)
        step = largest / 254 if dtype is torch.int8 else largest / 16
        assert ((flat - given).abs() <= step * 1.01).all()
        held.append(flat.cpu())
    sizes = [n for _, n in requests.lengths]
    requests.keys, requests.values = held[0].split(sizes), held[1].split(sizes)
    out = torch.full_like(requests.query, NAN).to(DEVICE)
    paged_attention(
        requests.query.to(DEVICE), cache, out, requests.batch(DEVICE), 0.25,
        k_scale=k_scale, v_scale=v_scale,
    )  # fmt: skip
    assert (out.cpu().double() - requests.expected()).abs().max() < 1e-5


def test_a_row_of_zeros_and_one_too_large_are_held():
    """No division by a scale of zero; what is larger than the dtype's largest saturates, is not NaN."""
    cache = quantised_cache(torch.int8, 2, scales=True)
    zeros = torch.zeros(1, 2, 16, device=DEVICE)
    reshape_and_cache(zeros, zeros, cache, torch.tensor([3], device=DEVICE))
    assert (cache.key[0, 3] == 0).all() and (cache.key_scale[0, 3] == 0).all()
    cache = quantised_cache(torch.float8_e4m3fn, 2, scales=False)
    reshape_and_cache(zeros + 1e4, zeros - 1e4, cache, torch.tensor([3], device=DEVICE))
    assert (cache.key[0, 3].float() == 448).all() and (cache.value[0, 3].float() == -448).all()


def test_offsets_beyond_31_bits():
    """Block ids times strides do not fit 32 bits in a large cache; int8 views of few real bytes."""
    stride = 2**31 // 16 + 64
    raw = torch.empty(20 * stride, dtype=torch.int8, device="meta")
    if not is_interpreted():
        pytest.skip("needs an address space, not memory: the host's")
    import mmap

    memory = mmap.mmap(-1, raw.numel(), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
    bytes_ = torch.frombuffer(memory, dtype=torch.int8)
    blocks = bytes_.as_strided((20, 2, 16, 1, 16), (stride, 256, 16, 16, 1))
    scales = torch.zeros(2, 20, 16, 1)
    cache = PagedKVCache(blocks[:, 0], blocks[:, 1], scales[0], scales[1])
    key = torch.randn(2, 1, 16)
    reshape_and_cache(key, key, cache, torch.tensor([19 * 16 + 5, 3]))
    assert cache.key[19, 5].abs().max() == 127 and cache.key[0, 3].abs().max() == 127
    batch = Requests([(1, 6)], heads=1, group=1, head_size=16).batch(DEVICE)
    batch.block_table[:] = 19
    out = torch.zeros(1, 1, 16)
    reshape_and_cache(
        key[:1].expand(6, 1, 16), key[:1].expand(6, 1, 16), cache, torch.arange(6) + 19 * 16
    )
    paged_attention(key[1:], cache, out, batch, 0.25)
    assert (out - key[0]).abs().max() < 0.05


@pytest.mark.parametrize(
    "cache_dtype, head_size, message",
    [
        (torch.int16, 16, "supported are float32"),
        (torch.int8, 16, "needs a scale"),
        (torch.float32, 32, "does not fit"),
    ],
)
def test_what_does_not_fit_is_refused(cache_dtype, head_size, message):
    key, value = make_key_value("kv_first", 3, 16, 2, head_size, cache_dtype, 0.0, DEVICE)
    requests = Requests([(1, 4)], head_size=16)
    query = requests.query.to(DEVICE)
    with pytest.raises(ValueError, match=message):
        paged_attention(
            query, PagedKVCache(key, value), query, requests.batch(DEVICE), 1.0
        )
