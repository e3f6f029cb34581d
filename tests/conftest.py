# SPDX-License-Identifier: Apache-2.0
"""Settings for every test, made before anything of vllm is imported."""

from __future__ import annotations

import os

from hypothesis import settings

# The engine checks its block bookkeeping whenever it is idle.
os.environ.setdefault("VLLM_DEBUG_CHECK_INTEGRITY", "1")
# No test may depend on a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# No deadlines: a busy machine is no fault. In CI the same examples each time.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile("ci", deadline=None, print_blob=True, derandomize=True)
settings.load_profile("ci" if os.getenv("CI") else "dev")
