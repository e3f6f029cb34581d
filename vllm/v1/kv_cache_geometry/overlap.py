# SPDX-License-Identifier: Apache-2.0
"""Which pages of two caches share bytes, without looking at each page.

Page p of a cache owns the runs `[start + p * pitch, ... + length)`. Two runs of two caches meet
where `p * pitch_a - q * pitch_b` lies in an interval: the pairs (p, q) are counted as lattice
points of a strip, in logarithmic time, whatever the pitches are.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from .support import cdiv


@dataclass(frozen=True, slots=True)
class Ownership:
    """The bytes of each page: `runs` are the (start, length) of page 0, ascending, apart."""

    runs: tuple[tuple[int, int], ...]
    pitch: int
    num_pages: int

    @property
    def end(self) -> int:
        """First byte behind the last page."""
        start, length = self.runs[-1]
        return start + length + (self.num_pages - 1) * self.pitch


@dataclass(frozen=True, slots=True)
class Strip:
    """Pairs p < num_a, q < num_b with `low <= p * pitch_a - q * pitch_b <= high`; without those
    of p == q if `distinct`."""

    num_a: int
    pitch_a: int
    num_b: int
    pitch_b: int
    low: int
    high: int
    distinct: bool

    def first(self) -> tuple[int, int] | None:
        """The pair with the smallest p, of those the one with the smallest q."""
        if self.count(self.num_a) == 0:
            return None
        low, high = 1, self.num_a
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self.count(middle) else (middle + 1, high)
        p = low - 1
        q = max(0, cdiv(p * self.pitch_a - self.high, self.pitch_b))
        return (p, q + 1) if self.distinct and p == q else (p, q)

    def count(self, num_a: int) -> int:
        """How many pairs there are with p < num_a."""
        below = self._count_up_to(num_a, self.high) - self._count_up_to(num_a, self.low - 1)
        return below - (self._count_equal(num_a) if self.distinct else 0)

    def _count_up_to(self, num_a: int, bound: int) -> int:
        """Pairs with p < num_a and `p * pitch_a - q * pitch_b <= bound`: for small p every q, for
        large p none, in between those from a slanted line upwards."""
        a, b, num_b = self.pitch_a, self.pitch_b, self.num_b
        num_full = min(max(bound // a + 1, 0), num_a)
        end = min(max((bound + (num_b - 1) * b) // a + 1, num_full), num_a)
        count = end - num_full
        skipped = floor_sum(count, b, a, num_full * a - bound + b - 1)
        return num_b * num_full + num_b * count - skipped

    def _count_equal(self, num_a: int) -> int:
        """Pairs with p == q < num_a."""
        num, step = min(num_a, self.num_b), self.pitch_a - self.pitch_b
        if step == 0:
            return num if self.low <= 0 <= self.high else 0
        low, high = (self.low, self.high) if step > 0 else (-self.high, -self.low)
        first, last = max(cdiv(low, abs(step)), 0), min(high // abs(step), num - 1)
        return max(last - first + 1, 0)


def floor_sum(n: int, m: int, a: int, b: int) -> int:
    """The sum of `(a * i + b) // m` for i in 0..n-1, in as many steps as Euclid's algorithm takes
    for a and m."""
    total = 0
    while n > 0:
        total += (n - 1) * n // 2 * (a // m) + n * (b // m)
        a, b = a % m, b % m
        top = a * n + b
        n, b = divmod(top, m)
        m, a = a, m
    return total


def first_overlap(a: Ownership, b: Ownership, distinct: bool) -> tuple[int, int] | None:
    """The first page of `a` and page of `b` that share a byte; with `distinct` of those whose
    numbers differ."""
    found = (
        Strip(
            a.num_pages,
            a.pitch,
            b.num_pages,
            b.pitch,
            start_b - start_a - length_a + 1,
            start_b - start_a + length_b - 1,
            distinct,
        ).first()
        for (start_a, length_a), (start_b, length_b) in _run_pairs(a, b)
    )
    return min((pair for pair in found if pair is not None), default=None)


def _run_pairs(a: Ownership, b: Ownership) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Pairs of runs that may meet: where the pitch is the same, those that meet modulo it."""
    if a.pitch != b.pitch:
        yield from itertools.product(a.runs, b.runs)
        return
    runs = [*a.runs, *b.runs]
    for i, j in _meeting(runs, a.pitch):
        if i < len(a.runs) <= j:
            yield runs[i], runs[j]


def candidates(ownerships: Sequence[Ownership]) -> Iterator[tuple[int, int]]:
    """Index pairs of ownerships that may share bytes, the lower first, each once."""
    by_pitch: dict[int, list[int]] = {}
    for i, ownership in enumerate(ownerships):
        by_pitch.setdefault(ownership.pitch, []).append(i)
    for one, other in itertools.combinations(by_pitch.values(), 2):
        yield from ((min(pair), max(pair)) for pair in itertools.product(one, other))
    for pitch, members in by_pitch.items():
        if len(members) > 1:
            runs = [(run, i) for i in members for run in ownerships[i].runs]
            pairs = _meeting([run for run, _ in runs], pitch)
            owners = {(runs[i][1], runs[j][1]) for i, j in pairs}
            yield from sorted((i, j) for i, j in owners if i != j)


def _meeting(runs: Sequence[tuple[int, int]], pitch: int) -> set[tuple[int, int]]:
    """Index pairs (lower first) of runs that share a byte modulo `pitch`, found in one sweep."""
    arcs = []
    for i, (start, length) in enumerate(runs):
        begin = start % pitch
        end = begin + min(length, pitch)
        arcs.append((begin, min(end, pitch), i))
        if end > pitch:
            arcs.append((0, end - pitch, i))
    arcs.sort()
    pairs: set[tuple[int, int]] = set()
    active: list[tuple[int, int]] = []
    for begin, end, i in arcs:
        active = [(until, j) for until, j in active if until > begin]
        pairs.update((min(i, j), max(i, j)) for _, j in active if i != j)
        active.append((end, i))
    return pairs
