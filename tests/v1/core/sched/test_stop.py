# SPDX-License-Identifier: Apache-2.0
"""When a request ends by its own tokens."""

from __future__ import annotations

import pytest

from tests.v1.core.utils import EOS, make_request
from vllm.v1.core.sched.utils import append_until_stop
from vllm.v1.request import RequestStatus

STOPPED, CAPPED = RequestStatus.FINISHED_STOPPED, RequestStatus.FINISHED_LENGTH_CAPPED


@pytest.mark.parametrize(
    ("options", "tokens", "kept", "status", "reason"),
    [
        ({"ignore_eos": False}, [5, EOS, 6], 2, STOPPED, None),
        ({}, [5, EOS, 6], 3, None, None),
        ({"stop_token_ids": [7, 8]}, [5, 8, 7], 2, STOPPED, 8),
        # Inside min_tokens nothing stops; the first token after it does.
        ({"ignore_eos": False, "min_tokens": 3}, [EOS, EOS, EOS, EOS], 3, STOPPED, None),
        ({"stop_token_ids": [7], "min_tokens": 2}, [7, 5, 7], 3, STOPPED, 7),
        # A stop on the last possible token is a stop.
        ({"max_tokens": 2, "ignore_eos": False}, [5, EOS], 2, STOPPED, None),
        ({"max_tokens": 2}, [5, 6, 7], 2, CAPPED, None),
        # The model's length ends a request even inside min_tokens.
        ({"max_tokens": 99, "min_tokens": 99}, list(range(2, 30)), 10, CAPPED, None),
    ],
)
def test_stop(options: dict, tokens: list[int], kept: int, status, reason):
    """Which token is the last, how the end is called, and that tokens after it are dropped; with a
    prompt of 10 tokens and a model of 20."""
    request = make_request("a", 10, **{"max_tokens": 50, **options})
    appended, has_ended = append_until_stop(request, tokens, max_model_len=20)
    assert appended == tokens[:kept] == list(request.output_token_ids)
    assert has_ended == (status is not None)
    assert request.status == (status or RequestStatus.WAITING)
    assert request.stop_reason == reason
