# SPDX-License-Identifier: Apache-2.0
"""What a processor is given."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vllm.multimodal.hasher import MultiModalHasher

if TYPE_CHECKING:
    from vllm.inputs.engine import MultiModalHashes
    from vllm.multimodal.parse import MultiModalDataItems, MultiModalUUIDItems


@dataclass
class ProcessorInputs:
    """A prompt (text or token ids) with its items, and arguments for processor and tokenizer."""

    prompt: str | list[int]
    mm_data_items: MultiModalDataItems
    mm_uuid_items: MultiModalUUIDItems | None = None
    hf_processor_mm_kwargs: Mapping[str, object] = field(default_factory=dict)
    tokenization_kwargs: Mapping[str, object] = field(default_factory=dict)

    def get_mm_hashes(self, model_id: str) -> MultiModalHashes:
        """A hash for each item: of the model, the item and all arguments; or the user's own
        identifier, with the arguments if there are any.

        Raises:
            ValueError: there are not as many identifiers as items.
        """
        arguments = {**self.hf_processor_mm_kwargs, **self.tokenization_kwargs}
        hashes: dict[str, list[str]] = {}
        for modality, items in self.mm_data_items.items():
            uuids = (self.mm_uuid_items or {}).get(modality) or [None] * len(items)
            if len(uuids) != len(items):
                raise ValueError(
                    f"there are {len(items)} of {modality}, but {len(uuids)} multi_modal_uuids"
                )
            hashes[modality] = [
                uuid
                if uuid is not None and not arguments
                else MultiModalHasher.hash_kwargs(
                    model_id=model_id,
                    arguments=arguments,
                    **{modality: items.get_item_for_hash(i) if uuid is None else {"uuid": uuid}},
                )
                for i, uuid in enumerate(uuids)
            ]
        return hashes
