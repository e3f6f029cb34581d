# SPDX-License-Identifier: Apache-2.0
"""Settings for every test, made before anything of vllm is imported."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
from hypothesis import settings

# The engine checks its block bookkeeping whenever it is idle.
os.environ.setdefault("VLLM_DEBUG_CHECK_INTEGRITY", "1")
# No test may depend on a model hub.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Triton's kernels run in its interpreter, on the host; on a machine with a GPU: TRITON_INTERPRET=0.
os.environ.setdefault("TRITON_INTERPRET", "1")

# No deadlines: a busy machine is no fault. In CI the same examples each time.
settings.register_profile("dev", deadline=None, print_blob=True)
settings.register_profile(
    "ci", deadline=None, print_blob=True, derandomize=True, report_multiple_bugs=False
)
settings.load_profile("ci" if os.getenv("CI") else "dev")


@pytest.fixture
def caplog_vllm(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """`caplog` for our logger, which does not hand its records on to the root logger."""
    logger = logging.getLogger("vllm")
    logger.addHandler(caplog.handler)
    yield caplog
    logger.removeHandler(caplog.handler)
