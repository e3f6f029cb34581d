# SPDX-License-Identifier: Apache-2.0
"""One layer's cache as a value: where every byte of every page is."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .dims import (
    Dim,
    check_dims,
    dense_strides,
    memory_order,
    merged_steps,
    page_pattern,
    plan_strides,
)
from .fields import Field, Part, state_fields, whole_content
from .overlap import Ownership, first_overlap
from .support import dtype_name, exact_div, get_dtype_size
from .tensors import strided

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class KVCacheGeometry:
    """Where the bytes of one layer's cache are. Integers only; a *page* is what the block manager
    hands out, `kernel_blocks_per_page` *blocks* of a kernel.

    dims: in the backend's logical order; strides in bytes.
    dtype: of the elements, by name.
    offset: bytes from the start of the allocation to page 0.
    fields: what the content dimension holds, in order; empty: unknown.

    Raises:
        ValueError: the dimensions do not make whole pages, elements would share bytes, or an
            element would not be aligned to its size.
    """

    dims: tuple[Dim, ...]
    dtype: str
    offset: int
    num_pages: int
    kernel_blocks_per_page: int = 1
    fields: tuple[Field, ...] = ()

    def __post_init__(self) -> None:
        check_dims(self.dims, self.itemsize)
        if self.num_pages * self.kernel_blocks_per_page != self.dim("block").size:
            raise ValueError(
                f"{self.dim('block').size} blocks are not {self.num_pages} pages of "
                f"{self.kernel_blocks_per_page}"
            )
        misaligned = [n for n in (self.offset, *(d.stride for d in self.dims)) if n % self.itemsize]
        if misaligned:
            raise ValueError(f"{misaligned[0]} bytes is no whole number of {self.dtype} elements")
        _check_fields(self)

    # Making

    @classmethod
    def plan(
        cls,
        roles: Sequence[str],
        shape: Sequence[int],
        order: Sequence[int] | None,
        dtype: str | torch.dtype,
        num_pages: int,
        *,
        offset: int = 0,
        pitch: int | None = None,
        kernel_blocks_per_page: int = 1,
        fields: tuple[Field, ...] | None = None,
    ) -> KVCacheGeometry:
        """The geometry of a cache that is to be made.

        Args:
            roles, shape: of the logical dimensions.
            order: logical dimensions from the slowest to the fastest in memory; None: as they are.
            pitch: bytes from page to page, where pages lie one after the other, with a gap if it is
                larger than a page; None: without gaps, in `order`.
            fields: see `Field`; None: all of the content is K, and V, if there is a `kv` dimension.

        Raises:
            ValueError: a page does not fit its pitch, or as the class says.
        """
        order = tuple(range(len(shape)) if order is None else order)
        if len(roles) != len(shape) or sorted(order) != list(range(len(shape))):
            raise ValueError(f"roles {roles}, shape {shape} and order {order} do not fit")
        strides = plan_strides(
            roles, shape, order, get_dtype_size(dtype), kernel_blocks_per_page, pitch
        )
        dims = tuple(map(Dim, roles, shape, strides))
        if fields is None:
            fields = whole_content(dims, dtype_name(dtype))
        return cls(dims, dtype_name(dtype), offset, num_pages, kernel_blocks_per_page, fields)

    @classmethod
    def plan_state(
        cls,
        shapes: Sequence[Sequence[int]],
        dtypes: Sequence[str | torch.dtype],
        num_pages: int,
        page_nbytes: int,
        *,
        offset: int = 0,
        pitch: int | None = None,
    ) -> KVCacheGeometry:
        """Pages of a recurrent layer: `(num_pages, 1, 1, page_nbytes)` of int8, the states one
        after the other at the start of each."""
        fields = state_fields(shapes, dtypes, page_nbytes)
        roles, shape = ("block", "head", "token", "content"), (num_pages, 1, 1, page_nbytes)
        return cls.plan(
            roles, shape, None, "int8", num_pages, offset=offset, pitch=pitch, fields=fields
        )

    @classmethod
    def observe(
        cls,
        kv_cache: torch.Tensor,
        roles: Sequence[str],
        *,
        kernel_blocks_per_page: int = 1,
        fields: tuple[Field, ...] | None = None,
    ) -> KVCacheGeometry:
        """The geometry of a cache that someone else made; its offset counts from the start of the
        tensor's storage. Sizes are not guessed from: roles must be told.

        Raises:
            ValueError: roles do not fit the tensor, or as the class says.
        """
        if len(roles) != kv_cache.dim():
            raise ValueError(
                f"a cache of shape {tuple(kv_cache.shape)} has no roles {tuple(roles)}; tell one "
                "role for each dimension"
            )
        itemsize = kv_cache.element_size()
        strides = [stride * itemsize for stride in kv_cache.stride()]
        dims = tuple(map(Dim, roles, kv_cache.shape, strides))
        num_blocks = next((d.size for d in dims if d.role == "block"), 0)
        dtype = dtype_name(kv_cache.dtype)
        return cls(
            dims,
            dtype,
            kv_cache.storage_offset() * itemsize,
            exact_div(num_blocks, kernel_blocks_per_page),
            kernel_blocks_per_page,
            whole_content(dims, dtype) if fields is None else fields,
        )

    # Asking

    @property
    def itemsize(self) -> int:
        return get_dtype_size(self.dtype)

    @property
    def roles(self) -> tuple[str, ...]:
        return tuple(dim.role for dim in self.dims)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(dim.size for dim in self.dims)

    @property
    def pitch(self) -> int:
        """Bytes from page p to page p + 1."""
        return self.dim("block").stride * self.kernel_blocks_per_page

    @property
    def payload(self) -> int:
        """Bytes of a page in use."""
        return sum(length for _, length in self._page_pattern())

    @property
    def tokens_per_page(self) -> int:
        return self.dim("token").size * self.kernel_blocks_per_page

    @property
    def is_kv_first(self) -> bool:
        """Whether all K lie before all V: a page is two halves far apart."""
        if "kv" not in self.roles:
            return False
        order = self.memory_roles
        return order.index("kv") < order.index("block")

    @property
    def memory_roles(self) -> tuple[str, ...]:
        """Roles from the slowest dimension to the fastest."""
        return tuple(self.roles[d] for d in memory_order(self.dims))

    @property
    def end(self) -> int:
        """First byte behind the cache, from the start of the allocation."""
        return self.offset + sum((d.size - 1) * d.stride for d in self.dims) + self.itemsize

    def dim(self, role: str) -> Dim:
        """The dimension of that role.

        Raises:
            ValueError: there is none.
        """
        for dim in self.dims:
            if dim.role == role:
                return dim
        raise ValueError(f"no {role} dimension: {self.describe()}")

    def page_runs(self, page: int) -> list[tuple[int, int]]:
        """Every byte that `page` owns, as (offset in the allocation, length), ascending, merged.

        Raises:
            IndexError: there is no such page.
        """
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of {self.num_pages}")
        start = self.offset + page * self.pitch
        return [(start + offset, length) for offset, length in self._page_pattern()]

    def part_runs(self, page: int) -> dict[str, list[tuple[int, int]]]:
        """The bytes of K, of V, ... in `page` by the part's name, as `page_runs` has them.

        Raises:
            IndexError: there is no such page.
        """
        if not 0 <= page < self.num_pages:
            raise IndexError(f"page {page} of {self.num_pages}")
        runs = {}
        for part in self.parts:
            size = get_dtype_size(part.dtype)
            pattern = page_pattern(part.dims, size, self.kernel_blocks_per_page)
            start = part.offset + page * self.pitch
            runs[part.name] = [(start + offset, length) for offset, length in pattern]
        return runs

    def ownership(self) -> Ownership:
        """The bytes of each page, without what they mean."""
        runs = tuple((self.offset + offset, length) for offset, length in self._page_pattern())
        return Ownership(runs, self.pitch if self.num_pages > 1 else 1, self.num_pages)

    def owns_like(self, other: KVCacheGeometry) -> bool:
        """Whether each page owns the same bytes in both."""
        return self.ownership() == other.ownership()

    def conflict(self, other: KVCacheGeometry, distinct: bool = True) -> tuple[int, int] | None:
        """The first page of this cache and page of `other` that share a byte; without `distinct`
        those of one number count too."""
        return first_overlap(self.ownership(), other.ownership(), distinct)

    def digest(self) -> str:
        """Equal where the bytes of a page, run after run, mean the same: such pages can be copied
        as they are, wherever they lie."""
        block = Dim("block", self.kernel_blocks_per_page, self.dim("block").stride)
        dims = [dim if dim.role != "block" else block for dim in self.dims]
        inner = [dims[d] for d in memory_order(dims) if dims[d].size > 1]
        words = [(dim.role, dim.size) for dim in inner], self.dtype, self.fields
        return hashlib.sha256(repr(words).encode()).hexdigest()

    def describe(self) -> str:
        """One line for logs and errors."""
        dims = ", ".join(f"{dim.role} {dim.size}" for dim in self.dims)
        strides = ", ".join(str(dim.stride) for dim in self.dims)
        runs = self._page_pattern()
        split = f" in {len(runs)} runs" if len(runs) > 1 else ""
        per_page = self.kernel_blocks_per_page
        blocks = f" ({per_page} kernel blocks each)" if per_page > 1 else ""
        return (
            f"({dims}) {self.dtype}, byte strides ({strides}), {self.num_pages} pages{blocks} of "
            f"{self.payload} bytes{split}, {self.pitch} apart, from byte {self.offset}"
        )

    @property
    def parts(self) -> tuple[Part, ...]:
        """K, V, scales, states: each as a strided array (layer), block, token, head, ..."""
        return tuple(_parts(self))

    # Other geometries of the same cache

    def layer(self, index: int) -> KVCacheGeometry:
        """One layer of a pool that has a layer dimension."""
        return self._narrow("layer", index, index + 1, keep=False)

    def restrict(
        self, *, heads: tuple[int, int] | None = None, tokens: tuple[int, int] | None = None
    ) -> KVCacheGeometry:
        """The part of each page that holds heads `[start, stop)` and tokens `[start, stop)`.

        Raises:
            ValueError: they are not all in the page, or tokens are some of several kernel blocks,
                which no single view can hold; take those block by block.
        """
        part = self if heads is None else self._narrow("head", *heads)
        return part if tokens is None else part._restrict_tokens(*tokens)

    def kv_first(self) -> KVCacheGeometry:
        """The same pages with all K before all V, each half without gaps, tails in their order."""
        return self._laid("kv", "block", pitch=None)

    def page_by_page(self, pitch: int) -> KVCacheGeometry:
        """The same pages one after the other, `pitch` bytes apart."""
        return self._laid("block", pitch=pitch)

    def _laid(self, *outer: str, pitch: int | None) -> KVCacheGeometry:
        first = [self.roles.index(role) for role in outer]
        order = [*first, *(d for d in memory_order(self.dims) if d not in first)]
        return KVCacheGeometry.plan(
            self.roles,
            self.shape,
            order,
            self.dtype,
            self.num_pages,
            offset=self.offset,
            pitch=pitch,
            kernel_blocks_per_page=self.kernel_blocks_per_page,
            fields=self.fields,
        )

    def _narrow(self, role: str, start: int, stop: int, keep: bool = True) -> KVCacheGeometry:
        dim = self.dim(role)
        if not 0 <= start < stop <= dim.size:
            raise ValueError(f"{role}s {start} to {stop} of {dim.size}")
        rest = (Dim(role, stop - start, dim.stride),) if keep else ()
        place = self.dims.index(dim)
        return dataclasses.replace(
            self,
            dims=(*self.dims[:place], *rest, *self.dims[place + 1 :]),
            offset=self.offset + start * dim.stride,
        )

    def _restrict_tokens(self, start: int, stop: int) -> KVCacheGeometry:
        if (start, stop) == (0, self.tokens_per_page):
            return self
        per_block = self.dim("token").size
        index = start // per_block
        first = index * per_block
        if stop > first + per_block and self.kernel_blocks_per_page > 1:
            raise ValueError(
                f"tokens {start} to {stop} lie in several kernel blocks of {per_block}; take them "
                "block by block"
            )
        return self._kernel_block(index)._narrow("token", start - first, stop - first)

    def _kernel_block(self, index: int) -> KVCacheGeometry:
        """The index-th kernel block of each page."""
        if not 0 <= index < self.kernel_blocks_per_page:
            raise ValueError(f"kernel block {index} of {self.kernel_blocks_per_page} in a page")
        stride = self.dim("block").stride
        block = Dim("block", self.num_pages, self.pitch)
        return dataclasses.replace(
            self,
            dims=tuple(block if dim.role == "block" else dim for dim in self.dims),
            offset=self.offset + index * stride,
            kernel_blocks_per_page=1,
        )

    # Tensors

    def view(self, raw: torch.Tensor) -> torch.Tensor:
        """The cache in the backend's logical shape, over the bytes of `raw`, which begins where the
        allocation does.

        Raises:
            ValueError: `raw` is too small.
        """
        return strided(raw, self.dtype, self.dims, self.offset)

    def page_view(self, raw: torch.Tensor) -> torch.Tensor:
        """All bytes that pages own, as int8 (num_pages, ..., bytes of a run)."""
        steps, length = merged_steps(self.dims, self.itemsize, self.kernel_blocks_per_page)
        steps = [(self.pitch, self.num_pages), *steps, (1, length)]
        dims = [Dim("content", count, stride) for stride, count in steps]
        return strided(raw, "int8", dims, self.offset)

    def key_value(self, raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V: two views (num_blocks, tokens_per_block, num_kv_heads, head_size).

        Raises:
            ValueError: the cache has no separate K and V, or it was not told where they are.
        """
        return self.part(raw, "key"), self.part(raw, "value")

    def part(self, raw: torch.Tensor, name: str) -> torch.Tensor:
        """The part of that name as a view, see `Part`.

        Raises:
            ValueError: there is none.
        """
        for part in self.parts:
            if part.name == name:
                return strided(raw, part.dtype, part.dims, part.offset)
        known = ", ".join(part.name for part in self.parts) or "none is known"
        raise ValueError(f"no part {name!r} ({known}): {self.describe()}")

    def restride_(self, kv_cache: torch.Tensor) -> None:
        """Gives a tensor of this shape and dtype these strides, in place; no byte moves.

        Raises:
            ValueError: shape or dtype differ.
        """
        if tuple(kv_cache.shape) != self.shape or dtype_name(kv_cache.dtype) != self.dtype:
            raise ValueError(f"a {kv_cache.dtype} {tuple(kv_cache.shape)} is not {self.describe()}")
        strides = [exact_div(dim.stride, self.itemsize) for dim in self.dims]
        kv_cache.as_strided_(self.shape, strides, exact_div(self.offset, self.itemsize))

    def _page_pattern(self) -> tuple[tuple[int, int], ...]:
        return page_pattern(self.dims, self.itemsize, self.kernel_blocks_per_page)


