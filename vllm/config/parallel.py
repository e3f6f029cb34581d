# SPDX-License-Identifier: Apache-2.0
from __future__ import annotations

from dataclasses import field
from typing import Any, Literal

from pydantic import ConfigDict, Field, model_validator

from vllm.config.utils import config, hash_factors

DistributedExecutorBackend = Literal["uni"]


@config(config=ConfigDict(arbitrary_types_allowed=True))
class ParallelConfig:
    """How many devices work on the model, and through which worker."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Pipeline stages; only 1 is supported."""
    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that share each layer; only 1 is supported."""
    data_parallel_size: int = Field(default=1, ge=1)
    """Copies of the engine; only 1 is supported."""
    decode_context_parallel_size: int = Field(default=1, ge=1)
    """Devices that share one request's KV cache; only 1 is supported."""
    prefill_context_parallel_size: int = Field(default=1, ge=1)
    """Devices that share one prompt; only 1 is supported."""
    data_parallel_rank: int = Field(default=0, ge=0)
    """This engine's place among the copies."""
    distributed_executor_backend: str | type[Any] | None = None
    """uni, or an Executor class or its dotted name."""
    worker_cls: str = "auto"
    """Dotted name of the worker's class; auto: the platform's."""
    worker_extension_cls: str = ""
    """Dotted name of a class whose methods the worker gets as well (for `collective_rpc`)."""
    rank: int = 0
    """This process's place among the workers."""
    world_size: int = field(init=False)
    """Workers of one engine; set by the constructor."""

    def __post_init__(self) -> None:
        self.world_size = self.pipeline_parallel_size * self.tensor_parallel_size

    @model_validator(mode="after")
    def _single_device(self) -> ParallelConfig:
        for name in (
            "pipeline_parallel_size",
            "tensor_parallel_size",
            "data_parallel_size",
            "decode_context_parallel_size",
            "prefill_context_parallel_size",
        ):
            if getattr(self, name) != 1:
                raise ValueError(f"{name}={getattr(self, name)} is not supported; supported: 1")
        return self

    def compute_hash(self) -> str:
        """A digest of what changes the compiled computation."""
        return hash_factors({"world_size": self.world_size})
