# SPDX-License-Identifier: Apache-2.0
"""How the outputs of a Hugging Face processor, batched over a prompt's items, are taken apart into
items, and how items (of several prompts) are put together again."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vllm.multimodal.nested_tensors import NestedTensors, map_tensors, nested_tensors_equal

if TYPE_CHECKING:
    import torch


@dataclass
class MultiModalFieldElem:
    """One keyword argument of one item: its data, and the field that knows how to batch it."""

    data: NestedTensors
    field: BaseMultiModalField

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, MultiModalFieldElem):
            return NotImplemented
        return self.field == other.field and nested_tensors_equal(self.data, other.data)

    __hash__ = None


@dataclass(frozen=True, kw_only=True)
class BaseMultiModalField(ABC):
    """Takes a batch apart (`build_elems`) and puts elements together (`reduce_data`)."""

    keep_on_cpu: bool = False
    """Leave the batched data where it is: it is metadata that the host reads."""

    @abstractmethod
    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> Sequence[MultiModalFieldElem]:
        """An element for each item in `data`.

        Raises:
            ValueError: `data` does not hold what the field says.
        """

    @abstractmethod
    def _reduce_data(self, batch: list[NestedTensors]) -> NestedTensors:
        """One value of the data of one or more elements."""

    def reduce_data(
        self,
        elems: list[MultiModalFieldElem],
        *,
        device: torch.types.Device = None,
        pin_memory: bool = False,
    ) -> NestedTensors:
        """The data of `elems`, all of one key, as a model takes it.

        Args:
            device: move it there, unless `keep_on_cpu`. None: leave it.
            pin_memory: pin host memory before the move, so that it need not block.

        Raises:
            ValueError: elements of different kinds of field.
        """
        kinds = {type(elem.field) for elem in elems}
        if len(kinds) != 1:
            names = ", ".join(sorted(kind.__name__ for kind in kinds)) or "none"
            raise ValueError(f"elements to batch must be of one kind of field, not of {names}")
        data = self._reduce_data([elem.data for elem in elems])
        if device is None or self.keep_on_cpu:
            return data

        def move(tensor: torch.Tensor) -> torch.Tensor:
            if pin_memory and tensor.device.type == "cpu":
                tensor = tensor.pin_memory()
            return tensor.to(device, non_blocking=pin_memory)

        return map_tensors(move, data)

    def _elems(self, batch: Iterable[NestedTensors]) -> list[MultiModalFieldElem]:
        return [MultiModalFieldElem(data, self) for data in batch]


@dataclass(frozen=True, kw_only=True)
class MultiModalBatchedField(BaseMultiModalField):
    """One entry along the first dimension for each item."""

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> Sequence[MultiModalFieldElem]:
        return self._elems(data[i] for i in range(len(data)))

    def _reduce_data(self, batch: list[NestedTensors]) -> NestedTensors:
        """Tensors of one shape and dtype stacked, else the list."""
        if _are_tensors(batch) and len({(t.shape, t.dtype) for t in batch}) == 1:
            import torch

            return torch.stack(batch)
        return batch


@dataclass(frozen=True, kw_only=True)
class MultiModalFlatField(BaseMultiModalField):
    """Items lie one behind the other along `dim`: `slices[i]` cuts item i, a slice or, for
    `dim` > 0, one for each dimension up to `dim`."""

    slices: Sequence[slice] | Sequence[Sequence[slice]]
    dim: int = 0

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> Sequence[MultiModalFieldElem]:
        if isinstance(data, (list, tuple)) and self.dim:
            raise ValueError(f"{modality} {key}: a list has no dimension {self.dim} to be cut along")
        return self._elems(
            data[cut] if isinstance(cut, slice) else data[tuple(cut)] for cut in self.slices
        )

    def _reduce_data(self, batch: list[NestedTensors]) -> NestedTensors:
        """Tensors concatenated along `dim`, or the list where other dimensions differ; lists
        concatenated."""
        if _are_tensors(batch):
            import torch

            dim = self.dim % max(batch[0].ndim, 1)
            kinds = {(t.dtype, t.shape[:dim], t.shape[dim + 1 :]) for t in batch}
            return torch.cat(batch, dim) if len(kinds) == 1 and batch[0].ndim else batch
        if all(isinstance(data, (list, tuple)) for data in batch):
            return list(itertools.chain.from_iterable(batch))
        return batch


@dataclass(frozen=True, kw_only=True)
class MultiModalSharedField(BaseMultiModalField):
    """The same data for each of `batch_size` items."""

    batch_size: int

    def build_elems(
        self, modality: str, key: str, data: NestedTensors
    ) -> Sequence[MultiModalFieldElem]:
        return self._elems([data] * self.batch_size)

    def _reduce_data(self, batch: list[NestedTensors]) -> NestedTensors:
        """The first: they are all the same."""
        return batch[0]


@dataclass(frozen=True)
class MultiModalFieldConfig:
    """The field of one key of the processor's outputs, and the modality that it belongs to."""

    field: BaseMultiModalField
    modality: str

    @staticmethod
    def batched(modality: str, *, keep_on_cpu: bool = False) -> MultiModalFieldConfig:
        """Item i is `data[i]`: `[[a], [b], [c]]` is a, b, c."""
        return MultiModalFieldConfig(MultiModalBatchedField(keep_on_cpu=keep_on_cpu), modality)

    @staticmethod
    def flat(
        modality: str,
        slices: Sequence[slice] | Sequence[Sequence[slice]],
        dim: int = 0,
        *,
        keep_on_cpu: bool = False,
    ) -> MultiModalFieldConfig:
        """Item i is `data[slices[i]]`: with slices 0:2 and 2:5, `[a, a, b, b, b]` is two items."""
        field = MultiModalFlatField(slices=slices, dim=dim, keep_on_cpu=keep_on_cpu)
        return MultiModalFieldConfig(field, modality)

    @staticmethod
    def flat_from_sizes(
        modality: str, size_per_item: torch.Tensor, dim: int = 0, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """As `flat`, with the items' sizes along `dim` (a 1D tensor or sequence of integers).

        Raises:
            ValueError: `size_per_item` is not one-dimensional.
        """
        sizes = _integers(size_per_item)
        ends = list(itertools.accumulate(sizes, initial=0))
        cuts = [slice(start, end) for start, end in itertools.pairwise(ends)]
        if dim == 0:
            return MultiModalFieldConfig.flat(modality, cuts, keep_on_cpu=keep_on_cpu)
        before = (slice(None),) * dim
        return MultiModalFieldConfig.flat(
            modality, [(*before, cut) for cut in cuts], dim, keep_on_cpu=keep_on_cpu
        )

    @staticmethod
    def shared(
        modality: str, batch_size: int, *, keep_on_cpu: bool = False
    ) -> MultiModalFieldConfig:
        """Each of `batch_size` items has all of the data."""
        field = MultiModalSharedField(batch_size=batch_size, keep_on_cpu=keep_on_cpu)
        return MultiModalFieldConfig(field, modality)

    def build_elems(self, key: str, batch: NestedTensors) -> Sequence[MultiModalFieldElem]:
        """An element for each item."""
        return self.field.build_elems(self.modality, key, batch)


def _integers(values: Any) -> list[int]:
    if not isinstance(values, (list, tuple)):
        values = values.tolist()
    if not isinstance(values, (list, tuple)) or not all(isinstance(v, int) for v in values):
        raise ValueError(f"size_per_item must be one-dimensional, of integers, not {values!r:.100}")
    return list(values)


def _are_tensors(batch: list[Any]) -> bool:
    import torch

    return all(isinstance(data, torch.Tensor) for data in batch)
