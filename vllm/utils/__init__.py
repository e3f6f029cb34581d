# SPDX-License-Identifier: Apache-2.0
"""Small helpers, a subject a file."""

from __future__ import annotations

import uuid


def random_uuid() -> str:
    """32 hexadecimal digits, new each time."""
    return uuid.uuid4().hex
