# SPDX-License-Identifier: Apache-2.0
"""The multimodal inputs of a request: what a model's encoder gets, and where it belongs.

Torch-free at import. `MultiModalFeatureSpec` is what travels to the engine.
"""

from __future__ import annotations

from collections import UserDict, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import numpy as np

from vllm.multimodal.fields import (
    BaseMultiModalField,
    MultiModalBatchedField,
    MultiModalFieldConfig,
    MultiModalFieldElem,
    MultiModalFlatField,
    MultiModalSharedField,
)
from vllm.multimodal.media.base import MediaWithBytes
from vllm.multimodal.nested_tensors import (
    BatchedTensorInputs,
    NestedTensors,
    batched_tensors_equal,
    nested_tensors_equal,
)

if TYPE_CHECKING:
    import torch
    from PIL.Image import Image
    from transformers import BatchFeature

    TensorMask: TypeAlias = "torch.Tensor"
    HfImageItem: TypeAlias = "Image | np.ndarray | torch.Tensor"
else:
    # Annotations of what travels are read at run time (by msgspec); torch is not imported for them.
    TensorMask: TypeAlias = Any
    HfImageItem: TypeAlias = Any

ImageItem: TypeAlias = HfImageItem | MediaWithBytes[HfImageItem]
"""A PIL image, or an array or tensor (H, W, C) or (C, H, W)."""

__all__ = [
    "BaseMultiModalField",
    "BatchedTensorInputs",
    "HfImageItem",
    "ImageItem",
    "MultiModalBatchedField",
    "MultiModalFeatureSpec",
    "MultiModalFieldConfig",
    "MultiModalFieldElem",
    "MultiModalFlatField",
    "MultiModalKwargsItem",
    "MultiModalKwargsItems",
    "MultiModalKwargsOptionalItems",
    "MultiModalSharedField",
    "NestedTensors",
    "PlaceholderRange",
    "batched_tensors_equal",
    "nested_tensors_equal",
]


@dataclass(frozen=True)
class PlaceholderRange:
    """The tokens of a prompt that stand for one item.

    Of an encoder-decoder model's request, offset 0 and the number of encoder tokens.
    """

    offset: int
    """Index of the first in the prompt."""
    length: int
    """Number of tokens."""
    is_embed: TensorMask | None = None
    """(length,) bool: which of them get an embedding of the encoder's output. None: all."""

    @cached_property
    def embeds_cumsum(self) -> list[int] | None:
        """For each position, the number of embeddings up to and with it; None without a mask."""
        if self.is_embed is None:
            return None
        return list(accumulate(int(flag) for flag in self.is_embed.tolist()))

    def get_num_embeds(self) -> int:
        """Embeddings, that is rows of encoder output, that the range takes."""
        if self.embeds_cumsum is None:
            return self.length
        return self.embeds_cumsum[-1] if self.embeds_cumsum else 0

    def get_embeds_indices_in_range(self, start_idx: int, end_idx: int) -> tuple[int, int]:
        """The embeddings [first, end) that positions [start_idx, end_idx) of the range take."""
        if self.embeds_cumsum is None:
            return start_idx, end_idx
        before = [0, *self.embeds_cumsum]
        return before[start_idx], before[end_idx]

    def extract_embeds_range(self) -> list[tuple[int, int]]:
        """The runs of positions in the prompt that take embeddings: (first, last), both in."""
        if self.is_embed is None:
            return [(self.offset, self.offset + self.length - 1)] if self.length else []
        runs: list[tuple[int, int]] = []
        for index, flag in enumerate(self.is_embed.tolist()):
            position = self.offset + index
            if not flag:
                continue
            if runs and runs[-1][1] == position - 1:
                runs[-1] = (runs[-1][0], position)
            else:
                runs.append((position, position))
        return runs

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, PlaceholderRange):
            return NotImplemented
        if (self.offset, self.length) != (other.offset, other.length):
            return False
        if self.is_embed is None or other.is_embed is None:
            return self.is_embed is other.is_embed
        return nested_tensors_equal(self.is_embed, other.is_embed)

    def __hash__(self) -> int:
        return hash((self.offset, self.length))


