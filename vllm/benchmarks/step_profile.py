# SPDX-License-Identifier: Apache-2.0
"""Where a step's time goes: the engine's parts timed while a workload runs in this process.

Each part counts its own time without the parts inside it, so that the parts and the rest add up
to the whole. The clock itself costs some microseconds a call, some 1,500 of them in a step of a
model of 30 layers: it says what costs most, not how long a step takes without it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from vllm import LLM

PRODUCTS, ATTENTION, SMALL_OPS = "matrix products", "attention", "norms, rotary, activations"
FORWARD, SAMPLING, INPUTS = "rest of the forward pass", "sampling", "input preparation"
SCHEDULING, OUTPUTS, REST = "scheduling", "detokenising, outputs", "unaccounted rest"
PARTS = (
    PRODUCTS,
    ATTENTION,
    SMALL_OPS,
    FORWARD,
    SAMPLING,
    INPUTS,
    SCHEDULING,
    OUTPUTS,
    REST,
)


class PartClock:
    """Adds time to the innermost part that is open."""

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._now = now
        self._open: list[str] = [REST]
        self._since = now()

    def enter(self, part: str) -> None:
        self._count()
        self._open.append(part)

    def leave(self) -> None:
        self._count()
        self._open.pop()

    def start(self) -> None:
        """Forgets what was counted."""
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self._since = self._now()

    def stop(self) -> None:
        """Counts what has passed since the last part was left."""
        self._count()

    def _count(self) -> None:
        now = self._now()
        self.seconds[self._open[-1]] += now - self._since
        self._since = now

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function`, its time added to `part`."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


@dataclass(frozen=True)
class StepProfile:
    """Milliseconds a step of each part, over `num_steps` steps."""

    num_steps: int
    milliseconds: dict[str, float]

    def text(self) -> str:
        whole = sum(self.milliseconds.values())
        lines = [f"{self.num_steps} steps, {whole:.2f} ms each, of which (the clock's own included):"]
        lines += [
            f"  {part:<28} {ms:8.3f} ms {100 * ms / whole:6.1f} %"
            for part, ms in self.milliseconds.items()
        ]
        return "\n".join([*lines, "  ZMQ: none, the engine core runs in this process"])


def _part_of(module: nn.Module) -> str | None:
    from vllm.model_executor.custom_op import CustomOp
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase
    from vllm.model_executor.layers.linear import LinearBase
    from vllm.model_executor.layers.logits_processor import LogitsProcessor

    if isinstance(module, (LinearBase, LogitsProcessor)):
        return PRODUCTS
    if isinstance(module, AttentionLayerBase):
        return ATTENTION
    return SMALL_OPS if isinstance(module, CustomOp) else None


def _methods(llm: LLM) -> list[tuple[Any, str, str]]:
    """(object, method, part) of what is timed besides the model's modules.

    Raises:
        ValueError: the engine core runs in a process of its own.
    """
    from vllm.v1.engine.core_client import InprocClient
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager, StaticInputs

    client = llm.llm_engine.engine_core
    if not isinstance(client, InprocClient):
        raise ValueError("--profile needs the engine in one process: VLLM_ENABLE_V1_MULTIPROCESSING=0")
    core = client.engine_core
    runner = core.model_executor.driver_worker.model_runner
    return [
        (core.scheduler, "schedule", SCHEDULING),
        (core.scheduler, "update_from_output", SCHEDULING),
        (core.model_executor, "execute_model", INPUTS),
        (core.model_executor, "sample_tokens", SAMPLING),
        (runner.model, "forward", FORWARD),
        (CudaGraphManager, "replay", FORWARD),
        (StaticInputs, "copy_in", INPUTS),
        (llm.llm_engine.output_processor, "process_outputs", OUTPUTS),
    ]


@contextmanager
def _timed_parts(llm: LLM, clock: PartClock, with_modules: bool) -> Iterator[None]:
    """The parts of `llm` are timed inside."""
    methods, hooks = _methods(llm), []
    with ExitStack() as stack:
        for target, name, part in methods:
            timed = clock.timed(part, getattr(target, name))
            stack.enter_context(_replaced(target, name, timed))
        if with_modules:
            runner = llm.llm_engine.engine_core.engine_core.model_executor.driver_worker.model_runner
            # A recorded step calls no module, so that none would be timed.
            stack.enter_context(_replaced(runner, "_forward", runner._run_eagerly))
            stack.enter_context(_replaced(runner, "_logits", runner._compute_logits))
            hooks = _hooks(llm, clock)
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


def _hooks(llm: LLM, clock: PartClock) -> list[Any]:
    """Handles of hooks that time the model's modules."""
    hooks = []
    for module in llm.apply_model(lambda model: list(model.modules()))[0]:
        part = _part_of(module)
        if part is not None:
            hooks.append(module.register_forward_pre_hook(_entering(clock, part)))
            hooks.append(module.register_forward_hook(_leaving(clock), always_call=True))
    return hooks


@contextmanager
def _replaced(target: Any, name: str, value: Any) -> Iterator[None]:
    """An attribute of an object or a class is another inside."""
    is_own, before = name in vars(target), vars(target).get(name)
    setattr(target, name, value)
    try:
        yield
    finally:
        if is_own:
            setattr(target, name, before)
        else:
            delattr(target, name)


def _entering(clock: PartClock, part: str) -> Callable[..., None]:
    return lambda module, args: clock.enter(part)


def _leaving(clock: PartClock) -> Callable[..., None]:
    return lambda module, args, output: clock.leave()


def profile_steps(
    llm: LLM, run: Callable[[], object], with_modules: bool = True
) -> StepProfile:
    """Profiles the steps that `run` makes `llm` do. Without `with_modules` the forward pass is one
    part, and the clock takes next to nothing.

    Raises:
        ValueError: the engine core runs in a process of its own, or `run` did no step.
    """
    clock, num_steps = PartClock(), 0

    def counted(schedule: Callable[[], Any]) -> Callable[[], Any]:
        def call() -> Any:
            nonlocal num_steps
            num_steps += 1
            return schedule()

        return call

    with _timed_parts(llm, clock, with_modules):
        scheduler = llm.llm_engine.engine_core.engine_core.scheduler
        scheduler.schedule = counted(scheduler.schedule)
        clock.start()
        run()
        clock.stop()
    if not num_steps:
        raise ValueError("nothing was computed, so there is nothing to profile")
    return StepProfile(
        num_steps, {part: 1e3 * s / num_steps for part, s in clock.seconds.items()}
    )
