# SPDX-License-Identifier: Apache-2.0
"""What a processor knows of the model: config, tokenizer, Hugging Face processor, limits."""

from __future__ import annotations

import inspect
import time
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeVar

from vllm.multimodal.nested_tensors import map_tensors
from vllm.multimodal.parse import MultiModalDataItems, MultiModalDataParser

if TYPE_CHECKING:
    import torch
    from transformers import BatchFeature, PretrainedConfig, ProcessorMixin

    from vllm.config import ModelConfig
    from vllm.config.multimodal import MultiModalConfig
    from vllm.inputs import MultiModalDataDict
    from vllm.tokenizers import TokenizerLike

_T = TypeVar("_T")


@dataclass
class TimingContext:
    """Seconds by stage of processing."""

    enabled: bool = True
    stage_secs: dict[str, float] = field(default_factory=dict)

    @property
    def total_secs(self) -> float:
        """Of all stages."""
        return sum(self.stage_secs.values())

    @contextmanager
    def record(self, stage: str) -> Iterator[None]:
        """Adds the time in the block to `stage`."""
        if not self.enabled:
            yield
            return
        begin = time.perf_counter()
        try:
            yield
        finally:
            spent = time.perf_counter() - begin
            self.stage_secs[stage] = self.stage_secs.get(stage, 0.0) + spent

    def get_stats_dict(self) -> dict[str, float]:
        """Seconds by stage, and their sum."""
        return {
            **{f"{stage}_secs": secs for stage, secs in self.stage_secs.items()},
            "preprocessor_total_secs": self.total_secs,
        }


@dataclass(frozen=True)
class TokenizeParams:
    """How a prompt's text is tokenised where the request does not say."""

    add_special_tokens: bool = True

    def with_kwargs(self, **kwargs: Any) -> TokenizeParams:
        """A copy with changes.

        Raises:
            TypeError: a name that is not known.
        """
        return replace(self, **kwargs)

    def get_encode_kwargs(self) -> dict[str, Any]:
        """Arguments of the tokenizer's `encode`."""
        return {"add_special_tokens": self.add_special_tokens}


@dataclass(frozen=True)
class InputProcessingContext:
    """The model's config and tokenizer, and what is made from them."""

    model_config: ModelConfig
    tokenizer: TokenizerLike | None

    def get_tokenizer(self) -> TokenizerLike:
        """Raises ValueError if the engine was started without one."""
        if self.tokenizer is None:
            raise ValueError(
                "a text needs a tokenizer, and the engine was started with skip_tokenizer_init: "
                "pass token ids"
            )
        return self.tokenizer

    def get_hf_config(self, typ: type[Any] | tuple[type[Any], ...] | None = None, /) -> Any:
        """The model's config.

        Raises:
            TypeError: it is no `typ`.
        """
        config = self.model_config.hf_config
        if typ is not None and not isinstance(config, typ):
            raise TypeError(f"the model's config is a {type(config).__name__}, not a {typ}")
        return config

    def get_mm_config(self) -> MultiModalConfig:
        """The options for multimodal inputs."""
        return self.model_config.get_multimodal_config()

    def get_merged_mm_kwargs(self, kwargs: Mapping[str, object]) -> dict[str, object]:
        """`--mm-processor-kwargs`, under the request's own."""
        return self.get_mm_config().merge_mm_processor_kwargs(kwargs)

    def get_hf_processor(
        self, typ: type[Any] | tuple[type[Any], ...] | None = None, /, **kwargs: object
    ) -> Any:
        """The model's Hugging Face processor, or whatever of one its folder has.

        Args:
            kwargs: arguments of its constructor, over `--mm-processor-kwargs`.

        Raises:
            TypeError: it is no `typ`.
        """
        from transformers import AutoProcessor

        config = self.model_config
        source: Any = AutoProcessor
        if isinstance(typ, type):
            source = typ
        processor = source.from_pretrained(
            config.model,
            revision=config.revision,
            trust_remote_code=config.trust_remote_code,
            **self.get_merged_mm_kwargs(kwargs),
        )
        if typ is not None and not isinstance(processor, typ):
            raise TypeError(f"the model's processor is a {type(processor).__name__}, not a {typ}")
        return processor

    def init_processor(self, typ: type[_T], /, **kwargs: object) -> _T:
        """An object of a processor class, with `--mm-processor-kwargs` under `kwargs` so far as its
        constructor takes them."""
        return typ(**_accepted(typ.__init__, self.get_merged_mm_kwargs(kwargs), kwargs))

    def call_hf_processor(
        self,
        hf_processor: Callable[..., BatchFeature] | ProcessorMixin,
        data: Mapping[str, object],
        kwargs: Mapping[str, object] | None = None,
    ) -> BatchFeature:
        """Calls a processor; its outputs as torch tensors, floats in the model's dtype.

        Args:
            kwargs: further arguments of the call, over `--mm-processor-kwargs`.

        Raises:
            ValueError: the processor cannot take the data.
        """
        from transformers import BatchFeature

        arguments = self.get_merged_mm_kwargs(kwargs or {})
        try:
            output = hf_processor(**data, **arguments, return_tensors="pt")
        except Exception as error:
            name = hf_processor.__name__ if inspect.isfunction(hf_processor) else (
                type(hf_processor).__name__
            )
            raise ValueError(
                f"the processor {name} cannot take {', '.join(data)}: {error}"
            ) from error
        return BatchFeature(map_tensors(self._in_model_dtype, dict(output)))

    def _in_model_dtype(self, tensor: torch.Tensor) -> torch.Tensor:
        import torch

        if not tensor.is_floating_point():
            return tensor
        return tensor.to(getattr(torch, self.model_config.dtype))


