# SPDX-License-Identifier: Apache-2.0
"""CPU attention and cache kernels against a float64 reference in numpy, and the invariances they
promise.
"""

from __future__ import annotations

import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vllm.v1.attention.ops.cpu import key_value_views, paged_attention, reshape_and_cache

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2, torch.float16: 2e-3}


def make_cache(num_blocks, heads, block_size, head_size, dtype, layout="HND", fill=float("nan")):
    """A fused cache (NB, H, BS, 2 * D) in the memory order asked for, every slot stale."""
    if layout == "NHD":
        raw = torch.full((num_blocks, block_size, heads, 2 * head_size), fill, dtype=dtype)
        return raw.transpose(1, 2)
    if layout == "padded":  # a page larger than its payload
        raw = torch.full((num_blocks, heads * block_size * 2 * head_size + 64), fill, dtype=dtype)
        size = 2 * head_size
        return raw.as_strided(
            (num_blocks, heads, block_size, size), (raw.stride(0), block_size * size, size, 1)
        )
    return torch.full((num_blocks, heads, block_size, 2 * head_size), fill, dtype=dtype)


class Batch:
    """Random requests with keys written to random blocks; (query length, sequence length) each."""

    def __init__(
        self,
        lengths,
        heads=2,
        group=2,
        head_size=64,
        block_size=16,
        dtype=torch.float32,
        layout="HND",
        seed=0,
        fill=float("nan"),
    ):
        gen = torch.Generator().manual_seed(seed)
        self.lengths, self.group, self.block_size = lengths, group, block_size
        pages = [-(-s // block_size) for _, s in lengths]
        order = torch.randperm(sum(pages) + 3, generator=gen).int()
        self.cache = make_cache(sum(pages) + 3, heads, block_size, head_size, dtype, layout, fill)
        self.table = torch.full((len(lengths), max(pages + [1])), 10**9, dtype=torch.int32)
        tokens = sum(q for q, _ in lengths)
        self.query = torch.randn(tokens, heads * group, head_size, generator=gen).to(dtype)
        self.starts = torch.tensor(np.cumsum([0] + [q for q, _ in lengths]), dtype=torch.int32)
        self.seq_lens = torch.tensor([s for _, s in lengths], dtype=torch.int32)
        self.keys, self.values, used = [], [], 0
        for r, (_, s) in enumerate(lengths):
            self.table[r, : pages[r]] = order[used : used + pages[r]]
            used += pages[r]
            key = torch.randn(s, heads, head_size, generator=gen).to(dtype)
            value = torch.randn(s, heads, head_size, generator=gen).to(dtype)
            position = torch.arange(s)
            slots = (
                self.table[r, position // block_size].long() * block_size + position % block_size
            )
            reshape_and_cache(key, value, *key_value_views(self.cache), slots)
            self.keys.append(key)
            self.values.append(value)

    def run(self, **options):
        out = torch.full_like(self.query, float("nan"))
        scale = options.pop("scale", self.query.shape[2] ** -0.5)
        k, v = key_value_views(self.cache)
        paged_attention(
            self.query, k, v, out, self.starts, self.seq_lens, self.table, scale, **options
        )
        return out

    def expected(
        self, causal=True, sliding_window=0, logits_soft_cap=0.0, alibi_slopes=None, sinks=None
    ):
        """Plain attention in float64, a request at a time."""
        out = np.zeros(self.query.shape)
        for r, (n, s) in enumerate(self.lengths):
            rows = slice(int(self.starts[r]), int(self.starts[r]) + n)
            q = self.query[rows].double().numpy()
            k, v = (
                np.repeat(x[r].double().numpy(), self.group, axis=1)
                for x in (self.keys, self.values)
            )
            x = np.einsum("nhd,shd->hns", q, k) * self.query.shape[2] ** -0.5
            behind = (s - n + np.arange(n))[:, None] - np.arange(s)
            if logits_soft_cap:
                x = logits_soft_cap * np.tanh(x / logits_soft_cap)
            if alibi_slopes is not None:
                x = x - alibi_slopes.double().numpy()[:, None, None] * behind
            hidden = (behind < 0) & causal
            if sliding_window:
                hidden |= behind >= sliding_window
            x[:, hidden] = -np.inf
            sink = np.full(q.shape[1], -np.inf) if sinks is None else sinks.double().numpy()
            peak = np.maximum(x.max(-1, initial=-np.inf), sink[:, None])
            peak[~np.isfinite(peak)] = 0
            e = np.exp(x - peak[..., None])
            total = e.sum(-1) + np.exp(sink[:, None] - peak)
            weights = e / np.where(total == 0, 1, total)[..., None]
            out[rows] = np.einsum("hns,shd->nhd", weights, v)
        return torch.from_numpy(out)

    def check(self, **options):
        difference = (self.run(**options).double() - self.expected(**options)).abs().max().item()
        assert difference < TOLERANCE[self.query.dtype], difference


BORDERS = [(1, n) for n in (1, 15, 16, 17, 48, 63, 64, 65, 192, 255, 256, 257, 768)]
MIXED = [(1, 300), (5, 5), (17, 33), (1, 1), (40, 600), (2, 257), (1, 64)]


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD", "padded"])
def test_decode_lengths_around_block_borders(dtype, layout):
    """Every length around a page, a block and a chunk; slots beyond hold NaN. Guards against
    off-by-one masks.
    """
    Batch(BORDERS, dtype=dtype, layout=layout).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("head_size", [8, 20, 64, 80, 96, 128, 256])
def test_head_sizes(dtype, head_size):
    """Head sizes that are no multiple of a vector take the tail paths; neighbours in memory must
    not leak in.
    """
    Batch(MIXED, dtype=dtype, head_size=head_size).check()


@pytest.mark.parametrize("group", range(1, 9))
def test_grouped_query_heads(group):
    """Each KV head serves its own query heads, whatever the number of rows left over by the
    tiles.
    """
    Batch(MIXED, group=group, heads=3).check()


@pytest.mark.parametrize("block_size", [1, 8, 16, 24, 128])
def test_tokens_per_block(block_size):
    """Pages smaller and larger than the kernel's blocks, and none of their divisors."""
    Batch(MIXED, block_size=block_size).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_options(dtype):
    """Window, soft cap, ALiBi, sinks and non-causal attention mean what their formulas say."""
    slopes, sinks = torch.tensor([0.5, 0.25, 0.125, 0.0625]), torch.tensor([0.0, 2.0, -1.0, 5.0])
    for window in (1, 16, 63, 64, 65, 300):
        Batch(MIXED, dtype=dtype).check(sliding_window=window)
    Batch(MIXED, dtype=dtype).check(logits_soft_cap=2.0)
    Batch(MIXED, dtype=dtype).check(alibi_slopes=slopes)
    Batch(MIXED, dtype=dtype).check(sinks=sinks)
    Batch([(7, 300), (3, 1), (1, 65), (2, 0)], dtype=dtype).check(causal=False)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_stale_bytes_change_no_bit(dtype):
    """0 * NaN is NaN: whatever unused slots and unused pages hold must not reach a sum, not even
    its rounding.
    """
    clean = Batch(MIXED, dtype=dtype, fill=0.0).run()
    assert torch.isfinite(clean).all()
    for fill in (float("nan"), float("inf"), -3e4):
        assert torch.equal(Batch(MIXED, dtype=dtype, fill=fill).run(), clean)


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_freed_blocks_before_the_window_are_not_read(dtype):
    """Pages that slid out of the window may be given away: their table entries are garbage, their
    bytes stale.
    """
    batch = Batch([(1, 600), (30, 700)], dtype=dtype)
    expected = batch.run(sliding_window=100)
    for r, (n, s) in enumerate(batch.lengths):
        first = s - n - 100 + 1
        batch.table[r, : first // 16] = 10**9
        position = torch.arange(first // 16 * 16, first)
        key_value_views(batch.cache)[0][batch.table[r, position // 16].long(), position % 16] = (
            float("nan")
        )
        key_value_views(batch.cache)[1][batch.table[r, position // 16].long(), position % 16] = (
            float("inf")
        )
    assert torch.equal(batch.run(sliding_window=100), expected)


def run_alone(batch: Batch, r: int, first: int, count: int, **options) -> torch.Tensor:
    """`count` query rows of request r in a batch of their own, as a later or earlier step would
    compute them.
    """
    n, s = batch.lengths[r]
    start = int(batch.starts[r]) + first
    query = batch.query[start : start + count].contiguous()
    out = torch.empty_like(query)
    length = s - n + first + count
    paged_attention(
        query,
        *key_value_views(batch.cache),
        out,
        torch.tensor([0, count], dtype=torch.int32),
        torch.tensor([length], dtype=torch.int32),
        batch.table[r : r + 1],
        query.shape[2] ** -0.5,
        **options,
    )
    return out


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("options", [{}, {"sliding_window": 77}], ids=["full", "window"])
def test_rows_do_not_depend_on_neighbours_or_chunking(dtype, options):
    """The same row decoded alone, in a chunk, or in the whole batch: equal bits. Guards prefix
    caching and preemption, where a token is computed again in other company.
    """
    batch = Batch(MIXED, dtype=dtype, group=3)
    whole = batch.run(**options)
    for r, (n, _) in enumerate(batch.lengths):
        start = int(batch.starts[r])
        for first, count in {(0, 1), (n - 1, 1), (n // 3, n - n // 3), (0, max(n // 2, 1))}:
            alone = run_alone(batch, r, first, count, **options)
            assert torch.equal(alone, whole[start + first : start + first + count]), (
                r,
                first,
                count,
            )


@pytest.mark.parametrize(
    "heads, group, head_size",
    [(2, 1, 64), (1, 2, 128), (2, 4, 64), (1, 4, 256), (1, 5, 64), (2, 3, 96), (2, 3, 32)],
)
@pytest.mark.parametrize("window", [0, 77])
def test_single_tokens_have_a_prompts_bits(heads, group, head_size, window):
    """Few rows are computed without copies of keys and values, where head sizes allow it: each sum
    must have the order that it has in a tile of many. Fault: tokens change with what is cached.
    """
    lengths = [(150, 150), (90, 333)]
    batch = Batch(lengths, dtype=torch.bfloat16, heads=heads, group=group, head_size=head_size)
    whole = batch.run(sliding_window=window)
    for r, (n, _) in enumerate(lengths):
        for first in (0, n // 2, n - 1):
            alone = run_alone(batch, r, first, 1, sliding_window=window)
            assert torch.equal(alone[0], whole[int(batch.starts[r]) + first]), (r, first)


@pytest.mark.parametrize(
    "heads, group, head_size", [(3, 3, 64), (4, 1, 128), (2, 2, 20), (1, 5, 64), (24, 4, 64), (25, 4, 64)]
)
@pytest.mark.parametrize("option", ["", "window", "alibi", "sinks", "cap"])
def test_heads_together_have_the_bits_of_heads_alone(heads, group, head_size, option):
    """A tile of a single token has all KV heads where many tokens come together. Fault: a head's
    query, slope, sink, partial result or output is another's."""
    lengths = [(1, 3 + 37 * i % 700) for i in range(40)] + [(30, 290), (1, 2600), (2, 400)]
    batch = Batch(lengths, dtype=torch.bfloat16, heads=heads, group=group, head_size=head_size)
    per_head = torch.linspace(0.01, 0.5, heads * group)
    options = {
        "": {},
        "window": {"sliding_window": 77},
        "alibi": {"alibi_slopes": per_head},
        "sinks": {"sinks": per_head},
        "cap": {"logits_soft_cap": 3.0},
    }[option]
    whole = batch.run(**options)
    assert (whole.double() - batch.expected(**options)).abs().max().item() < TOLERANCE[torch.bfloat16]
    for r in (0, 7, 20, 39, 41):
        assert torch.equal(run_alone(batch, r, 0, 1, **options)[0], whole[int(batch.starts[r])]), r


def test_threads_change_no_bit(monkeypatch):
    """One long sequence is split over threads and reduced: the order of the sum must not depend
    on who was first.
    """
    from vllm.model_executor.layers.cpu_ops import threads

    batch = Batch([(1, 2000), (1, 5), (100, 900)])
    expected = batch.run()
    for count in (1, 2, 3, 7):
        monkeypatch.setattr(threads, "_num_threads", count)
        assert torch.equal(batch.run(), expected)


def test_nan_in_visible_keys_is_not_hidden():
    """A model that produces NaN must be seen to do so; and only the request that holds it."""
    batch = Batch([(1, 40), (1, 40)])
    key_value_views(batch.cache)[0][batch.table[0, 0].long(), 3] = float("nan")
    out = batch.run()
    assert torch.isnan(out[0]).all() and torch.isfinite(out[1]).all()


def test_rows_without_keys_are_zero_and_padding_is_untouched():
    """seq_len 0 divides by no sum; rows beyond the last request belong to nobody."""
    batch = Batch([(1, 0), (0, 33), (1, 20), (0, 0)])
    batch.query = torch.cat([batch.query, batch.query])
    out = batch.run()
    assert (out[0] == 0).all() and torch.isfinite(out[1]).all() and torch.isnan(out[2:]).all()


def test_strided_query_and_output():
    """The query is a slice of the fused QKV buffer; its row stride is not heads * head_size."""
    batch = Batch(MIXED)
    expected = batch.run()
    wide = torch.full((batch.query.shape[0], 9, 64), float("nan"))
    wide[:, :4] = batch.query
    batch.query = wide[:, :4]
    out = torch.full((batch.query.shape[0], 6, 64), -1.0)
    k, v = key_value_views(batch.cache)
    paged_attention(
        batch.query, k, v, out[:, 1:5], batch.starts, batch.seq_lens, batch.table, 64**-0.5
    )
    assert (
        torch.equal(out[:, 1:5], expected) and (out[:, 0] == -1).all() and (out[:, 5] == -1).all()
    )


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 400)), min_size=1, max_size=6),
    heads=st.integers(1, 3),
    group=st.integers(1, 5),
    seed=st.integers(0, 9),
)
def test_any_ragged_batch(lengths, heads, group, seed):
    """Random mixes of prefill and decode, empty requests among them."""
    lengths = [(min(q, s), s) for q, s in lengths]
    if sum(q for q, _ in lengths):
        Batch(lengths, heads=heads, group=group, head_size=16, seed=seed).check()


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
@pytest.mark.parametrize("layout", ["HND", "NHD", "padded"])
def test_cache_write(dtype, layout):
    """Exactly the named slots change, bit for bit; negative slots are skipped; K and V come from
    a fused buffer.
    """
    tokens, heads, head_size, block_size = 70, 3, 20, 8
    qkv = torch.randn(tokens, 4 * heads, head_size).to(dtype)
    key, value = qkv[:, 2 * heads : 3 * heads], qkv[:, 3 * heads :]
    cache = make_cache(30, heads, block_size, head_size, dtype, layout, fill=-7.0)
    slots = torch.randperm(30 * block_size)[:tokens]
    slots[::7] = -1
    expected = cache.clone()
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, :, slot % block_size] = torch.cat(
                [key[token], value[token]], dim=-1
            )
    reshape_and_cache(key, value, *key_value_views(cache), slots)
    assert torch.equal(cache, expected)


def test_wrong_arguments_are_refused():
    """Each refusal names what was wrong instead of reading past a buffer."""
    batch = Batch([(1, 20)])
    k, v = key_value_views(batch.cache)
    out = torch.empty_like(batch.query)
    with pytest.raises(ValueError, match="same dtype"):
        paged_attention(
            batch.query.half(), k, v, out, batch.starts, batch.seq_lens, batch.table, 1.0
        )
    with pytest.raises(ValueError, match="int32"):
        paged_attention(
            batch.query, k, v, out, batch.starts, batch.seq_lens.long(), batch.table, 1.0
        )
    with pytest.raises(ValueError, match="causal"):
        batch.run(causal=False, sliding_window=4)
    with pytest.raises(ValueError, match="no CPU kernels for float64"):
        reshape_and_cache(
            k[0].double(), v[0].double(), k.double(), v.double(), torch.zeros(16, dtype=torch.int64)
        )


NARROW = """
import sys, pytest
from vllm.model_executor.layers.cpu_ops import kernel_library
from vllm.model_executor.layers.cpu_ops.target import Target
kernel_library.host_target = lambda: Target(8, False, "x86-64-v3", "+avx2,+fma,+f16c")
names = (
    "borders or head_sizes or options or stale or chunking or rms or layer_norm or gated or rotary "
    "or gemv"
)
sys.exit(pytest.main(["-q", "-x", "-p", "no:cacheprovider", *sys.argv[1:], "-k", names]))
"""


@pytest.mark.slow
@pytest.mark.skipif(platform.machine() != "x86_64", reason="compiles for AVX2")
def test_processors_without_avx512():
    """The same kernels compiled for AVX2: 8 lanes, bfloat16 widened instead of multiplied in
    pairs.
    """
    files = [__file__, "tests/model_executor/layers/test_cpu_ops.py"]
    run = subprocess.run([sys.executable, "-c", NARROW, *files], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
