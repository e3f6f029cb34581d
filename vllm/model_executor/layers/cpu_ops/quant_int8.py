# SPDX-License-Identifier: Apache-2.0
"""The kernels of one format: a module each, so that no start compiles those it does not use."""

from __future__ import annotations

from collections.abc import Callable

from .quant_format import INT8
from .quant_kernels import build_format
from .simd import Simd


def build(simd: Simd) -> dict[str, Callable]:
    return build_format(simd, INT8)
