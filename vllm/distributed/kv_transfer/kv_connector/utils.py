# SPDX-License-Identifier: Apache-2.0
"""What connectors share."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.utils.math_utils import exact_div

EngineId = str
# Page ids, a list for each KV cache group.
BlockIds = tuple[list[int], ...] | list[list[int]]


@dataclass(frozen=True)
class HeadSlice:
    """KV heads that one rank reads from a rank of a peer: `[start, stop)` on each side, counted
    within the rank's own heads."""

    remote_rank: int
    local: tuple[int, int]
    remote: tuple[int, int]


def heads_of_rank(rank: int, tp_size: int, total_num_kv_heads: int) -> tuple[int, int]:
    """The KV heads `[start, stop)` that a tensor-parallel rank holds. With fewer heads than ranks
    several ranks hold the same one.

    Raises:
        ValueError: neither divides the other.
    """
    if tp_size <= total_num_kv_heads:
        each = exact_div(total_num_kv_heads, tp_size)
        return rank * each, (rank + 1) * each
    head = rank // exact_div(tp_size, total_num_kv_heads)
    return head, head + 1


def head_slices(
    tp_rank: int, tp_size: int, remote_tp_size: int, total_num_kv_heads: int
) -> list[HeadSlice]:
    """What rank `tp_rank` reads of each rank of a peer of another size, each head once.

    Raises:
        ValueError: a size does not go with the number of heads.
    """
    start, stop = heads_of_rank(tp_rank, tp_size, total_num_kv_heads)
    slices, head = [], start
    for rank in range(remote_tp_size):
        first, last = heads_of_rank(rank, remote_tp_size, total_num_kv_heads)
        if first <= head < min(last, stop):
            end = min(last, stop)
            slices.append(HeadSlice(rank, (head - start, end - start), (head - first, end - first)))
            head = end
    return slices
