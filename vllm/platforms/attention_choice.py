# SPDX-License-Identifier: Apache-2.0
"""Choosing an attention backend from a platform's list, with a reason for each that is left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.logger import init_logger
from vllm.utils.import_utils import module_exists

if TYPE_CHECKING:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from .interface import DeviceCapability

logger = init_logger(__name__)
_DECODER = "decoder"  # AttentionType.DECODER, which torch comes along with


@dataclass(frozen=True)
class Candidate:
    """A backend by its `AttentionBackendEnum` name, and the package that its kernels come from."""

    name: str
    package: str | None = None
    # Slow: the log says so where it is taken unasked.
    is_last_resort: bool = False


TORCH_ATTN = Candidate("TORCH_ATTN", is_last_resort=True)


def choose_backend(
    platform_name: str,
    candidates: tuple[Candidate, ...],
    selected: AttentionBackendEnum | None,
    config: AttentionSelectorConfig,
    capability: DeviceCapability | None,
) -> str:
    """The dotted name of a layer's backend: the user's, else the first candidate that serves it.

    A selected backend that cannot serve cross-attention gives way, for such layers alone, to the
    platform's choice; the log says so.

    Raises:
        ValueError: no candidate serves the layer, or not the selected one; with every reason.
    """
    if selected is not None:
        why = _why_selected_not(platform_name, candidates, selected, config, capability)
        if not why:
            return selected.get_path()
        if not _fails_only_as_cross_attention(candidates, selected, config, capability):
            raise ValueError(why)
        logger.warning_once("%s; the platform chooses for cross-attention layers", why)
    reasons = []
    for candidate in candidates:
        backend = _member(candidate.name)
        reason = _why_not(candidate, config, capability)
        if not reason and backend is not None:
            if candidate.is_last_resort:
                why = "; ".join(reasons)
                logger.warning_once("%s is slow, but others do not serve: %s", candidate.name, why)
            return backend.get_path()
        reasons.append(f"{candidate.name}: {reason}")
        # One that is there but not for this kind of layer is news: layers differ in their backends.
        is_news = config.attn_type != _DECODER and not _why_absent(candidate)
        log = logger.info_once if is_news else logger.debug_once
        log("attention backend %s is skipped: %s", candidate.name, reason)
    raise ValueError(
        f"no attention backend on {platform_name} serves {config}: {'; '.join(reasons)}"
    )


def _member(name: str) -> AttentionBackendEnum | None:
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    return AttentionBackendEnum.__members__.get(name)


def _why_selected_not(
    platform_name: str,
    candidates: tuple[Candidate, ...],
    selected: AttentionBackendEnum,
    config: AttentionSelectorConfig,
    capability: DeviceCapability | None,
) -> str:
    if selected.is_overridden():  # a plugin registered its class for this name: its author knows
        return ""
    listed = {candidate.name: candidate for candidate in candidates}
    usable = [name for name, c in listed.items() if not _why_absent(c)]
    if selected.name not in listed:
        reason = f"it does not run on {platform_name}"
    else:
        reason = _why_not(listed[selected.name], config, capability)
    if not reason:
        return ""
    return (
        f"attention backend {selected.name} cannot be used: {reason}; supported on "
        f"{platform_name}: {', '.join(usable) or 'none'} (--attention-backend)"
    )


def _why_absent(candidate: Candidate) -> str:
    backend = _member(candidate.name)
    if backend is None:
        return "this build does not have it"
    if candidate.package and not module_exists(candidate.package):
        return f"package {candidate.package} is not installed"
    if not module_exists(backend.get_path().rpartition(".")[0]):
        return "this build does not have it"
    return ""


def _why_not(
    candidate: Candidate, config: AttentionSelectorConfig, capability: DeviceCapability | None
) -> str:
    absent = _why_absent(candidate)
    backend = _member(candidate.name)
    if absent or backend is None:
        return absent
    try:
        backend_cls = backend.get_class()
    except ImportError as error:
        return f"it cannot be imported: {error}"
    reasons = backend_cls.validate_configuration(device_capability=capability, **config._asdict())
    return ", ".join(reasons)


def _fails_only_as_cross_attention(
    candidates: tuple[Candidate, ...],
    selected: AttentionBackendEnum,
    config: AttentionSelectorConfig,
    capability: DeviceCapability | None,
) -> bool:
    """Whether `selected` would serve the layer if it were decoder self-attention."""
    from vllm.v1.attention.backend import AttentionType

    candidate = next((c for c in candidates if c.name == selected.name), None)
    if candidate is None or config.attn_type != AttentionType.ENCODER_DECODER:
        return False
    return not _why_not(candidate, config._replace(attn_type=AttentionType.DECODER), capability)
