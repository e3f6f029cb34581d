# SPDX-License-Identifier: Apache-2.0
"""Logits processors that are not built in: those of installed packages (entry points of group
`vllm.logits_processors`) and those named with --logits-processors."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from vllm.plugins import LOGITSPROCS_GROUP, describe_failure, scan_plugins
from vllm.sampling_params import SamplingParams
from vllm.utils.import_utils import resolve_obj_by_qualname
from vllm.v1.sample.logits_processor.adapter import AdapterLogitsProcessor, RequestLogitsProcessor
from vllm.v1.sample.logits_processor.interface import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
)

if TYPE_CHECKING:
    import torch

    from vllm.config import VllmConfig


def load_custom_logitsprocs(
    logits_processors: Sequence[str | type[LogitsProcessor]] | None,
) -> list[type[LogitsProcessor]]:
    """The classes that installed packages offer, then those in `logits_processors`: classes, or
    names of the form `package.module:Class` or `package.module.Class`.

    Raises:
        ValueError: one cannot be imported, or is no `LogitsProcessor`. To go on without it would
            change what every request gets.
    """
    scan = scan_plugins(LOGITSPROCS_GROUP)
    for name, error in scan.failed.items():
        raise ValueError(describe_failure(name, LOGITSPROCS_GROUP, error)) from error
    classes = [_checked(name, loaded) for name, loaded in scan.loaded.items()]
    for given in logits_processors or ():
        classes.append(_checked(str(given), _imported(given) if isinstance(given, str) else given))
    return classes


def _imported(name: str) -> object:
    try:
        return resolve_obj_by_qualname(name.replace(":", "."))
    except Exception as error:  # its import may raise anything
        raise ValueError(f"--logits-processors {name}: {type(error).__name__}: {error}") from error


def _checked(name: str, loaded: object) -> type[LogitsProcessor]:
    if not isinstance(loaded, type) or not issubclass(loaded, LogitsProcessor):
        raise ValueError(
            f"logits processor {name} must be a subclass of "
            f"vllm.v1.sample.logits_processor.LogitsProcessor, not {loaded!r}"
        )
    return loaded


def build_logitsprocs(
    vllm_config: VllmConfig, device: torch.device, is_pin_memory: bool
) -> list[LogitsProcessor]:
    """The processors of one engine.

    Raises:
        ValueError: as `load_custom_logitsprocs`.
    """
    classes = load_custom_logitsprocs(vllm_config.model_config.logits_processors)
    return [cls(vllm_config, device, is_pin_memory) for cls in classes]


def validate_logits_processors_parameters(
    logits_processors: Iterable[type[LogitsProcessor]], sampling_params: SamplingParams
) -> None:
    """Lets each class look at a new request's parameters.

    Raises:
        ValueError: one refuses them.
    """
    for cls in logits_processors:
        cls.validate_params(sampling_params)


__all__ = [
    "AdapterLogitsProcessor",
    "BatchUpdate",
    "LogitsProcessor",
    "MoveDirectionality",
    "RequestLogitsProcessor",
    "build_logitsprocs",
    "load_custom_logitsprocs",
    "validate_logits_processors_parameters",
]
