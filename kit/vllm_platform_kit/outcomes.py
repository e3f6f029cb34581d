# SPDX-License-Identifier: Apache-2.0
"""What the result of an engine's run, or of laying caches out, means for a check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_platform_kit.alignment import check_pair
from vllm_platform_kit.engine_caches import first_difference
from vllm_platform_kit.engine_jobs import Result
from vllm_platform_kit.plugin import Kit
from vllm_platform_kit.views import Unavailable


def require(result: Result, what: str) -> None:
    """Skips where there is nothing to look at."""
    if result.status != "ran":
        pytest.skip(f"{what}; the check of its tokens says why")


def look_at(kit: Kit, one: type, other: type, layout: str, if_none_is_right: str) -> None:
    """One backend, or two over one allocation, in one layout."""
    try:
        outcome = check_pair(one, other, layout)
    except Unavailable as error:
        pytest.skip(str(error))
    kit.note(*outcome.notes)
    kit.draw(outcome.drawing)
    kit.report(outcome.findings)
    if not outcome.num_right:
        pytest.skip(f"{if_none_is_right}: {outcome.notes[0]}")


def differences(result: Result) -> Iterator[str]:
    """The first request whose tokens are not Transformers', in words."""
    for number, (said, right) in enumerate(zip(result.tokens, result.expected)):
        if said != right:
            place = first_difference(said, right)
            yield (
                f"request {number} differs from Transformers from token {place} on: "
                f"{said[place:]}, not {right[place:]}"
            )
            return
