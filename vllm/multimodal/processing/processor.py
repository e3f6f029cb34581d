# SPDX-License-Identifier: Apache-2.0
"""From a prompt with items to token ids, the model's arguments for each item, and placeholders."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from vllm.inputs.engine import (
    MultiModalEncDecInput,
    MultiModalHashes,
    MultiModalInput,
    mm_enc_dec_input,
    mm_input,
)
from vllm.multimodal.inputs import (
    MultiModalFieldConfig,
    MultiModalKwargsItems,
    MultiModalKwargsOptionalItems,
)
from vllm.multimodal.parse import MultiModalDataItems, MultiModalUUIDItems
from vllm.multimodal.processing.context import BaseProcessingInfo, TimingContext
from vllm.multimodal.processing.dummy_inputs import BaseDummyInputsBuilder
from vllm.multimodal.processing.inputs import ProcessorInputs
from vllm.multimodal.processing.prompt_updates import (
    MultiModalPromptUpdates,
    MultiModalPromptUpdatesApplyResult,
    PlaceholderFeaturesInfo,
    PromptIndex,
    PromptIndexTargets,
    PromptInsertion,
    PromptReplacement,
    PromptSeq,
    PromptTargetMatch,
    PromptUpdate,
    PromptUpdateContent,
    PromptUpdateDetails,
    PromptUpdateInfo,
    PromptUpdateTarget,
    ResolvedPromptUpdate,
    UpdateMode,
    UpdateTarget,
    apply_text_matches,
    apply_token_matches,
    find_mm_placeholders,
    full_groupby_modality,
    iter_token_matches,
    replace_token_matches,
)

if TYPE_CHECKING:
    from transformers import BatchFeature

_I = TypeVar("_I", bound=BaseProcessingInfo)

__all__ = [
    "BaseMultiModalProcessor",
    "EncDecMultiModalProcessor",
    "MultiModalProcessingInfo",
    "MultiModalPromptUpdates",
    "MultiModalPromptUpdatesApplyResult",
    "PlaceholderFeaturesInfo",
    "PromptIndex",
    "PromptIndexTargets",
    "PromptInsertion",
    "PromptReplacement",
    "PromptSeq",
    "PromptTargetMatch",
    "PromptUpdate",
    "PromptUpdateContent",
    "PromptUpdateDetails",
    "PromptUpdateInfo",
    "PromptUpdateTarget",
    "ResolvedPromptUpdate",
    "UpdateMode",
    "UpdateTarget",
    "apply_text_matches",
    "apply_token_matches",
    "find_mm_placeholders",
    "full_groupby_modality",
    "iter_token_matches",
    "replace_token_matches",
]


class MultiModalProcessingInfo(NamedTuple):
    """What the processor made of a prompt's items."""

    kwargs: MultiModalKwargsOptionalItems
    hashes: MultiModalHashes
    prompt_updates: MultiModalPromptUpdates


