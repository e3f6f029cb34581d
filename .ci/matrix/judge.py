# SPDX-License-Identifier: Apache-2.0
"""Says whether caches harm each other, by writing to them and looking at the memory. Knows nothing of
layouts: strides are torch's own business.

Pages are numbered as the block manager does; a page is `rows_per_page` rows of a view's block
dimension.
"""

from dataclasses import dataclass

import torch

RIGHT, REFUSED, CRASHED, WRONG = "right", "refused", "crashed", "silently wrong"
WARNED = "wrong, with a warning"
# Both of its bytes differ from zero.
MARK = 1.0


@dataclass(frozen=True)
class Layer:
    """A layer's view of its cache. `page_bytes`: what a page of it has to hold."""

    name: str
    group: int
    view: torch.Tensor
    block_dim: int
    rows_per_page: int
    page_bytes: int

    @property
    def address(self) -> int:
        """Of its storage."""
        return self.view.untyped_storage().data_ptr()

    @property
    def memory(self) -> torch.Tensor:
        """Its storage as bytes; other layers may live there as well."""
        return torch.empty(0, dtype=torch.uint8).set_(self.view.untyped_storage())

    def owned(self, page: int) -> torch.Tensor:
        """For each byte of the storage, whether writing `page` changes it."""
        first = page * self.rows_per_page
        self.memory.zero_()
        self.view.narrow(self.block_dim, first, self.rows_per_page).fill_(MARK)
        owned = self.memory.ne(0)
        self.memory.zero_()
        return owned


def find_harm(layers: list[Layer], num_pages: int) -> str | None:
    """The first way in which one page's bytes are another's, or None.

    Layers of different groups may share page i of both: the manager gives it to one of them.
    """
    owned = {}
    for layer in layers:
        for page in range(num_pages):
            mask = owned[layer, page] = layer.owned(page)
            found = int(mask.sum())
            if found != layer.page_bytes:
                return (
                    f"page {page} of {layer.name} is {found} bytes and should be "
                    f"{layer.page_bytes}: tokens of it overwrite each other"
                )
    for (one, i), mine in owned.items():
        for (other, j), theirs in owned.items():
            if one.address != other.address or (one is other and i == j):
                continue
            if i == j and one.group != other.group:
                continue
            both = int((mine & theirs).sum())
            if both:
                return (
                    f"writing page {i} of {one.name} changes {both} bytes of page {j} of "
                    f"{other.name}"
                )
    return None


Run = tuple[int, int]  # Address, bytes.


def find_wrong_transfer(
    layers: list[Layer],
    pages: range,
    regions: list[Run],
    runs_of: "dict[tuple[int, int], list[Run]]",
) -> str | None:
    """The first page of which not exactly its bytes would be sent, or None.

    Args:
        pages: those that can be a request's.
        regions: what is registered.
        runs_of: (group, page) -> what is read for it.
    """
    for (group, page), runs in runs_of.items():
        inside = [layer for layer in layers if layer.group == group]
        wanted: dict[int, torch.Tensor] = {}
        for layer in inside:
            mask = layer.owned(page)
            wanted[layer.address] = wanted.get(layer.address, mask) | mask
        what = f"page {page} of {', '.join(layer.name for layer in inside)}"
        sent = {address: torch.zeros_like(mask) for address, mask in wanted.items()}
        for start, nbytes in runs:
            if not any(a <= start and start + nbytes <= a + n for a, n in regions):
                return f"for {what} bytes are read that are not registered"
            home = _home(sent, start, nbytes)
            if home is None:
                return f"for {what} bytes of another allocation are read"
            sent[home][start - home : start - home + nbytes] = True
        for address, mask in wanted.items():
            missing = int((mask & ~sent[address]).sum())
            foreign = int((sent[address] & ~mask).sum())
            if missing or foreign:
                return f"for {what} {missing} of its bytes are not sent and {foreign} of others are"
    if runs_of.keys() != {(layer.group, page) for layer in layers for page in pages}:
        return "not all pages can be asked for"
    return None


def _home(storages: dict[int, torch.Tensor], start: int, nbytes: int) -> int | None:
    for address, mask in storages.items():
        if address <= start and start + nbytes <= address + mask.numel():
            return address
    return None