def _check_fields(geometry: KVCacheGeometry) -> None:
    if not geometry.fields:
        return
    content = geometry.dim("content")
    held = sum(field.nbytes for field in geometry.fields)
    if geometry.roles.count("content") != 1 or held != content.size * geometry.itemsize:
        names = ", ".join(f"{f.name} {f.shape} {f.dtype}" for f in geometry.fields)
        raise ValueError(f"the content does not hold {names}: {geometry.describe()}")
    for part in geometry.parts:
        size = get_dtype_size(part.dtype)
        if any(n % size for n in (part.offset, *(dim.stride for dim in part.dims))):
            raise ValueError(f"{part.name} is not aligned to {size} bytes: {geometry.describe()}")


def _parts(geometry: KVCacheGeometry) -> Iterator[Part]:
    by_role = {dim.role: dim for dim in geometry.dims}
    outer = [by_role[role] for role in ("layer", "block", "token", "head") if role in by_role]
    sides = {"": 0}
    if "kv" in by_role:
        sides = {"key": 0, "value": by_role["kv"].stride}
    for side, side_offset in sides.items():
        place = 0
        for field in geometry.fields:
            offset, inner = _place_field(geometry, field, place)
            start = geometry.offset + side_offset + offset
            yield Part(_part_name(side, field), field.dtype, start, (*outer, *inner))
            place += field.nbytes


def _place_field(
    geometry: KVCacheGeometry, field: Field, place: int
) -> tuple[int, Iterator[Dim]]:
    """Byte offset and dimensions of a field that has `place` bytes of content before it."""
    content = geometry.dim("content")
    if field.dtype == geometry.dtype:
        step, offset = content.stride, exact_div(place, geometry.itemsize) * content.stride
    elif content.stride == geometry.itemsize:
        step, offset = get_dtype_size(field.dtype), place
    else:
        raise ValueError(f"{field.name} needs dense content: {geometry.describe()}")
    strides = dense_strides(field.shape, range(len(field.shape)), step)
    return offset, (Dim("content", n, stride) for n, stride in zip(field.shape, strides))


def _part_name(side: str, field: Field) -> str:
    if not side:
        return field.name
    return side if field.name == "data" else f"{side}_{field.name}"
