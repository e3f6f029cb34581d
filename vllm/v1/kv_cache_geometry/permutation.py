# SPDX-License-Identifier: Apache-2.0
"""Caches of upstream's later era (0.29 and after, its RFC 42082): one logical `[L, B, H, N, C]` -
layers, blocks, heads, tokens, content - of which a group picks one of six orders in memory.

    LBHNC  each layer by itself, heads apart          BLHNC  a block of all layers together, heads apart
    LBNHC  each layer by itself, tokens whole         BLNHC  a block of all layers together, tokens whole
    LHBNC  each layer by itself, a head's blocks      BHLNC  a block, then a head of all layers
           together

A cache of either era is one geometry, so it is described, and copied part by part, into the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product

from .dims import Dim
from .fields import Field
from .geometry import KVCacheGeometry
from .support import exact_div, get_dtype_size

ROLE_OF_LETTER = {"L": "layer", "B": "block", "H": "head", "N": "token", "C": "content"}
PERMUTATIONS = ("LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC")
_LOGICAL = "LBHNC"


@dataclass(frozen=True, slots=True)
class PermutedCache:
    """A cache of that era.

    Attributes:
        order: one of `PERMUTATIONS`, from the slowest dimension in memory to the fastest.
        shape: (layers, kernel blocks, KV heads, tokens a block, content), content in elements of
            `dtype`.
        fields: what the content holds, see `Field`.
        offset: bytes before it in its allocation.
        kernel_blocks_per_page: kernel blocks that make one of the manager's pages.
        layer_stride, page_stride: bytes from layer to layer and from page to page, which upstream's
            `KVCacheTensor` calls `layer_stride` and `block_stride`; None: without gaps.

    Raises:
        ValueError: the order is none of the six.
    """

    order: str
    shape: tuple[int, int, int, int, int]
    dtype: str
    fields: tuple[Field, ...]
    offset: int = 0
    kernel_blocks_per_page: int = 1
    layer_stride: int | None = None
    page_stride: int | None = None

    def __post_init__(self) -> None:
        if self.order not in PERMUTATIONS:
            raise ValueError(f"order {self.order!r} is none of {', '.join(PERMUTATIONS)}")

    def geometry(self) -> KVCacheGeometry:
        """All layers as one geometry; `.layer(i)` is one of them.

        Raises:
            ValueError: kernel blocks do not fill pages, or the fields the content; a stride is too
                small for what lies inside it.
        """
        pages, rest = divmod(self.shape[1], self.kernel_blocks_per_page)
        if rest:
            raise ValueError(
                f"{self.shape[1]} kernel blocks do not make pages of {self.kernel_blocks_per_page}"
            )
        strides = self._strides()
        return KVCacheGeometry(
            tuple(
                Dim(ROLE_OF_LETTER[letter], size, strides[letter])
                for letter, size in zip(_LOGICAL, self.shape)
            ),
            self.dtype,
            self.offset,
            pages,
            self.kernel_blocks_per_page,
            self.fields,
        )

    def _strides(self) -> dict[str, int]:
        """Bytes, by letter; from the fastest dimension on, each spans those inside it."""
        sizes = dict(zip(_LOGICAL, self.shape))
        given = {"L": self.layer_stride, "B": self.page_stride}
        strides, step = {}, get_dtype_size(self.dtype)
        for letter in reversed(self.order):
            stride = given.get(letter)
            if stride is not None and letter == "B":
                stride = exact_div(stride, self.kernel_blocks_per_page)
            strides[letter] = step if stride is None else stride
            step = sizes[letter] * strides[letter]
        return strides

    def describe(self) -> str:
        """One line for logs and errors."""
        names = "layers", "blocks", "heads", "tokens", "content"
        shape = ", ".join(f"{name} {size}" for name, size in zip(names, self.shape))
        pool = self.geometry()
        return (
            f"{self.order} ({shape}) {self.dtype}, layers {pool.dim('layer').stride} and "
            f"{pool.num_pages} pages {pool.pitch} bytes apart, from byte {self.offset}"
        )

    @classmethod
    def of(cls, layers: Sequence[KVCacheGeometry]) -> PermutedCache:
        """What later releases call the caches of these layers, which lie in one allocation.

        Raises:
            ValueError: they call it nothing: K and V are a dimension of their own, there are gaps
                inside pages, layers are unlike or not evenly spaced, or the order is none of the six.
                The message says which.
        """
        pool = _pool(layers)
        dense = cls(
            _order(pool),
            tuple(pool.dim(ROLE_OF_LETTER[letter]).size for letter in _LOGICAL),
            pool.dtype,
            pool.fields,
            pool.offset,
            pool.kernel_blocks_per_page,
        )
        by_layer, by_page = pool.dim("layer").stride, pool.pitch
        for layer_stride, page_stride in product((None, by_layer), (None, by_page)):
            found = replace(dense, layer_stride=layer_stride, page_stride=page_stride)
            if _has_strides_of(found, pool):
                return found
        raise ValueError(f"there are gaps inside its pages: {pool.describe()}")


def _pool(layers: Sequence[KVCacheGeometry]) -> KVCacheGeometry:
    """One geometry with a layer dimension first, then block, head, token, content."""
    if not layers:
        raise ValueError("there are no layers to describe")
    first = layers[0]
    if "kv" in first.roles:
        raise ValueError(
            f"K and V are a dimension of their own, which [L, B, H, N, C] does not have: "
            f"{first.describe()}"
        )
    spacing = layers[1].offset - first.offset if len(layers) > 1 else first.end - first.offset
    for i, layer in enumerate(layers):
        same = (layer.dims, layer.dtype, layer.fields) == (first.dims, first.dtype, first.fields)
        if not same or layer.offset != first.offset + i * spacing or spacing <= 0:
            raise ValueError(
                f"layer {i} is not like the first, or not as far from the one before it as the "
                f"others: {layer.describe()}"
            )
    inner = tuple(first.dim(ROLE_OF_LETTER[letter]) for letter in _LOGICAL[1:])
    return KVCacheGeometry(
        (Dim("layer", len(layers), spacing), *inner),
        first.dtype,
        first.offset,
        first.num_pages,
        first.kernel_blocks_per_page,
        first.fields,
    )


def _order(pool: KVCacheGeometry) -> str:
    """The first of the six that memory agrees with; dimensions of size 1 may stand anywhere."""
    stride = {letter: pool.dim(role).stride for letter, role in ROLE_OF_LETTER.items()}
    size = {letter: pool.dim(role).size for letter, role in ROLE_OF_LETTER.items()}
    for order in PERMUTATIONS:
        steps = [stride[letter] for letter in order if size[letter] > 1]
        if steps == sorted(steps, reverse=True):
            return order
    raise ValueError(f"memory is in none of {', '.join(PERMUTATIONS)}: {pool.describe()}")


def _has_strides_of(cache: PermutedCache, pool: KVCacheGeometry) -> bool:
    strides = cache._strides()
    return all(
        pool.dim(role).size == 1 or pool.dim(role).stride == strides[letter]
        for letter, role in ROLE_OF_LETTER.items()
    )
