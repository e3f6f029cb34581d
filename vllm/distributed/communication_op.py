# SPDX-License-Identifier: Apache-2.0
"""Communication in the tensor-parallel group."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vllm.distributed.parallel_state import get_tp_group

if TYPE_CHECKING:
    import torch


def tensor_model_parallel_all_reduce(input_: torch.Tensor) -> torch.Tensor:
    """Sum of the group's tensors, in every member."""
    return get_tp_group().all_reduce(input_)


def tensor_model_parallel_all_gather(input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
    """The group's tensors joined along `dim`, in every member."""
    return get_tp_group().all_gather(input_, dim)