class MultiModalKwargsItem(UserDict[str, MultiModalFieldElem]):
    """The keyword arguments of the model's encoder for one item."""

    @staticmethod
    def dummy(nbytes: int = 1) -> MultiModalKwargsItem:
        """An item of that size without meaning, for tests and profiling."""
        import torch

        field = MultiModalSharedField(batch_size=1)
        data = torch.empty(nbytes, dtype=torch.uint8)
        return MultiModalKwargsItem({"dummy": MultiModalFieldElem(data, field)})

    def get_data(self) -> dict[str, NestedTensors]:
        """The bare data by key."""
        return {key: elem.data for key, elem in self.items()}


_I = TypeVar("_I", MultiModalKwargsItem, MultiModalKwargsItem | None)


class MultiModalKwargsItems(UserDict[str, Sequence[_I]]):
    """Items by modality, in the order of the prompt. An item may be None where a cache has it."""

    @staticmethod
    def from_hf_inputs(
        hf_inputs: BatchFeature | Mapping[str, NestedTensors],
        config_by_key: Mapping[str, MultiModalFieldConfig],
    ) -> MultiModalKwargsItems[MultiModalKwargsItem]:
        """A processor's outputs taken apart; keys without a config are left out.

        Raises:
            ValueError: keys of one modality hold different numbers of items.
        """
        elems_by_modality: dict[str, dict[str, Sequence[MultiModalFieldElem]]] = defaultdict(dict)
        for key, config in config_by_key.items():
            if (batch := hf_inputs.get(key)) is not None:
                elems = config.build_elems(key, batch)
                if len(elems):
                    elems_by_modality[config.modality][key] = elems
        items: dict[str, list[MultiModalKwargsItem]] = {}
        for modality, elems_by_key in elems_by_modality.items():
            counts = {key: len(elems) for key, elems in elems_by_key.items()}
            if len(set(counts.values())) > 1:
                raise ValueError(f"the keys of {modality} hold different numbers of items: {counts}")
            items[modality] = [
                MultiModalKwargsItem(dict(zip(elems_by_key, row, strict=True)))
                for row in zip(*elems_by_key.values(), strict=True)
            ]
        return MultiModalKwargsItems(items)

    def __getitem__(self, modality: str) -> Sequence[_I]:
        if modality not in self.data:
            raise KeyError(f"no items of modality {modality!r}; there are: {sorted(self.data)}")
        return self.data[modality]

    def require_data(self) -> MultiModalKwargsItems[MultiModalKwargsItem]:
        """Itself, with every item there.

        Raises:
            RuntimeError: an item is None.
        """
        for modality, items in self.items():
            for index, item in enumerate(items):
                if item is None:
                    raise RuntimeError(f"the data of item {index} of {modality} is missing")
        return self

    def get_data(
        self, *, device: torch.types.Device = None, pin_memory: bool = False
    ) -> BatchedTensorInputs:
        """The keyword arguments of the model, batched over items; see `reduce_data` of a field.

        Raises:
            RuntimeError: an item is None.
        """
        elems_by_key: dict[str, list[MultiModalFieldElem]] = defaultdict(list)
        for items in self.require_data().values():
            for item in items:
                for key, elem in item.items():
                    elems_by_key[key].append(elem)
        return {
            key: elems[0].field.reduce_data(elems, device=device, pin_memory=pin_memory)
            for key, elems in elems_by_key.items()
        }


MultiModalKwargsOptionalItems: TypeAlias = (
    MultiModalKwargsItems[MultiModalKwargsItem] | MultiModalKwargsItems[MultiModalKwargsItem | None]
)


@dataclass
class MultiModalFeatureSpec:
    """One item of one request, as the engine takes it."""

    data: MultiModalKwargsItem | None
    """Arguments of the encoder. None: the receiver has them already."""
    modality: str
    identifier: str
    """Items with the same one have the same encoder output; unique over all modalities."""
    mm_position: PlaceholderRange
    mm_hash: str | None = None
    """Hash of the item as the processor's cache knows it."""

    @staticmethod
    def gather_kwargs(
        features: list[MultiModalFeatureSpec], keys: set[str]
    ) -> dict[str, list[NestedTensors]]:
        """The data of `keys`, one entry for each feature that has data.

        Raises:
            KeyError: a feature has no such key.
        """
        gathered: dict[str, list[NestedTensors]] = defaultdict(list)
        for feature in features:
            if feature.data is not None:
                for key in keys:
                    gathered[key].append(feature.data[key].data)
        return dict(gathered)
