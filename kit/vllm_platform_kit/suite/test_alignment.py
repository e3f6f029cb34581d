# SPDX-License-Identifier: Apache-2.0
"""Every two backends that the platform can select, over one allocation."""

from vllm_platform_kit.outcomes import look_at


def test_pair(kit, pair, layout):
    one, other = pair
    look_at(kit, one.backend, other.backend, layout, "refused in every case")