class BaseMultiModalProcessor(ABC, Generic[_I]):
    """Processes prompts for one model. A model's own class says which outputs of the Hugging Face
    processor belong to which item (`_get_mm_fields_config`), and what stands for an item in the
    prompt (`_get_prompt_updates`).

    Args:
        cache: must be None: what was processed once is not kept.
    """

    def __init__(
        self, info: _I, dummy_inputs: BaseDummyInputsBuilder[_I], *, cache: None = None
    ) -> None:
        if cache is not None:
            raise ValueError("a processor cache is not supported")
        self.info = info
        self.dummy_inputs = dummy_inputs

    def __call__(
        self,
        prompt: str,
        mm_items: MultiModalDataItems,
        mm_uuid_items: MultiModalUUIDItems | None = None,
        hf_processor_mm_kwargs: Mapping[str, object] | None = None,
    ) -> MultiModalInput:
        """`apply`, with its arguments one by one."""
        inputs = ProcessorInputs(prompt, mm_items, mm_uuid_items, hf_processor_mm_kwargs or {})
        return self.apply(inputs, TimingContext(enabled=False))

    # What a model says

    @abstractmethod
    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        """How each output of the Hugging Face processor is taken apart into items."""

    @abstractmethod
    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        """What stands in the prompt for each item."""

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        """Calls the Hugging Face processor on a text with all items. The output holds `input_ids`
        (1, num_tokens) of the text, and what `_get_mm_fields_config` names."""
        return self.info.ctx.call_hf_processor(
            self.info.get_hf_processor(**mm_kwargs),
            dict(text=prompt, **mm_data),
            dict(**mm_kwargs, **tok_kwargs),
        )

    def _hf_processor_applies_updates(
        self,
        prompt_text: str,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        tokenization_kwargs: Mapping[str, object],
    ) -> bool:
        """Whether `_call_hf_processor` leaves the placeholders of a text as they should be."""
        return True

    # From prompt to input

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalInput:
        """The prompt's token ids with placeholders for its items.

        Raises:
            ValueError: the data cannot be processed, or the prompt has no place for an item.
        """
        with timing_ctx.record("get_mm_hashes"):
            hashes = inputs.get_mm_hashes(self.info.model_id)
        with timing_ctx.record("apply_hf_processor"):
            token_ids, hf_inputs, is_applied = self._apply_hf_processor(inputs)
        arguments = inputs.hf_processor_mm_kwargs
        kwargs = MultiModalKwargsItems.from_hf_inputs(
            hf_inputs, self._get_mm_fields_config(hf_inputs, arguments)
        )
        counts = inputs.mm_data_items.get_all_counts()
        self._check_counts("the processor's outputs have", counts, kwargs)
        updates = self._bind_updates(
            self._get_prompt_updates(inputs.mm_data_items, arguments, kwargs), counts
        )
        with timing_ctx.record("apply_prompt_updates"):
            token_ids, placeholders = self._place(token_ids, updates, is_applied)
        self._check_counts("the prompt has placeholders for", counts, placeholders)
        ranges = {m: [info.to_range() for info in infos] for m, infos in placeholders.items()}
        return mm_input(token_ids, kwargs, hashes, ranges)

    def _apply_hf_processor(self, inputs: ProcessorInputs) -> tuple[list[int], BatchFeature, bool]:
        """The prompt's token ids, the outputs for its items, and whether the ids have their
        placeholders."""
        is_text = isinstance(inputs.prompt, str)
        items = inputs.mm_data_items
        text = inputs.prompt if is_text else self.dummy_inputs.get_dummy_text(items.get_all_counts())
        mm_data: dict[str, Any] = {}
        passthrough: dict[str, Any] = {}
        for modality_items in items.values():
            mm_data.update(modality_items.get_processor_data())
            passthrough.update(modality_items.get_passthrough_data())
        arguments, tokenization = inputs.hf_processor_mm_kwargs, inputs.tokenization_kwargs
        output = self._call_hf_processor(text, mm_data, arguments, tokenization)
        output.update(passthrough)
        token_ids = _single_row(output.pop("input_ids", None)) if is_text else list(inputs.prompt)
        is_applied = is_text and self._hf_processor_applies_updates(
            text, items, arguments, tokenization
        )
        return token_ids, output, is_applied

    def _bind_updates(
        self, updates: Sequence[PromptUpdate], counts: Mapping[str, int]
    ) -> MultiModalPromptUpdates:
        by_modality = dict(full_groupby_modality(updates))
        return {
            modality: [[u.resolve(i) for u in by_modality.get(modality, [])] for i in range(count)]
            for modality, count in counts.items()
        }

    def _place(
        self, token_ids: list[int], updates: MultiModalPromptUpdates, is_applied: bool
    ) -> tuple[list[int], Mapping[str, list[PlaceholderFeaturesInfo]]]:
        tokenizer = self.info.ctx.tokenizer
        if not is_applied:
            token_ids, _ = apply_token_matches(token_ids, updates, tokenizer)
        return token_ids, find_mm_placeholders(token_ids, updates, tokenizer)

    def _check_counts(
        self, what: str, counts: Mapping[str, int], found: Mapping[str, Sequence[Any]]
    ) -> None:
        for modality, count in counts.items():
            got = len(found[modality]) if modality in found else 0
            if got != count:
                raise ValueError(f"{what} {got} of {modality}, but {count} were given")


class EncDecMultiModalProcessor(BaseMultiModalProcessor[_I]):
    """Processes prompts whose items go to an encoder, beside a prompt for the decoder."""

    skip_decoder_start_token: bool = False
    """Take the decoder's prompt as it is, without its start token put in front."""

    @abstractmethod
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        """The prompt that holds the items' places: the encoder's."""

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        """The decoder's prompt, where the user gave but one: that."""
        return prompt

    def apply(self, inputs: ProcessorInputs, timing_ctx: TimingContext) -> MultiModalEncDecInput:
        """The encoder's input, and the decoder's prompt made of the same."""
        items = inputs.mm_data_items
        encoder = super().apply(
            ProcessorInputs(
                self.create_encoder_prompt(inputs.prompt, items),
                items,
                inputs.mm_uuid_items,
                inputs.hf_processor_mm_kwargs,
                inputs.tokenization_kwargs,
            ),
            timing_ctx,
        )
        prompt = self.create_decoder_prompt(inputs.prompt, items)
        if not isinstance(prompt, str):
            return mm_enc_dec_input(encoder, list(prompt))
        token_ids = self.decoder_token_ids(prompt) if prompt else []
        return mm_enc_dec_input(encoder, token_ids, decoder_prompt=prompt)

    def decoder_token_ids(self, prompt: str) -> list[int]:
        """A decoder's text says its special tokens itself.

        Raises:
            ValueError: it surely has more tokens than the model's context.
        """
        tokenizer = self.info.get_tokenizer()
        limit = self.info.ctx.model_config.max_model_len
        # A text of megabytes would keep a core busy only to be refused.
        if len(prompt) > limit and len(prompt) > limit * max(map(len, tokenizer.get_vocab())):
            raise ValueError(
                f"the decoder's text is too long: {len(prompt)} characters are more than this "
                f"model's maximum context length of {limit} tokens can hold"
            )
        return tokenizer.encode(prompt, add_special_tokens=False)


def _single_row(input_ids: Any) -> list[int]:
    """The one row of a batch of token ids."""
    if input_ids is None:
        return []
    rows = input_ids if isinstance(input_ids, list) else input_ids.tolist()
    if len(rows) != 1 or not isinstance(rows[0], list):
        raise ValueError(f"the processor must give input_ids of one prompt, not {rows!r:.100}")
    return rows[0]
