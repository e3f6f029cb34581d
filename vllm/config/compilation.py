# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

import enum
from dataclasses import field
from typing import Any

from pydantic import ConfigDict, Field, field_validator

from vllm.config.utils import config, hash_factors

# Without a word from the user, graphs are made for batches up to this size.
_DEFAULT_MAX_CAPTURE_SIZE = 256


class CUDAGraphMode(enum.Enum):
    """Which steps are replayed from a recorded graph. FULL_DECODE_ONLY: the whole forward pass of
    steps in which each request has one token. Values are upstream's: of decodes, and of others."""

    NONE = 0
    FULL_DECODE_ONLY = (2, 0)


@config(config=ConfigDict(arbitrary_types_allowed=True))
class CompilationConfig:
    """How the model's forward pass is made fast, and the registry of its layers."""

    cudagraph_mode: CUDAGraphMode | None = None
    """Graph replay on devices that have it: NONE or FULL_DECODE_ONLY. Left out: FULL_DECODE_ONLY on a
    CPU, whose graphs are programs of kernels, NONE elsewhere."""
    cudagraph_mode_is_default: bool = field(default=False, init=False)
    """The platform chose the mode: then it is no fault where no graph can be recorded."""
    cudagraph_capture_sizes: list[int] | None = None
    """Requests in a batch that graphs are recorded for; a smaller batch is padded to the next size, a
    larger one runs without graph. Left out: 1, 2, 4, then every 8 up to the largest. On a CPU one
    graph serves every number of requests up to the largest."""
    max_cudagraph_capture_size: int | None = Field(default=None, ge=1)
    """The largest of the sizes, if they are left out."""
    static_forward_context: dict[str, Any] = field(default_factory=dict, init=False)
    """Layer name -> attention layer; layers enter themselves when the model is made."""

    @field_validator("cudagraph_mode", mode="before")
    @classmethod
    def validate_cudagraph_mode_before(cls, value: Any) -> Any:
        """Takes a mode's name, in any case."""
        if value is None or isinstance(value, CUDAGraphMode):
            return value
        name = value.upper() if isinstance(value, str) else value
        if name not in CUDAGraphMode.__members__:
            supported = ", ".join(CUDAGraphMode.__members__)
            raise ValueError(f"cudagraph_mode {value!r} is not supported (supported: {supported})")
        return CUDAGraphMode[name]

    def set_cudagraph_sizes(self, max_num_seqs: int) -> None:
        """Sets `cudagraph_capture_sizes` in rising order, none beyond `max_num_seqs`, and the largest
        as `max_cudagraph_capture_size`.

        Raises:
            ValueError: sizes that cannot be, or that no batch has.
        """
        given, largest = self.cudagraph_capture_sizes, self.max_cudagraph_capture_size
        if given is None:
            largest = min(largest or _DEFAULT_MAX_CAPTURE_SIZE, max_num_seqs)
            sizes = {1, 2, 4, *range(8, largest, 8), largest}
        elif largest not in (None, max(given, default=None)):
            raise ValueError(
                f"max_cudagraph_capture_size {largest} is not the largest of "
                f"cudagraph_capture_sizes {given}: pass one of them"
            )
        else:
            largest, sizes = max_num_seqs, set(given)
        kept = sorted(size for size in sizes if size <= largest)
        if not kept or kept[0] < 1:
            raise ValueError(
                f"cudagraph_capture_sizes {given}: supported are numbers of requests from 1 to "
                f"--max-num-seqs ({max_num_seqs})"
            )
        self.cudagraph_capture_sizes, self.max_cudagraph_capture_size = kept, kept[-1]

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"cudagraph_mode": self.cudagraph_mode})
