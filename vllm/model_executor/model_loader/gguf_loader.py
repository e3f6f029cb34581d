# SPDX-License-Identifier: Apache-2.0
"""Weights from a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS
from vllm.model_executor.model_loader.base_loader import BaseModelLoader, check_all_loaded
from vllm.model_executor.model_loader.gguf_weights import gguf_weights_iterator
from vllm.transformers_utils.config import open_gguf, resolve_model_path
from vllm.utils.torch_utils import str_dtype_to_torch_dtype

if TYPE_CHECKING:
    from vllm.config import ModelConfig


class GGUFModelLoader(BaseModelLoader):
    """Unpacks quantised weights into the model's dtype as they are read, or, with `--quantization`,
    hands on the blocks of those that layers can keep."""

    def download_model(self, model_config: ModelConfig) -> None:
        self._path(model_config)

    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        file = open_gguf(self._path(model_config))
        dtype = str_dtype_to_torch_dtype(model_config.dtype)
        weights = gguf_weights_iterator(
            file,
            dtype,
            self.load_config.use_tqdm_on_load,
            keep_blocks=model_config.quantization in QUANTIZATION_METHODS,
        )
        check_all_loaded(model, model.load_weights(weights), str(file.path))

    def _path(self, model_config: ModelConfig) -> Path:
        path = resolve_model_path(
            model_config.model, model_config.revision, self.load_config.download_dir
        )
        if not path.is_file():
            raise ValueError(f"load format gguf needs a .gguf file, but {path} is a directory")
        return path
