# SPDX-License-Identifier: Apache-2.0
"""Memory of tensors that live for a step, where it is not recorded: kept by the process.

The C library gives large tensors back to the system when they are freed, and gets them anew, page by
page and zeroed, for the next layer.
"""

from __future__ import annotations

import ctypes

from vllm.logger import init_logger

logger = init_logger(__name__)
# glibc's malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LARGEST_TENSOR_BYTES = 256 << 20
_MOST_KEPT_BYTES = (1 << 31) - 1


def keep_freed_memory() -> bool:
    """Makes this process keep what is freed, up to 2 GiB, for the next tensors of up to 256 MiB. False:
    the C library has no such switch (another than glibc), and nothing changes.

    Call it when weights are loaded and caches are there: what those needed meanwhile is not kept.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    kept = mallopt(_M_MMAP_THRESHOLD, _LARGEST_TENSOR_BYTES) == 1
    kept = kept and mallopt(_M_TRIM_THRESHOLD, _MOST_KEPT_BYTES) == 1
    if not kept:
        logger.debug("the C library takes no advice on memory; large tensors are mapped anew")
    return kept
