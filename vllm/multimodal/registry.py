# SPDX-License-Identifier: Apache-2.0
"""Which processor belongs to which model class."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.inputs import MultiModalInput
    from vllm.model_executor.models.interfaces import SupportsMultiModal
    from vllm.multimodal.processing import (
        BaseDummyInputsBuilder,
        BaseMultiModalProcessor,
        BaseProcessingInfo,
        InputProcessingContext,
    )
    from vllm.tokenizers import TokenizerLike

_I = TypeVar("_I", bound="BaseProcessingInfo")
_I_co = TypeVar("_I_co", bound="BaseProcessingInfo", covariant=True)
_N = TypeVar("_N", bound="type[SupportsMultiModal]")


class ProcessingInfoFactory(Protocol[_I_co]):
    """A `BaseProcessingInfo` class, or whatever makes one."""

    def __call__(self, ctx: InputProcessingContext) -> _I_co: ...


class DummyInputsBuilderFactory(Protocol[_I]):
    """A `BaseDummyInputsBuilder` class, or whatever makes one."""

    def __call__(self, info: _I) -> BaseDummyInputsBuilder[_I]: ...


class MultiModalProcessorFactory(Protocol[_I]):
    """A `BaseMultiModalProcessor` class, or whatever makes one."""

    def __call__(
        self, info: _I, dummy_inputs: BaseDummyInputsBuilder[_I], *, cache: None = None
    ) -> BaseMultiModalProcessor[_I]: ...


@dataclass(frozen=True)
class _ProcessorFactories(Generic[_I]):
    info: ProcessingInfoFactory[_I]
    processor: MultiModalProcessorFactory[_I]
    dummy_inputs: DummyInputsBuilderFactory[_I]


class MultiModalRegistry:
    """Processors by model class."""

    def __init__(self) -> None:
        self._factories: dict[type, _ProcessorFactories[Any]] = {}

    def register_processor(
        self,
        processor: MultiModalProcessorFactory[_I],
        *,
        info: ProcessingInfoFactory[_I],
        dummy_inputs: DummyInputsBuilderFactory[_I],
    ) -> Callable[[_N], _N]:
        """A decorator of a model class: its prompts are processed by `processor`. Subclasses have
        the same unless they register their own."""

        def decorate(model_cls: _N) -> _N:
            self._factories[model_cls] = _ProcessorFactories(info, processor, dummy_inputs)
            return model_cls

        return decorate

    def supports_multimodal_inputs(self, model_config: ModelConfig) -> bool:
        """Whether prompts may have items. Imports the model's class."""
        return any(cls in self._factories for cls in _model_cls(model_config).__mro__)

    def get_processing_info(self, model_config: ModelConfig) -> BaseProcessingInfo:
        """Limits and parser of the model.

        Raises:
            ValueError: its class has no processor.
        """
        from vllm.multimodal.processing.context import InputProcessingContext

        factories = self._factories_of(model_config)
        return factories.info(InputProcessingContext(model_config, None))

    def create_processor(
        self,
        model_config: ModelConfig,
        *,
        tokenizer: TokenizerLike | None = None,
        cache: None = None,
    ) -> BaseMultiModalProcessor[BaseProcessingInfo]:
        """The model's processor.

        Args:
            tokenizer: None: the prompts are token ids.

        Raises:
            ValueError: the model's class has no processor.
        """
        from vllm.multimodal.processing.context import InputProcessingContext

        factories = self._factories_of(model_config)
        info = factories.info(InputProcessingContext(model_config, tokenizer))
        return factories.processor(info, factories.dummy_inputs(info), cache=cache)

    def get_dummy_mm_inputs(
        self,
        model_config: ModelConfig,
        mm_counts: Mapping[str, int],
        *,
        cache: None = None,
        processor: BaseMultiModalProcessor | None = None,
    ) -> MultiModalInput:
        """A processed prompt with so many items of the largest size.

        Args:
            processor: None: made here, with the model's tokenizer.

        Raises:
            ValueError: the model's class has no processor, or takes no such items.
        """
        from vllm.multimodal.processing.context import TimingContext

        if processor is None:
            tokenizer = _tokenizer(model_config)
            processor = self.create_processor(model_config, tokenizer=tokenizer, cache=cache)
        for modality, count in mm_counts.items():
            processor.info.validate_num_items(modality, count)
        inputs = processor.dummy_inputs.get_dummy_processor_inputs(
            model_config.max_model_len,
            mm_counts,
            model_config.get_multimodal_config().limit_per_prompt,
        )
        return processor.apply(inputs, TimingContext(enabled=False))

    def _factories_of(self, model_config: ModelConfig) -> _ProcessorFactories[Any]:
        model_cls = _model_cls(model_config)
        for cls in model_cls.__mro__:
            if cls in self._factories:
                return self._factories[cls]
        raise ValueError(
            f"the model class {model_cls.__name__} has no processor: it takes tokens only"
        )


def _model_cls(model_config: ModelConfig) -> type:
    from vllm.model_executor.models.registry import ModelRegistry

    return ModelRegistry.resolve_model_cls(model_config.architectures, model_config)[0]


def _tokenizer(model_config: ModelConfig) -> TokenizerLike | None:
    from vllm.tokenizers import cached_get_tokenizer

    if model_config.skip_tokenizer_init:
        return None
    return cached_get_tokenizer(
        model_config.tokenizer,
        tokenizer_mode=model_config.tokenizer_mode,
        trust_remote_code=model_config.trust_remote_code,
        revision=model_config.tokenizer_revision,
    )
