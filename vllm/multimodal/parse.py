# SPDX-License-Identifier: Apache-2.0
"""Users' multimodal data, checked and as lists of items."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeAlias, TypeGuard, TypeVar

import numpy as np

from vllm.inputs.llm import ModalityData, MultiModalDataDict, MultiModalUUIDDict
from vllm.multimodal.inputs import HfImageItem
from vllm.multimodal.media.base import MediaWithBytes

if TYPE_CHECKING:
    import torch

_T = TypeVar("_T")
_I = TypeVar("_I")
_D = TypeVar("_D", bound="ModalityDataItems[Any, Any]")


class ModalityDataItems(ABC, Generic[_T, _I]):
    """The items of one modality in a prompt."""

    def __init__(self, data: _T, modality: str) -> None:
        self.data = data
        self.modality = modality

    def __repr__(self) -> str:
        return f"{type(self).__name__}(modality={self.modality!r}, len={len(self)})"

    def __len__(self) -> int:
        return self.get_count()

    def __getitem__(self, index: int) -> _I:
        return self.get(index)

    def __iter__(self) -> Iterator[_I]:
        return (self.get(index) for index in range(self.get_count()))

    @abstractmethod
    def get_count(self) -> int:
        """Number of items."""

    @abstractmethod
    def get(self, index: int) -> _I:
        """An item as the processor takes it."""

    def get_all(self) -> list[_I]:
        """All items."""
        return list(self)

    def get_item_for_hash(self, index: int) -> object:
        """What tells the item from others."""
        return self.get(index)

    def get_all_items_for_hash(self) -> list[object]:
        """`get_item_for_hash` of all."""
        return [self.get_item_for_hash(index) for index in range(self.get_count())]

    @abstractmethod
    def get_processor_data(self) -> Mapping[str, object]:
        """Keyword arguments of the Hugging Face processor."""

    @abstractmethod
    def get_passthrough_data(self) -> Mapping[str, object]:
        """Keyword arguments of the model that no processor need touch."""


class ProcessorBatchItems(ModalityDataItems[Sequence[_T], _T]):
    """Items for a Hugging Face processor, under the plural of their modality."""

    def _unwrap(self, item: _T | MediaWithBytes[_T]) -> _T:
        return item.media if isinstance(item, MediaWithBytes) else item

    def get_count(self) -> int:
        return len(self.data)

    def get(self, index: int) -> _T:
        return self._unwrap(self.data[index])

    def get_item_for_hash(self, index: int) -> _T | MediaWithBytes[_T]:
        return self.data[index]

    def get_processor_data(self) -> Mapping[str, object]:
        return {f"{self.modality}s": self.get_all()}

    def get_passthrough_data(self) -> Mapping[str, object]:
        return {}


class ImageSize(NamedTuple):
    """In pixels."""

    width: int
    height: int


class ImageProcessorItems(ProcessorBatchItems[HfImageItem]):
    """Images, decoded."""

    def __init__(self, data: Sequence[HfImageItem]) -> None:
        super().__init__(data, "image")

    def get_image_size(self, item_idx: int) -> ImageSize:
        """Width and height of an image; an array is (H, W, C), or (C, H, W) if only its first
        dimension is that of channels."""
        image = self.get(item_idx)
        if not isinstance(image, np.ndarray) and not _is_tensor(image):
            return ImageSize(*image.size)
        channels_first = image.shape[0] in (1, 3, 4) and image.shape[-1] not in (1, 3, 4)
        height, width = image.shape[1:3] if channels_first else image.shape[:2]
        return ImageSize(width, height)


class TextProcessorItems(ProcessorBatchItems[str | list[int]]):
    """Texts of a text encoder, or their token ids."""

    def __init__(self, data: Sequence[str | list[int]]) -> None:
        super().__init__(data, "text")


class MultiModalDataItems(UserDict[str, ModalityDataItems[Any, Any]]):
    """The items of a prompt, by modality."""

    def select(self, modalities: Set[str]) -> MultiModalDataItems:
        """Those of some modalities."""
        return MultiModalDataItems({name: self[name] for name in self if name in modalities})

    def get_count(self, modality: str, *, strict: bool = True) -> int:
        """Number of items of a modality.

        Raises:
            KeyError: there is none, and `strict`.
        """
        if modality not in self and not strict:
            return 0
        if modality not in self:
            raise KeyError(f"no {modality}; the prompt has: {sorted(self)}")
        return self[modality].get_count()

    def get_all_counts(self) -> Mapping[str, int]:
        """Number of items of each modality."""
        return {modality: items.get_count() for modality, items in self.items()}

    def get_items(self, modality: str, typ: type[_D] | tuple[type[_D], ...]) -> _D:
        """The items of a modality, which must be of that class.

        Raises:
            KeyError: there are none.
            TypeError: they are of another class.
        """
        if modality not in self:
            raise KeyError(f"no {modality}; the prompt has: {sorted(self)}")
        items = self[modality]
        if not isinstance(items, typ):
            raise TypeError(f"the items of {modality} are {type(items).__name__}, not {typ}")
        return items


ModalityDataParser: TypeAlias = Callable[[ModalityData[Any]], ModalityDataItems[Any, Any] | None]


class MultiModalDataParser:
    """`multi_modal_data` of a prompt to items. A subclass adds modalities in `_get_subparsers`.

    Args:
        expected_hidden_size: no effect: embeddings in place of images or text are refused.
    """

    def __init__(self, *, expected_hidden_size: int | None = None) -> None:
        self.expected_hidden_size = expected_hidden_size

    @classmethod
    def is_embeddings(cls, data: object) -> TypeGuard[torch.Tensor | list[torch.Tensor]]:
        """Whether `data` are (items, tokens, hidden) or a list of (tokens, hidden): embeddings."""
        if _is_tensor(data):
            return data.ndim == 2
        return isinstance(data, list) and bool(data) and _is_tensor(data[0]) and data[0].ndim == 2

    def _get_subparsers(self) -> Mapping[str, ModalityDataParser]:
        return {"image": self._parse_image_data, "text": self._parse_text_data}

    def parse_mm_data(self, mm_data: MultiModalDataDict) -> MultiModalDataItems:
        """The items of each modality that has any.

        Raises:
            ValueError: an unknown modality, or data that are none of it.
        """
        subparsers = self._get_subparsers()
        items = MultiModalDataItems()
        for modality, data in mm_data.items():
            if modality not in subparsers:
                raise ValueError(
                    f"modality {modality!r} is not supported; supported: {', '.join(subparsers)}"
                )
            if data is None:
                continue
            parsed = subparsers[modality](data)
            if parsed is not None and len(parsed):
                items[modality] = parsed
        return items

    def _parse_image_data(self, data: ModalityData[Any]) -> ImageProcessorItems | None:
        if self.is_embeddings(data):
            raise ValueError("embeddings in place of images are not supported: pass the images")
        if isinstance(data, (list, tuple)):
            images = list(data)
        elif isinstance(data, np.ndarray) and data.ndim == 4:
            images = list(data)
        elif _is_tensor(data) and data.ndim == 4:
            images = list(data)
        else:
            images = [data]
        for index, image in enumerate(images):
            _check_image(image, index)
        return ImageProcessorItems(images)

    def _parse_text_data(self, data: ModalityData[Any]) -> TextProcessorItems | None:
        """One text, one list of token ids, or a list of either."""
        is_list = isinstance(data, (list, tuple))
        texts = list(data) if is_list and not (data and _is_token_id(data[0])) else [data]
        for index, text in enumerate(texts):
            ids = isinstance(text, (list, tuple)) and all(map(_is_id_type, set(map(type, text))))
            if not isinstance(text, str) and not ids:
                raise ValueError(
                    f"text {index} must be a string or a list of token ids, not "
                    f"{type(text).__name__}"
                )
        return TextProcessorItems(
            [text if isinstance(text, str) else [int(t) for t in text] for text in texts]
        )


MultiModalUUIDItems: TypeAlias = dict[str, Sequence[str | None]]


def parse_mm_uuids(mm_uuids: MultiModalUUIDDict | None) -> MultiModalUUIDItems:
    """The user's own identifiers of items, a list for each modality."""
    return {
        modality: [uuids] if isinstance(uuids, str) else list(uuids)
        for modality, uuids in (mm_uuids or {}).items()
    }