def _accepted(
    function: Callable[..., Any], merged: Mapping[str, object], required: Mapping[str, object]
) -> dict[str, object]:
    parameters = inspect.signature(function).parameters
    if any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        return dict(merged)
    return {name: v for name, v in merged.items() if name in parameters or name in required}


class BaseProcessingInfo:
    """What a model's processor must know before it sees any data. A model's own class says at least
    `get_supported_mm_limits`."""

    def __init__(self, ctx: InputProcessingContext) -> None:
        self.ctx = ctx

    @property
    def model_id(self) -> str:
        """The model's path or name."""
        return self.ctx.model_config.model

    def get_tokenizer(self) -> TokenizerLike:
        """The model's tokenizer."""
        return self.ctx.get_tokenizer()

    def get_hf_config(self) -> PretrainedConfig:
        """The model's config."""
        return self.ctx.get_hf_config()

    def get_hf_processor(self, **kwargs: object) -> ProcessorMixin:
        """The model's Hugging Face processor."""
        return self.ctx.get_hf_processor(**kwargs)

    def get_default_tok_params(self) -> TokenizeParams:
        """How prompts are tokenised."""
        return TokenizeParams()

    @cached_property
    def default_tok_params(self) -> TokenizeParams:
        """`get_default_tok_params`, asked once."""
        return self.get_default_tok_params()

    def get_data_parser(self) -> MultiModalDataParser:
        """What makes items of users' data."""
        return MultiModalDataParser()

    @cached_property
    def data_parser(self) -> MultiModalDataParser:
        """`get_data_parser`, asked once."""
        return self.get_data_parser()

    @property
    def skip_prompt_length_check(self) -> bool:
        """Whether an encoder's prompt may be longer than `max_model_len`, which bounds the
        decoder's. The encoder's own limit is `get_mm_max_tokens_per_item`."""
        return False

    @abstractmethod
    def get_supported_mm_limits(self) -> Mapping[str, int | None]:
        """The most items of each modality in a prompt; None: any number."""
        raise NotImplementedError

    @cached_property
    def supported_mm_limits(self) -> Mapping[str, int | None]:
        """`get_supported_mm_limits`, asked once."""
        return self.get_supported_mm_limits()

    @cached_property
    def allowed_mm_limits(self) -> Mapping[str, int]:
        """The model's limits and the user's (--limit-mm-per-prompt): the smaller of both."""
        config = self.ctx.get_mm_config()
        user = {name: config.get_limit_per_prompt(name) for name in self.supported_mm_limits}
        return {
            name: user[name] if limit is None else min(limit, user[name])
            for name, limit in self.supported_mm_limits.items()
        }

    def validate_num_items(self, modality: str, num_items: int) -> None:
        """Raises ValueError where a prompt must not have so many items of a modality."""
        if modality not in self.supported_mm_limits:
            raise ValueError(
                f"the model takes no {modality}; it takes: {', '.join(self.supported_mm_limits)}"
            )
        allowed, supported = self.allowed_mm_limits[modality], self.supported_mm_limits[modality]
        if num_items <= allowed:
            return
        why = "--limit-mm-per-prompt allows" if supported is None or num_items <= supported else (
            "the model takes"
        )
        raise ValueError(f"the prompt has {num_items} of {modality}, and {why} at most {allowed}")

    def parse_mm_data(
        self, mm_data: MultiModalDataDict, *, validate: bool = True
    ) -> MultiModalDataItems:
        """Users' data as items; their number checked unless `validate` is False.

        Raises:
            ValueError: the data are wrong; says how.
        """
        if validate:
            for modality in mm_data:
                self.validate_num_items(modality, 0)
        items = self.data_parser.parse_mm_data(mm_data)
        if validate:
            for modality, found in items.items():
                self.validate_num_items(modality, len(found))
        return items

    def get_mm_max_tokens_per_item(
        self, seq_len: int, mm_counts: Mapping[str, int]
    ) -> Mapping[str, int] | None:
        """The most encoder tokens of an item of each modality; None: as many as the dummy inputs
        make."""
        return None
