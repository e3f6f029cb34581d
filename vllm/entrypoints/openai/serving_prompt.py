# SPDX-License-Identifier: Apache-2.0
"""A prompt between the handlers and the engine."""

from __future__ import annotations

from dataclasses import dataclass

from vllm.inputs import EncoderDecoderInput, PromptType, TokensPrompt


@dataclass(frozen=True)
class EnginePrompt:
    """A prompt ready for the engine; `text` where the client gave text.

    Of an encoder-decoder model `token_ids` are the decoder's, and `engine_input` is all of it.
    """

    token_ids: list[int]
    text: str | None = None
    engine_input: EncoderDecoderInput | None = None
    num_encoder_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Tokens that the model reads, the encoder's too."""
        return len(self.token_ids) + self.num_encoder_tokens

    def for_engine(self, cache_salt: str | None) -> PromptType:
        """As `EngineClient.generate` takes it."""
        if self.engine_input is not None:
            decoder = self.engine_input["decoder_prompt"]
            if cache_salt is None:
                return self.engine_input
            return {**self.engine_input, "decoder_prompt": {**decoder, "cache_salt": cache_salt}}
        prompt = TokensPrompt(prompt_token_ids=self.token_ids)
        if self.text is not None:
            prompt["prompt"] = self.text
        if cache_salt is not None:
            prompt["cache_salt"] = cache_salt
        return prompt
