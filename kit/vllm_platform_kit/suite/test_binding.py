# SPDX-License-Identifier: Apache-2.0
"""Which cache a layer gets."""

import pytest
from vllm_platform_kit import binding


@pytest.fixture
def refusal(kit):
    """The platform's, of several caches of one index; empty: it accepts them."""
    if not hasattr(kit.target.base_cls, binding.HOOK):
        pytest.skip(f"this engine has no {binding.HOOK}")
    answer = binding.ask(kit.target)
    if answer.finding:
        kit.report([answer.finding])
    if answer.refusal:
        kit.note(f"refused: {answer.refusal}")
    return answer.refusal


def test_one_cache_an_index(kit):
    kit.report(binding.check_binding(binding.ONE_AN_INDEX, ""))


@pytest.mark.parametrize("case", binding.SAME_INDEX)
def test_same_index(kit, refusal, case):
    kit.report(binding.check_binding(binding.SAME_INDEX[case], refusal))
