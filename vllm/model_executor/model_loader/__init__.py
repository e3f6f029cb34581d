# SPDX-License-Identifier: Apache-2.0
"""Loaders by load format, and `get_model`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.model_loader.base_loader import BaseModelLoader
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader
from vllm.model_executor.model_loader.gguf_loader import GGUFModelLoader
from vllm.model_executor.model_loader.utils import get_model_architecture
from vllm.transformers_utils.gguf_reader import is_gguf_file

if TYPE_CHECKING:
    from collections.abc import Callable

    from vllm.config import LoadConfig, ModelConfig, VllmConfig

__all__ = [
    "BaseModelLoader",
    "DefaultModelLoader",
    "DummyModelLoader",
    "GGUFModelLoader",
    "get_model",
    "get_model_architecture",
    "get_model_loader",
    "register_model_loader",
]

_LOADERS: dict[str, type[BaseModelLoader]] = {
    "auto": DefaultModelLoader,
    "safetensors": DefaultModelLoader,
    "gguf": GGUFModelLoader,
    "dummy": DummyModelLoader,
}


def register_model_loader(
    load_format: str,
) -> Callable[[type[BaseModelLoader]], type[BaseModelLoader]]:
    """Class decorator: serve `--load-format` of this name with an out-of-tree loader."""

    def note(cls: type[BaseModelLoader]) -> type[BaseModelLoader]:
        if not issubclass(cls, BaseModelLoader):
            raise ValueError(f"{cls.__qualname__} must be a subclass of BaseModelLoader")
        _LOADERS[load_format] = cls
        return cls

    return note


def get_model_loader(load_config: LoadConfig) -> BaseModelLoader:
    """The loader of a load format. Raises ValueError listing the formats there are."""
    loader = _LOADERS.get(load_config.load_format)
    if loader is None:
        raise ValueError(
            f"load_format {load_config.load_format!r} is not supported; supported: "
            f"{', '.join(_LOADERS)}"
        )
    return loader(load_config)


def get_model(
    *, vllm_config: VllmConfig, model_config: ModelConfig | None = None, prefix: str = ""
) -> nn.Module:
    """The model that the config names, loaded. Raises ValueError saying what is missing or
    wrong."""
    model_config = model_config or vllm_config.model_config
    load_config = vllm_config.load_config
    if load_config.load_format == "auto" and is_gguf_file(model_config.model):
        loader: BaseModelLoader = GGUFModelLoader(load_config)
    else:
        loader = get_model_loader(load_config)
    return loader.load_model(vllm_config=vllm_config, model_config=model_config, prefix=prefix)
