# SPDX-License-Identifier: Apache-2.0
"""A step's small inputs in one buffer, so that they reach the device in one copy."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch

from vllm.platforms import current_platform

_ALIGNMENT_BYTES = 16


@dataclass(frozen=True)
class Field:
    """A place in the buffer for an array of at most `shape`, of `dtype` (a numpy dtype's name)."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all of it."""
        return math.prod(self.shape) * np.dtype(self.dtype).itemsize


class PackedBuffer:
    """Host arrays written in place and sent to the device together.

        host bytes    | query_start_loc | seq_lens | positions | ... |
                                     one copy
        device bytes  | query_start_loc | seq_lens | positions | ... |

    On a CPU both are the same memory and nothing is copied. A field's contents hold until the next
    step writes it.
    """

    def __init__(self, fields: list[Field], device: torch.device, pin_memory: bool = False) -> None:
        offsets, nbytes = {}, 0
        for item in fields:
            offsets[item.name] = nbytes
            nbytes += math.ceil(item.nbytes / _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
        self._host = torch.zeros(nbytes, dtype=torch.uint8, pin_memory=pin_memory)
        self._same_memory = device.type == self._host.device.type
        self._device = self._host if self._same_memory else self._host.to(device)
        self._sent = None if self._same_memory else current_platform.Event()
        self.host: dict[str, np.ndarray] = {}
        self._device_fields: dict[str, torch.Tensor] = {}
        # By field: the shape that was last asked for, and what was given.
        self._device_views: dict[str, tuple[tuple[int, ...], torch.Tensor]] = {}
        for item in fields:
            begin = offsets[item.name]
            end, dtype = begin + item.nbytes, getattr(torch, item.dtype)
            self.host[item.name] = self._host[begin:end].view(dtype).view(item.shape).numpy()
            self._device_fields[item.name] = self._device[begin:end].view(dtype).view(item.shape)

    def begin_step(self) -> None:
        """Call before fields are written: waits until what was sent last has left. A step that
        samples nothing waits for nothing else, and the device may be steps behind."""
        if self._sent is not None:
            self._sent.synchronize()

    def copy_to_device(self) -> None:
        """Sends what was written; call once all fields of the step are."""
        if self._sent is not None:
            self._device.copy_(self._host, non_blocking=True)
            self._sent.record()

    def device(self, name: str, *shape: int) -> torch.Tensor:
        """The head of a field, on the device. The same tensor as long as the shape stays: to make one
        costs more than what a step of one request has to write."""
        last_shape, view = self._device_views.get(name, (None, None))
        if shape != last_shape:
            view = self._device_fields[name][tuple(map(slice, shape))]
            self._device_views[name] = shape, view
        return view
