# SPDX-License-Identifier: Apache-2.0
"""How a step grows: with the context, with the streams, with the queue."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vllm.benchmarks.bounds import BoundsSpec
from vllm.benchmarks.engine import VllmEngine
from vllm.benchmarks.measures import MeasurePlan, median_of
from vllm.benchmarks.process import EngineProcess, engine_processes
from vllm.benchmarks.suite_goals import CONTEXT_STEP, QUEUED_STEP, STEP_OVERHEAD
from vllm.benchmarks.suite_results import Measure
from vllm.benchmarks.workload import Workload, random_workload

if TYPE_CHECKING:
    from vllm.engine.arg_utils import EngineArgs

SHORT, LONG, FEW_STREAMS = 256, 4096, 8
MANY_STREAMS, QUEUED, INPUT_LEN = 64, 10_000, 64
_STEPS = 24
# Tokens that a stream may get: prompts that are long come to their first token one after the other.
_MOST_TOKENS = 160
_MOST_ROUNDS = 5


@dataclass(frozen=True)
class GrowthSpec:
    """Our engine with room for the long contexts and for as many streams."""

    engine_args: EngineArgs
    name: str = "vllm"
    is_peer: bool = False

    def build(self) -> SteppedEngine:
        args = dataclasses.replace(
            self.engine_args,
            max_model_len=LONG + _MOST_TOKENS,
            max_num_seqs=MANY_STREAMS,
            enable_prefix_caching=True,
        )
        return SteppedEngine(args)


class SteppedEngine(VllmEngine):
    """Our engine, step by step. Milliseconds of decoding steps: medians of `_STEPS`."""

    def decode_ms(self, workload: Workload) -> float:
        """Of a step of all prompts together. They may be in the cache of an earlier call: the
        prompts' time does not count."""
        ids = self._add(workload.prompts)
        self._step_until_all_decode(ids)
        ms = self._steps_ms()
        self._llm.llm_engine.abort_request(ids)
        return ms

    def queued_ms(self, workload: Workload, num_queued: int) -> tuple[float, float]:
        """Of a step of all prompts together, alone and with so many requests waiting behind."""
        ids = self._add(workload.prompts)
        self._step_until_all_decode(ids)
        alone = self._steps_ms()
        waiting = self._add(workload.prompts[:1] * num_queued, "waiting")
        self._llm.llm_engine.step()
        queued = self._steps_ms()
        self._llm.llm_engine.abort_request([*waiting, *ids])
        return alone, queued

    def overhead(self, workload: Workload) -> tuple[float, float]:
        """Milliseconds a step of scheduling and input preparation, and of the whole."""
        from vllm.benchmarks import step_profile

        profile = step_profile.profile_steps(
            self._llm, lambda: self.run(workload), with_modules=False
        )
        parts = (step_profile.SCHEDULING, step_profile.INPUTS)
        whole = sum(profile.milliseconds.values())
        return sum(profile.milliseconds[part] for part in parts), whole

    def _add(self, prompts: Sequence[tuple[int, ...]], name: str = "running") -> list[str]:
        from vllm import SamplingParams, TokensPrompt

        params = SamplingParams(
            temperature=0.0, max_tokens=_MOST_TOKENS, ignore_eos=True, detokenize=False
        )
        ids = [f"{name}-{i}" for i in range(len(prompts))]
        for request_id, prompt in zip(ids, prompts, strict=True):
            prompt = TokensPrompt(prompt_token_ids=list(prompt))
            self._llm.llm_engine.add_request(request_id, prompt, params)
        return ids

    def _step_until_all_decode(self, ids: list[str]) -> None:
        begun: set[str] = set()
        while len(begun) < len(ids):
            outputs = self._llm.llm_engine.step()
            begun.update(out.request_id for out in outputs if out.outputs[0].token_ids)

    def _steps_ms(self) -> float:
        times = []
        for _ in range(_STEPS):
            began = time.perf_counter()
            self._llm.llm_engine.step()
            times.append(1e3 * (time.perf_counter() - began))
        return statistics.median(times)


def run(plan: MeasurePlan) -> tuple[Measure, ...]:
    """The three figures, each from rounds in turn."""
    specs = [BoundsSpec(), GrowthSpec(plan.engine_args)]
    with engine_processes(specs, timeout_s=plan.timeout_s) as (probe, engine):
        context = _context(plan, probe, engine)
        many = random_workload(
            MANY_STREAMS, INPUT_LEN, 64, plan.vocab_size, plan.seed, plan.excluded_ids
        )
        plan.on_step("growth: a step's parts with 64 streams")
        engine.run(many)
        overhead, whole = engine.call("overhead", many)
        queued = _queued(plan, engine, many)
    note = "of all steps of a run; the clock's own time included"
    return (
        context,
        Measure(STEP_OVERHEAD, overhead, "ms", "a step", whole, overhead / whole, note),
        queued,
    )


def _context(plan: MeasurePlan, probe: EngineProcess, engine: EngineProcess) -> Measure:
    """Extra time of a step at the long context over what reading what is added takes."""
    short, long = (
        random_workload(
            FEW_STREAMS, length - _STEPS, 1, plan.vocab_size, plan.seed, plan.excluded_ids
        )
        for length in (SHORT, LONG)
    )
    times, reads = [], []
    plan.on_step(f"growth: contexts of {SHORT} and {LONG}, warm-up")
    for workload in (short, long):
        engine.call("decode_ms", workload)
    for which in plan.rounds(_MOST_ROUNDS):
        plan.on_step(f"growth: contexts of {SHORT} and {LONG}, {which}")
        times.append((engine.call("decode_ms", short), engine.call("decode_ms", long)))
        reads.append(probe.bounds().read_bytes_per_s)
    short_ms, long_ms = (statistics.median(column) for column in zip(*times, strict=True))
    kv_bytes = FEW_STREAMS * (LONG - SHORT) * engine.call("model_size").kv_bytes_per_token
    bound = 1e3 * kv_bytes / statistics.median(reads)
    extra = statistics.median(long - short for short, long in times)
    note = (
        f"{FEW_STREAMS} streams, {short_ms:.1f} ms at {SHORT} tokens, {long_ms:.1f} ms at {LONG}; "
        f"bound: {kv_bytes / 1e6:.0f} MB at {statistics.median(reads) / 1e9:.1f} GB/s; "
        f"{median_of(len(times), 'round')}"
    )
    return Measure(CONTEXT_STEP, extra, "ms", "bound", bound, extra / bound, note)


def _queued(plan: MeasurePlan, engine: EngineProcess, workload: Workload) -> Measure:
    pairs = []
    for which in plan.rounds(_MOST_ROUNDS):
        plan.on_step(f"growth: {QUEUED:,} requests queued, {which}")
        pairs.append(engine.call("queued_ms", workload, QUEUED))
    alone, queued = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratio = statistics.median(after / before for before, after in pairs)
    note = f"{MANY_STREAMS} streams; {median_of(len(pairs), 'round')}"
    return Measure(QUEUED_STEP, queued, "ms", "none queued", alone, ratio, note)
