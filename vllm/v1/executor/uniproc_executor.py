# SPDX-License-Identifier: Apache-2.0
"""One worker, in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.v1.executor.abstract import Executor
from vllm.v1.worker.worker_base import make_worker


class UniProcExecutor(Executor):
    """Calls its worker directly."""

    def _init_executor(self) -> None:
        self.driver_worker = make_worker(self.vllm_config, local_rank=0, rank=0)
        self.driver_worker.init_device()
        self.driver_worker.load_model()

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        call = getattr(self.driver_worker, method) if isinstance(method, str) else None
        if call is None:
            return [self.driver_worker.run_function(method, *args, **(kwargs or {}))]
        return [call(*args, **(kwargs or {}))]

    def _call_worker(self, rank: int, method: str, *args: Any) -> Any:
        return getattr(self.driver_worker, method)(*args)

    def use_idle_time(self) -> bool:
        return self.driver_worker.use_idle_time()

    def check_health(self) -> None:
        self.driver_worker.check_health()
