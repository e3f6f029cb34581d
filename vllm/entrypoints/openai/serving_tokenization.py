# SPDX-License-Identifier: Apache-2.0
"""`/tokenize` and `/detokenize`: what the server's tokenizer makes of a prompt, without the engine."""

from __future__ import annotations

import asyncio

from vllm.entrypoints.openai.protocol.common import RequestError
from vllm.entrypoints.openai.protocol.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from vllm.entrypoints.openai.serving_chat import OpenAIServingChat


class OpenAIServingTokenization:
    """Handles both, with the chat handler's templates."""

    def __init__(self, chat: OpenAIServingChat) -> None:
        self._chat = chat

    async def create_tokenize(self, request: TokenizeRequest) -> TokenizeResponse:
        """The prompt's token ids; there may be more than the model's context has.

        Raises:
            RequestError: unknown model, no tokenizer, or messages that cannot be rendered.
        """
        self._chat.models.model_name(request.model)
        adds_special = request.add_special_tokens
        if request.prompt is not None:
            text = request.prompt
            ids = await self._chat.encode(text, True if adds_special is None else adds_special)
        else:
            ids = await self._chat.encode(self._chat.render(request), bool(adds_special))
        token_strs = None
        if request.return_token_strs:
            strings = self._chat.tokenizer.convert_ids_to_tokens(ids)
            token_strs = [string or "" for string in strings]
        return TokenizeResponse(
            count=len(ids),
            max_model_len=self._chat.context.max_model_len,
            tokens=ids,
            token_strs=token_strs,
        )

    async def create_detokenize(self, request: DetokenizeRequest) -> DetokenizeResponse:
        """The text of token ids, special tokens included.

        Raises:
            RequestError: unknown model, no tokenizer, or an id that the model does not have.
        """
        self._chat.models.model_name(request.model)
        tokenizer = self._chat.tokenizer
        if not request.tokens:
            return DetokenizeResponse(prompt="")
        self._chat.check_token_ids(request.tokens, param="tokens")
        try:
            text = await asyncio.to_thread(tokenizer.decode, request.tokens)
        except (IndexError, KeyError, OverflowError):
            raise RequestError("tokens holds an id that has no text", param="tokens") from None
        return DetokenizeResponse(prompt=text)
