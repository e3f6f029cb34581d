# SPDX-License-Identifier: Apache-2.0
"""A platform plugin for a stock vLLM up to 0.28: the CPU platform, whose layers keep KV caches in the
layouts that MIXED_LAYOUTS names, `FULL,SLIDING`: of full and of sliding-window attention. Those of a
hybrid model share memory, so that a mix which vLLM does not align corrupts what it generates."""

import os


def register() -> str | None:
    return "mixed_layouts.platform.MixedPlatform" if os.environ.get("MIXED_LAYOUTS") else None