def _is_token_id(value: object) -> bool:
    return _is_id_type(type(value))


def _is_id_type(kind: type) -> bool:
    return issubclass(kind, (int, np.integer)) and kind is not bool


def _is_tensor(value: object) -> TypeGuard[torch.Tensor]:
    if isinstance(value, (str, list, tuple, dict, np.ndarray)):
        return False
    import torch

    return isinstance(value, torch.Tensor)


def _check_image(image: object, index: int) -> None:
    """Raises ValueError where `image` is none, or is broken: PIL decodes only when it must."""
    from PIL.Image import Image

    media = image.media if isinstance(image, MediaWithBytes) else image
    if isinstance(media, Image):
        try:
            media.load()
        except Exception as error:  # PIL's decoders raise OSError, SyntaxError, struct.error, ...
            raise ValueError(f"image {index} cannot be decoded: {error}") from None
        if not media.width or not media.height:
            raise ValueError(f"image {index} is empty: {media.width} x {media.height} pixels")
        return
    if isinstance(media, np.ndarray) or _is_tensor(media):
        if media.ndim != 3 or 0 in media.shape:
            raise ValueError(
                f"image {index} must have three dimensions, (height, width, channels) or "
                f"(channels, height, width), not the shape {tuple(media.shape)}"
            )
        return
    raise ValueError(
        f"image {index} must be a PIL image, an array or a tensor, not {type(media).__name__}"
    )
