# SPDX-License-Identifier: Apache-2.0
"""Every two backends that the platform can select, over one allocation."""

import pytest
from vllm_platform_kit.alignment import check_pair
from vllm_platform_kit.views import Unavailable


def test_pair(kit, pair, layout):
    one, other = pair
    try:
        outcome = check_pair(one.backend, other.backend, layout)
    except Unavailable as error:
        pytest.skip(str(error))
    kit.note(*outcome.notes)
    kit.draw(outcome.drawing)
    kit.report(outcome.findings)
    if not outcome.num_right:
        pytest.skip(f"refused in every case: {outcome.notes[0]}")
