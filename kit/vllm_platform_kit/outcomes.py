# SPDX-License-Identifier: Apache-2.0
"""What the result of an engine's run means for a check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_platform_kit.engine_caches import first_difference
from vllm_platform_kit.engine_jobs import Result


def require(result: Result, what: str) -> None:
    """Skips where there is nothing to look at."""
    if result.status != "ran":
        pytest.skip(f"{what}; the check of its tokens says why")


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
