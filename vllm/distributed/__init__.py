# SPDX-License-Identifier: Apache-2.0
"""Groups of devices that work on one model, and what they say to each other."""

from vllm.distributed.communication_op import (
    tensor_model_parallel_all_gather,
    tensor_model_parallel_all_reduce,
)
from vllm.distributed.parallel_state import (
    GroupCoordinator,
    destroy_model_parallel,
    ensure_model_parallel_initialized,
    get_pp_group,
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    get_tp_group,
    initialize_model_parallel,
    model_parallel_is_initialized,
)
from vllm.distributed.utils import divide, split_tensor_along_last_dim

__all__ = [
    "GroupCoordinator",
    "destroy_model_parallel",
    "divide",
    "ensure_model_parallel_initialized",
    "get_pp_group",
    "get_tensor_model_parallel_rank",
    "get_tensor_model_parallel_world_size",
    "get_tp_group",
    "initialize_model_parallel",
    "model_parallel_is_initialized",
    "split_tensor_along_last_dim",
    "tensor_model_parallel_all_gather",
    "tensor_model_parallel_all_reduce",
]
