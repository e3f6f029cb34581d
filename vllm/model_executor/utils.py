# SPDX-License-Identifier: Apache-2.0
"""Small helpers of layers and loaders."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


def set_weight_attrs(weight: torch.Tensor, weight_attrs: dict[str, Any] | None) -> None:
    """Note on a parameter how it is loaded and sharded. Raises ValueError rather than replace a
    note."""
    for key, value in (weight_attrs or {}).items():
        if key in weight.__dict__:
            raise ValueError(f"the parameter already has an attribute {key!r}")
        setattr(weight, key, value)


@contextmanager
def set_default_torch_dtype(dtype: torch.dtype) -> Iterator[None]:
    """Parameters made inside are of `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
