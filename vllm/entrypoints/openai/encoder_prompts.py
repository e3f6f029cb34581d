# SPDX-License-Identifier: Apache-2.0
"""Prompts of encoder-decoder models over HTTP: images fetched, texts processed, in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from vllm.entrypoints.chat_utils import text_of
from vllm.entrypoints.encoder_chat import (
    ImageSource,
    encoder_prompt,
    image_sources,
    parse_encoder_chat,
    part_types_of,
)
from vllm.entrypoints.openai.protocol.common import GenerationRequest, RequestError
from vllm.entrypoints.openai.serving_prompt import EnginePrompt
from vllm.inputs import EncoderDecoderInput, PromptType
from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor
from vllm.inputs.parse import parse_encoder_decoder_prompt
from vllm.multimodal.media.connector import MAX_CONCURRENT_MEDIA, MediaConnector
from vllm.tokenizers import TokenizerLike


class EncoderPrompts:
    """Makes prompts for the engine of what clients send."""

    def __init__(self, preprocessor: EncoderDecoderPreprocessor, media: MediaConnector) -> None:
        self._preprocessor = preprocessor
        self._media = media
        # Requests that hold images: one is large, and the processor takes its time.
        self._with_images = asyncio.Semaphore(MAX_CONCURRENT_MEDIA)

    async def of_completion(
        self, prompt: str | list[int] | list[Mapping[str, Any]], request: GenerationRequest
    ) -> EnginePrompt:
        """A prompt of `/v1/completions`: a text, token ids, or content parts.

        Raises:
            RequestError: what is wrong with it.
        """
        self._refuse_options(request)
        adds_special: bool = request.add_special_tokens
        if isinstance(prompt, str) or not isinstance(prompt[0], Mapping):
            return await self._process(prompt, adds_special, "prompt")
        types = await self._part_types()
        try:
            text = text_of(prompt, "prompt", types)
            sources = image_sources(prompt, "prompt")
        except ValueError as error:
            raise RequestError(str(error), param="prompt") from error
        return await self._process_parts(text, sources, adds_special, "prompt")

    async def of_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        request: GenerationRequest,
        tokenizer: TokenizerLike,
        **options: Any,
    ) -> EnginePrompt:
        """A conversation.

        Args:
            options: of `render_prompt`.

        Raises:
            RequestError: what is wrong with it.
        """
        self._refuse_options(request)
        types = await self._part_types()
        try:
            chat = parse_encoder_chat(messages, types, tokenizer, **options)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from error
        # A template writes the special tokens itself.
        adds_special = not chat.is_rendered
        if "add_special_tokens" in request.model_fields_set:
            adds_special = request.add_special_tokens
        return await self._process_parts(chat.text, chat.images, adds_special, "messages")

    def _refuse_options(self, request: GenerationRequest) -> None:
        for name, value in (
            ("truncate_prompt_tokens", request.truncate_prompt_tokens),
            ("echo", request.echo or None),
        ):
            if value is not None:
                raise RequestError(
                    f"{name} is not supported by encoder-decoder models", param=name
                )

    async def _part_types(self) -> tuple[str, ...]:
        # In a thread: the first time, the model's class is imported.
        return await asyncio.to_thread(part_types_of, self._preprocessor, True)

    async def _process_parts(
        self, text: str, sources: Sequence[ImageSource], adds_special: bool, param: str
    ) -> EnginePrompt:
        if not sources:
            return await self._process(encoder_prompt(text, []), adds_special, param)
        async with self._with_images:
            images = await self._fetch(sources, param)
            return await self._process(encoder_prompt(text, images), adds_special, param)

    async def _fetch(self, sources: Sequence[ImageSource], param: str) -> list[Any]:
        limit = await asyncio.to_thread(self._preprocessor.max_items, "image")
        if len(sources) > limit:
            raise RequestError(
                f"{param} has {len(sources)} images, and the model takes at most {limit}",
                param=param,
            )
        images: list[Any] = []
        for source in sources:
            try:
                images.append(await self._media.fetch_image_async(str(source.source)))
            except ValueError as error:
                raise RequestError(f"{source.place}: {error}", param=param) from error
        return images

    async def _process(self, prompt: PromptType, adds_special: bool, param: str) -> EnginePrompt:
        try:
            return await asyncio.to_thread(self._process_now, prompt, adds_special)
        except ValueError as error:
            raise RequestError(str(error), param=param) from error

    def _process_now(self, prompt: PromptType, adds_special: bool) -> EnginePrompt:
        options = {"add_special_tokens": adds_special}
        made: EncoderDecoderInput = self._preprocessor.process(
            parse_encoder_decoder_prompt(prompt), options
        )
        (feature,) = self._preprocessor.features(made)
        token_ids = made["decoder_prompt"]["prompt_token_ids"]
        return EnginePrompt(
            token_ids, engine_input=made, num_encoder_tokens=feature.mm_position.length
        )
