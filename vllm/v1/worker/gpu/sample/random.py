# SPDX-License-Identifier: Apache-2.0
"""Randomness keyed by (seed, position): a draw depends on nothing else, so that a seeded request
gets the same tokens whatever runs beside it, in whichever step."""

from __future__ import annotations

import hashlib

import numpy as np

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)


def request_seed(engine_seed: int, req_id: str) -> int:
    """A seed for a request that brings none; the same if it is preempted and comes again."""
    digest = hashlib.blake2b(f"{engine_seed}:{req_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def uniform(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """Draws from [0, 1).

    seeds: (n,) uint64; positions: (n,) integers. Returns (n,) float64.
    The mixing function is SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
    generators", OOPSLA 2014), the seed mixed first so that neighbouring seeds share no stream.
    """
    with np.errstate(over="ignore"):
        state = _mix(seeds + _GOLDEN) + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
        bits = _mix(state)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * _MIX_1
    z = (z ^ (z >> np.uint64(27))) * _MIX_2
    return z ^ (z >> np.uint64(31))
