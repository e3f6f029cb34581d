# SPDX-License-Identifier: Apache-2.0
"""For how many tokens a graph of all smaller steps is recorded."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.v1.worker.gpu.sized_graphs import SizedGraphManager, _sizes_about


def recorded(refuses, max_num_batched_tokens: int = 2048) -> list[int]:
    """The sizes that are recorded, in turn; the last one is used."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(
            max_num_seqs=64, max_num_batched_tokens=max_num_batched_tokens
        ),
        compilation_config=SimpleNamespace(
            cudagraph_capture_sizes=[1, 64], cudagraph_mode_is_default=True
        ),
    )
    sizes = []

    class Manager(SizedGraphManager):
        def _record_logits(self, num_rows: int) -> None:
            raise RuntimeError("no kernel")

        def _record(self, num_tokens: int, num_reqs: int) -> None:
            assert num_reqs == min(num_tokens, 64)
            if refuses(num_tokens):
                raise RuntimeError("no kernel")
            sizes.append(num_tokens)

    manager = Manager(None, SimpleNamespace(vllm_config=config), None, [], None)
    assert manager.capture() == 0
    return sizes


@pytest.mark.parametrize(
    ("refuses", "most", "expected"),
    [
        (lambda tokens: False, 2048, [1021, 2048]),
        (lambda tokens: False, 100_000, [1021, 4093]),
        (lambda tokens: False, 1021, [1021]),
        (lambda tokens: False, 512, [509]),
        (lambda tokens: tokens > 8, 2048, [7, 8]),
        (lambda tokens: tokens % 8, 2048, []),
        (lambda tokens: tokens != 1, 2048, [1]),
        (lambda tokens: 16 % tokens, 2048, [1]),
        (lambda tokens: 42 % tokens, 2048, [7, 7]),
        (lambda tokens: True, 2048, []),
        (lambda tokens: False, 3, [1]),
    ],
)
def test_the_largest_is_recorded_whose_rows_are_tokens(refuses, most, expected):
    """Fault: kernels work on 8, 16 or 4 rows that are a table's, not the tokens', and a step of fewer
    tokens leaves out a part of them."""
    assert recorded(refuses, most) == expected


@pytest.mark.parametrize(
    ("most", "limit", "expected"),
    [
        (64, 2048, [127, 61, 31]),
        (61, 2048, [61, 31, 17]),
        (64, 100, [61, 31, 17]),
        (1, 1, [1]),
        (5000, 8192, [1021, 509, 251]),
        (6, 64, [7, 5, 1]),
    ],
)
def test_all_rows_find_room_where_they_can(most, limit, expected):
    """Fault: the largest batch is one row more than was recorded, and the slowest."""
    assert _sizes_about(most, limit)[:3] == expected
