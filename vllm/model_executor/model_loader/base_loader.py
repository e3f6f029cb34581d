# SPDX-License-Identifier: Apache-2.0
"""What loaders share: make the model, fill it, check that nothing is missing."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

import torch
from torch import nn

from vllm.logger import init_logger
from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase
from vllm.model_executor.layers.quantization.parameter import report_weights
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.model_executor.model_loader.weight_utils import describe_names
from vllm.model_executor.models.interfaces import ChecksAfterLoading
from vllm.model_executor.utils import set_default_torch_dtype
from vllm.utils.torch_utils import str_dtype_to_torch_dtype

if TYPE_CHECKING:
    from vllm.config import LoadConfig, ModelConfig, VllmConfig

logger = init_logger(__name__)


class BaseModelLoader(ABC):
    """Makes a model on its device in its dtype and loads its weights."""

    def __init__(self, load_config: LoadConfig) -> None:
        self.load_config = load_config

    @abstractmethod
    def download_model(self, model_config: ModelConfig) -> None:
        """Make sure that the weights are at hand. Raises ValueError where they are not."""

    @abstractmethod
    def load_weights(self, model: nn.Module, model_config: ModelConfig) -> None:
        """Fill a model. Raises ValueError naming weights that are missing or not expected."""

    def load_model(
        self, vllm_config: VllmConfig, model_config: ModelConfig, prefix: str = ""
    ) -> nn.Module:
        """The loaded model, ready for inference."""
        from vllm.platforms import current_platform

        started = time.monotonic()
        dtype = str_dtype_to_torch_dtype(model_config.dtype)
        with set_default_torch_dtype(dtype), torch.device(current_platform.device_type):
            model = initialize_model(vllm_config, model_config=model_config, prefix=prefix)
        made = time.monotonic()
        self.load_weights(model, model_config)
        loaded = time.monotonic()
        process_weights_after_loading(model, dtype)
        if vllm_config.quant_config is not None:
            report_weights(model, vllm_config.quant_config.get_name())
        if isinstance(model, ChecksAfterLoading):
            model.check_after_loading()
        logger.debug(
            "model made in %.2f s, weights loaded in %.2f s, prepared in %.2f s",
            made - started,
            loaded - made,
            time.monotonic() - loaded,
        )
        return model.eval()


def process_weights_after_loading(model: nn.Module, act_dtype: torch.dtype) -> None:
    """Let layers rearrange their weights once all are there."""
    from vllm.model_executor.layers.attention import Attention

    for module in model.modules():
        if isinstance(module, Attention):
            module.process_weights_after_loading(act_dtype)
            continue
        method = module.__dict__.get("quant_method")
        if isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(module)


def check_all_loaded(model: nn.Module, loaded: set[str] | None, source: str) -> None:
    """Raise ValueError naming parameters, and shards of fused ones, that the checkpoint did not
    give.

    `loaded` is what `load_weights` returned; a model that returns None is trusted with its
    parameters.
    """
    missing = []
    for name, parameter in model.named_parameters():
        pending = parameter.__dict__.get("pending_shards")
        if loaded is not None and name not in loaded:
            missing.append(name)
        elif pending:
            missing.append(f"{name} (shard {', '.join(map(str, sorted(pending)))})")
    if missing:
        raise ValueError(
            f"{source} lacks {len(missing)} weights of {type(model).__name__}: "
            f"{describe_names(missing)}"
        )
