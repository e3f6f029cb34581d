# SPDX-License-Identifier: Apache-2.0
"""The names that the model is served under."""

from __future__ import annotations

from vllm.config import ModelConfig
from vllm.entrypoints.openai.protocol.common import ModelCard, ModelList, RequestError


class OpenAIServingModels:
    """Knows one model by one or several names; the first is the one it answers with by itself."""

    def __init__(self, model_config: ModelConfig) -> None:
        names = model_config.served_model_name or model_config.model
        self.names = [names] if isinstance(names, str) else list(names)
        self._model_config = model_config

    def model_name(self, asked: str | None) -> str:
        """The name to answer with: the one asked for, or the first where none was.

        Raises:
            RequestError: 404, no such model.
        """
        if not asked:
            return self.names[0]
        if asked not in self.names:
            known = ", ".join(f"`{name}`" for name in self.names)
            raise RequestError(
                f"the model `{asked[:200]}` does not exist; this server has {known}",
                param="model",
                status=404,
                type="NotFoundError",
            )
        return asked

    def show_available_models(self) -> ModelList:
        """What `/v1/models` answers."""
        config = self._model_config
        return ModelList(
            data=[
                ModelCard(id=name, root=config.model, max_model_len=config.max_model_len)
                for name in self.names
            ]
        )
