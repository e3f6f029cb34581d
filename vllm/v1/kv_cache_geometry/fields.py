# SPDX-License-Identifier: Apache-2.0
"""What lies in the content of a cache: K, V, scales, a latent, states."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from .dims import Dim
from .support import dtype_name, get_dtype_size


@dataclass(frozen=True, slots=True)
class Field:
    """Elements that follow one another in the content dimension, as an array of `shape`.

    Where a cache has a `kv` dimension, its fields describe one side: `data` is K in index 0 and V
    in index 1, another name `n` is `key_n` and `value_n`.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * get_dtype_size(self.dtype)


@dataclass(frozen=True, slots=True)
class Part:
    """Where one field of every page is: a strided array of its own, `offset` bytes into the
    allocation. `dims`: (layer), block, token, head, then those of the field."""

    name: str
    dtype: str
    offset: int
    dims: tuple[Dim, ...]


def split_fields(
    head_size: int, dtype: object, *, scale_dtype: str | None = None
) -> tuple[Field, ...]:
    """Fields of one side of a cache with a `kv` dimension: `head_size` elements and, with
    `scale_dtype`, one scale for each token and head."""
    scale = (Field("scale", scale_dtype, (1,)),) if scale_dtype else ()
    return (Field("data", dtype_name(dtype), (head_size,)), *scale)


def fused_fields(
    head_size: int,
    dtype: object,
    *,
    head_size_v: int | None = None,
    scale_dtype: str | None = None,
) -> tuple[Field, ...]:
    """Fields of a fused cache: K (and its scale), then V (and its scale)."""
    name = dtype_name(dtype)
    sides = []
    for side, size in (("key", head_size), ("value", head_size_v or head_size)):
        sides.append(Field(side, name, (size,)))
        if scale_dtype:
            sides.append(Field(f"{side}_scale", scale_dtype, (1,)))
    return tuple(sides)


def latent_fields(size: int, dtype: object) -> tuple[Field, ...]:
    """MLA's single latent, of which K and V are computed."""
    return (Field("latent", dtype_name(dtype), (size,)),)


def state_fields(
    shapes: Sequence[Sequence[int]], dtypes: Sequence[object], page_nbytes: int
) -> tuple[Field, ...]:
    """States of a recurrent layer, one after the other, then padding up to `page_nbytes`; two are
    called conv and ssm."""
    names = ("conv", "ssm") if len(shapes) == 2 else [f"state_{i}" for i in range(len(shapes))]
    fields = tuple(
        Field(name, dtype_name(dtype), tuple(shape))
        for name, shape, dtype in zip(names, shapes, dtypes, strict=True)
    )
    rest = page_nbytes - sum(field.nbytes for field in fields)
    return (*fields, Field("padding", "int8", (rest,))) if rest else fields


def whole_content(dims: tuple[Dim, ...], dtype: str) -> tuple[Field, ...]:
    contents = [dim for dim in dims if dim.role == "content"]
    has_kv = any(dim.role == "kv" for dim in dims)
    return (Field("data", dtype, (contents[0].size,)),) if has_kv and len(contents) == 1 else ()
