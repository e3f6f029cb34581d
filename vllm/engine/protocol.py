# SPDX-License-Identifier: Apache-2.0
"""What a server needs of an engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Iterable
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.inputs import PromptType
    from vllm.inputs.encoder_decoder import EncoderDecoderPreprocessor
    from vllm.outputs import RequestOutput
    from vllm.sampling_params import SamplingParams
    from vllm.tokenizers import TokenizerLike


class EngineClient(Protocol):
    """An engine seen from the server: `AsyncLLM`, or whatever stands in for it."""

    vllm_config: VllmConfig
    model_config: ModelConfig

    @property
    def errored(self) -> bool:
        """Whether the engine is dead."""
        ...

    @property
    def dead_error(self) -> BaseException:
        """Why it is dead."""
        ...

    def generate(
        self,
        prompt: PromptType,
        sampling_params: SamplingParams,
        request_id: str,
        *,
        priority: int = 0,
    ) -> AsyncGenerator[RequestOutput, None]:
        """The outputs of a request, as its `output_kind` asks for them. Closing the generator, or
        cancelling the task that waits for it, aborts the request.

        Raises:
            ValueError: the request can never run.
            EngineGenerateError: this request failed; others go on.
            EngineDeadError: the engine is dead.
        """
        ...

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests by id; unknown ids are ignored."""
        ...

    async def check_health(self) -> None:
        """
        Raises:
            EngineDeadError: the engine is dead.
        """
        ...

    async def reset_prefix_cache(
        self, reset_running_requests: bool = False, reset_connector: bool = False
    ) -> bool:
        """Empties the prefix cache; False if requests that run keep it in use."""
        ...

    @property
    def encoder_decoder(self) -> EncoderDecoderPreprocessor | None:
        """What processes the prompts of an encoder-decoder model; None: the model is none."""
        ...

    def get_tokenizer(self) -> TokenizerLike | None:
        """The model's tokenizer; None where none was loaded."""
        ...

    def add_death_callback(self, callback: Callable[[], None]) -> None:
        """`callback` is called once, in whatever thread, when the engine dies; at once if it is
        dead."""
        ...

    def shutdown(self, timeout: float | None = None) -> Any:
        """Ends the engine."""
        ...
