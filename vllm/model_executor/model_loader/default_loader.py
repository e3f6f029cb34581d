# SPDX-License-Identifier: Apache-2.0
"""Weights from a model directory with safetensors files."""

from __future__ import annotations

from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.model_executor.model_loader.base_loader import BaseModelLoader, check_all_loaded
from vllm.model_executor.model_loader.weight_utils import (
    filter_duplicate_safetensors_files,
    safetensors_weights_iterator,
)
from vllm.transformers_utils.config import resolve_model_path

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig

_PICKLED = ("*.bin", "*.pt", "*.pth")


class DefaultModelLoader(BaseModelLoader):
    """Reads `*.safetensors`, one file or shards with an index."""

    def __init__(self, load_config: LoadConfig) -> None:
        super().__init__(load_config)
        if load_config.model_loader_extra_config:
            given = ", ".join(load_config.model_loader_extra_config)
            raise ValueError(
                f"model_loader_extra_config has no options for load format auto: {given}"
            )

    def download_model(self, model_config: ModelConfig) -> None:
        self._weight_files(model_config)

    def get_all_weights(
        self, model_config: ModelConfig, model: nn.Module
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, tensor) of every weight of the checkpoint."""
        files = [str(file) for file in self._weight_files(model_config)]
        return safetensors_weights_iterator(files, self.load_config.use_tqdm_on_load)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        loaded = model.load_weights(self.get_all_weights(model_config, model))
        check_all_loaded(model, loaded, str(model_config.model))

    def _weight_files(self, model_config: ModelConfig) -> list[Path]:
        folder = resolve_model_path(
            model_config.model, model_config.revision, self.load_config.download_dir
        )
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a model directory; load it with --load-format gguf")
        ignored = self.load_config.ignore_patterns
        ignored = [ignored] if isinstance(ignored, str) else ignored
        files = [
            file
            for file in sorted(folder.glob("*.safetensors"))
            if not any(fnmatch(file.name, pattern) for pattern in ignored)
        ]
        if not files:
            self._refuse(folder)
        return [
            Path(file)
            for file in filter_duplicate_safetensors_files([str(f) for f in files], str(folder))
        ]

    def _refuse(self, folder: Path) -> None:
        pickled = [file.name for pattern in _PICKLED for file in sorted(folder.glob(pattern))]
        if pickled:
            raise ValueError(
                f"{folder} holds pickled weights only ({pickled[0]}), which can run code when "
                "loaded: convert them "
                "with transformers' save_pretrained, which writes safetensors"
            )
        raise ValueError(
            f"{folder} holds no *.safetensors files; --load-format dummy runs it with random "
            "weights"
        )
