# SPDX-License-Identifier: Apache-2.0
"""Which devices share a model. So far a model lives on one device, so every group has one member.

Layers ask here for their rank and world size and cut their weights accordingly, so that groups of
several members need a communicator and nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class GroupCoordinator:
    """One process's place in a group of `world_size` processes."""

    rank_in_group: int = 0
    world_size: int = 1

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """Sum over the group."""
        self._refuse_several("all_reduce")
        return input_

    def all_gather(self, input_: torch.Tensor, dim: int = -1) -> torch.Tensor:
        """The members' tensors joined along `dim`."""
        self._refuse_several("all_gather")
        return input_

    def _refuse_several(self, operation: str) -> None:
        if self.world_size > 1:
            raise NotImplementedError(
                f"{operation} among {self.world_size} devices is not supported; supported: 1"
            )


_ALONE = GroupCoordinator()
_tp: GroupCoordinator | None = None
_pp: GroupCoordinator | None = None


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
) -> None:
    """Make the groups of this process. Raises ValueError for sizes that are not supported."""
    global _tp, _pp
    sizes = {"tensor": tensor_model_parallel_size, "pipeline": pipeline_model_parallel_size}
    for kind, size in sizes.items():
        if size != 1:
            raise ValueError(f"{kind} parallel size {size} is not supported; supported: 1")
    _tp = _pp = _ALONE


def ensure_model_parallel_initialized(
    tensor_model_parallel_size: int,
    pipeline_model_parallel_size: int,
) -> None:
    """Make the groups unless they are there. Raises ValueError when they are of other sizes."""
    if not model_parallel_is_initialized():
        initialize_model_parallel(tensor_model_parallel_size, pipeline_model_parallel_size)
    have = (get_tp_group().world_size, get_pp_group().world_size)
    want = (tensor_model_parallel_size, pipeline_model_parallel_size)
    if have != want:
        raise ValueError(f"this process has groups of sizes {have} (tensor, pipeline), not {want}")


def model_parallel_is_initialized() -> bool:
    return _tp is not None and _pp is not None


def destroy_model_parallel() -> None:
    """Forget the groups."""
    global _tp, _pp
    _tp = _pp = None


def get_tp_group() -> GroupCoordinator:
    """The processes that share each layer; this one alone where no groups were made."""
    return _tp or _ALONE


def get_pp_group() -> GroupCoordinator:
    """The processes that hold the model's layers in turn; this one alone where no groups were
    made."""
    return _pp or _ALONE


def get_tensor_model_parallel_world_size() -> int:
    return get_tp_group().world_size


def get_tensor_model_parallel_rank() -> int:
    return get_tp_group().rank_in_group
