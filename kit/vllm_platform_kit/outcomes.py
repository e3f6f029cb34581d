# SPDX-License-Identifier: Apache-2.0
"""What the result of an engine's run, or of laying caches out, means for a check."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from vllm_platform_kit.alignment import check_pair
from vllm_platform_kit.backends import backend_name, head_sizes, kernel_block_sizes
from vllm_platform_kit.engine_caches import first_difference
from vllm_platform_kit.engine_jobs import GENERATING, Result
from vllm_platform_kit.findings import Finding
from vllm_platform_kit.plugin import Kit
from vllm_platform_kit.views import Unavailable


def require(result: Result, what: str) -> None:
    """Skips where there is nothing to look at: no tokens."""
    if result.status != "ran" and not result.tokens:
        pytest.skip(f"{what}; the check of its tokens says why")


def ended(result: Result, subject: str, start: str = "MODEL_START") -> list[Finding]:
    """What ended a run before all was looked at; none: nothing did. start: the code of a start that
    fails."""
    if result.status == "ran":
        return []
    if result.status == "died":
        return [Finding("MODEL_CRASH", subject, result.error)]
    if result.status != "failed":
        return [Finding(start, subject, result.told)]
    code = "MODEL_RAISES" if result.stage == GENERATING else "PROBE_RAISES"
    return [Finding(code, subject, result.told)]


def wrong_tokens(result: Result, subject: str) -> list[Finding]:
    """None: they are those of Transformers."""
    return [Finding("MODEL_TOKENS", subject, what) for what in differences(result)]


def of_block_size(result: Result, size: int) -> list[Finding]:
    """Right tokens or a clear refusal."""
    subject = f"--block-size {size}"
    if result.status == "ran":
        return [Finding("BLOCK_SIZE_TOKENS", subject, what) for what in differences(result)]
    if refuses_block_size(result):
        return []
    return [Finding("BLOCK_SIZE_UNCLEAR", subject, result.told)]


def of_declared_sizes(backend: type) -> list[Finding]:
    """The backend has a shape for each kernel block size that it lists."""
    head_size = head_sizes([backend])[0]
    findings = []
    for tokens in kernel_block_sizes([backend]):
        try:
            backend.get_kv_cache_shape(6, tokens, 2, head_size)
        except Exception as error:
            what = f"it lists {tokens}, but: {type(error).__name__}: {error}"
            findings.append(Finding("BLOCK_SIZE_DECLARED", backend_name(backend), what))
    return findings


def refuses_block_size(result: Result) -> bool:
    """On purpose, and it says what about."""
    return result.is_refusal and "block" in result.error.lower()


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
