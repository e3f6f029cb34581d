# SPDX-License-Identifier: Apache-2.0
"""Encoder texts as a modality of their own."""

from collections.abc import Mapping, Sequence

from transformers import BartConfig, BatchFeature
from vllm.config.multimodal import BaseDummyOptions
from vllm.inputs import MultiModalDataDict
from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems
from vllm.multimodal.parse import (
    ModalityData,
    ModalityDataItems,
    ModalityDataParser,
    MultiModalDataItems,
    MultiModalDataParser,
    ProcessorBatchItems,
)
from vllm.multimodal.processing import (
    BaseProcessingInfo,
    EncDecMultiModalProcessor,
    PromptReplacement,
    PromptUpdate,
)
from vllm.multimodal.processing.dummy_inputs import BaseDummyInputsBuilder
from vllm.utils.collection_utils import is_list_of


class TextProcessorItems(ProcessorBatchItems[str]):
    def __init__(self, data: Sequence[str]) -> None:
        super().__init__(data, "text")


class TextDataParser(MultiModalDataParser):
    def _get_subparsers(self) -> Mapping[str, ModalityDataParser]:
        return {**super()._get_subparsers(), "text": self._parse_texts}

    def _parse_texts(self, data: ModalityData[str]) -> ModalityDataItems[object, object] | None:
        if data is None:
            return None
        texts = [data] if isinstance(data, str) else data
        if not is_list_of(texts, str, check="all"):
            raise ValueError(f"text must be a string or a list of strings, not {data!r}")
        return TextProcessorItems(texts)


class BartProcessingInfo(BaseProcessingInfo):
    def get_hf_config(self) -> BartConfig:
        return self.ctx.get_hf_config(BartConfig)

    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        return {"text": 1}

    def get_data_parser(self) -> MultiModalDataParser:
        return TextDataParser()

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        return {"text": self.get_hf_config().max_position_embeddings}

    @property
    def skip_prompt_length_check(self) -> bool:
        return True


class BartDummyInputsBuilder(BaseDummyInputsBuilder[BartProcessingInfo]):
    def get_dummy_text(self, mm_counts: Mapping[str, int]) -> str:
        return ""

    def get_dummy_mm_data(
        self,
        seq_len: int,
        mm_counts: Mapping[str, int],
        mm_options: Mapping[str, BaseDummyOptions],
    ) -> MultiModalDataDict:
        words = " ".join(["a"] * (self.info.get_hf_config().max_position_embeddings // 4))
        return {"text": [words] * mm_counts.get("text", 0)}


class BartMultiModalProcessor(EncDecMultiModalProcessor[BartProcessingInfo]):
    def create_encoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        return [0]

    def create_decoder_prompt(
        self, prompt: str | list[int], mm_items: MultiModalDataItems
    ) -> str | list[int]:
        return prompt or [self.info.get_hf_config().bos_token_id]

    def _call_hf_processor(
        self,
        prompt: str,
        mm_data: Mapping[str, object],
        mm_kwargs: Mapping[str, object],
        tok_kwargs: Mapping[str, object],
    ) -> BatchFeature:
        tokenizer = self.info.get_tokenizer()
        outputs = {"input_ids": tokenizer(prompt, return_tensors="pt").input_ids}
        if texts := mm_data.get("texts"):
            outputs["text_ids"] = [
                tokenizer(text, add_special_tokens=True, return_tensors="pt").input_ids[0]
                for text in texts
            ]
        return BatchFeature(outputs)

    def _get_mm_fields_config(
        self, hf_inputs: BatchFeature, hf_processor_mm_kwargs: Mapping[str, object]
    ) -> Mapping[str, MultiModalFieldConfig]:
        return dict(text_ids=MultiModalFieldConfig.batched("text"))

    def _get_prompt_updates(
        self,
        mm_items: MultiModalDataItems,
        hf_processor_mm_kwargs: Mapping[str, object],
        out_mm_kwargs: MultiModalKwargsItems,
    ) -> Sequence[PromptUpdate]:
        def replacement(item_idx: int) -> list[int]:
            return [0] * len(out_mm_kwargs["text"][item_idx]["text_ids"].data)

        return [PromptReplacement(modality="text", target=[0], replacement=replacement)]
