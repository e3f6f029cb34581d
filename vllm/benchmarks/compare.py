# SPDX-License-Identifier: Apache-2.0
"""Measures engines side by side: the same workload, round by round, in turn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vllm.benchmarks.engine import BenchEngine, EngineInfo, Run
from vllm.benchmarks.workload import Workload


@dataclass(frozen=True)
class Measurement:
    """One engine's times for one workload, a number a round, in seconds."""

    info: EngineInfo
    seconds: tuple[float, ...]

    @property
    def median_seconds(self) -> float:
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Comparison:
    """Ours first, then the peer's.

    `same_first_tokens`: prompts whose first new token is the same from both. With bfloat16 a near
    tie can differ; few in common would mean that the two do not run the same model.
    """

    workload: Workload
    ours: Measurement
    peer: Measurement
    same_first_tokens: int

    @property
    def ratio(self) -> float:
        """How many times as fast as the peer we are, by the medians."""
        return self.peer.median_seconds / self.ours.median_seconds

    @property
    def round_ratios(self) -> tuple[float, ...]:
        """The same for each round by itself."""
        return tuple(p / o for o, p in zip(self.ours.seconds, self.peer.seconds, strict=True))


def compare(
    engines: Sequence[BenchEngine],
    workload: Workload,
    num_iters: int,
    num_iters_warmup: int,
    on_step: Callable[[str], None] = lambda what: None,
) -> Comparison:
    """Measures two engines, ours and the peer, in turn; who begins changes from round to round.

    Raises:
        ValueError: an engine gave another number of tokens than was asked for.
    """
    ours, peer = engines
    for engine in engines:
        on_step(f"{engine.name}: warm-up")
        engine.prepare(workload)
        for _ in range(num_iters_warmup):
            checked_run(engine, workload)
    runs: dict[int, list[Run]] = {0: [], 1: []}
    for round_number in range(num_iters):
        order = (0, 1) if round_number % 2 == 0 else (1, 0)
        for index in order:
            on_step(f"{engines[index].name}: round {round_number + 1} of {num_iters}")
            runs[index].append(checked_run(engines[index], workload))
    firsts = [[ids[0] for ids in runs[index][0].token_ids] for index in (0, 1)]
    return Comparison(
        workload,
        Measurement(ours.info(), tuple(run.seconds for run in runs[0])),
        Measurement(peer.info(), tuple(run.seconds for run in runs[1])),
        sum(a == b for a, b in zip(*firsts, strict=True)),
    )


def checked_run(engine: BenchEngine, workload: Workload) -> Run:
    """A run whose outputs are as many and as long as the workload says.

    Raises:
        ValueError: they are not, so its time would mean nothing.
    """
    run = engine.run(workload)
    lengths = {len(ids) for ids in run.token_ids}
    if len(run.token_ids) != workload.num_prompts or lengths != {workload.output_len}:
        raise ValueError(
            f"{engine.name} gave {len(run.token_ids)} outputs of {sorted(lengths)} tokens, not "
            f"{workload.num_prompts} of {workload.output_len}"
        )
    return run
