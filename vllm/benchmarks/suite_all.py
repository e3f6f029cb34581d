# SPDX-License-Identifier: Apache-2.0
"""The whole of `vllm bench compare`: sets of engines one after the other, what is done written down
as it comes."""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

from vllm.benchmarks import cli_args
from vllm.benchmarks.bounds import BoundsSpec
from vllm.benchmarks.engine import BenchEngineSpec, VllmSpec
from vllm.benchmarks.measures import MeasurePlan, run_measure
from vllm.benchmarks.peers import PEERS, PeerOptions, make_peers, missing_reason
from vllm.benchmarks.process import EngineFailed, EngineProcess, engine_processes, reason
from vllm.benchmarks.suite import EngineSet, Task, expand_names, make_task, share_of_time
from vllm.benchmarks.suite_build import task_report
from vllm.benchmarks.suite_report import measure_text, task_text
from vllm.benchmarks.suite_resume import (
    check_same_run, has_measure, has_task, with_measure, with_task,
)  # fmt: skip
from vllm.benchmarks.suite_results import Machine, MeasureReport, SuiteReport, to_json
from vllm.benchmarks.suite_run import LastBounds, run_task
from vllm.benchmarks.transformers_peer import PeerCache
from vllm.engine.arg_utils import EngineArgs
from vllm.logger import init_logger

if TYPE_CHECKING:
    from vllm.benchmarks.model_size import ModelSize
    from vllm.config import ModelConfig

logger = init_logger(__name__)


@dataclass(frozen=True)
class SuiteOptions:
    """What is run. `engine_args`: ours, model and dtype resolved. `workloads`, `peers` None: all.
    `time_limit_s`: of the whole; `timeout_s`: of one answer of one engine."""

    engine_args: EngineArgs
    precision: str
    workloads: tuple[str, ...] | None
    peers: tuple[str, ...] | None
    num_iters: int
    time_limit_s: float | None
    timeout_s: float
    upstream_python: str | None = None
    exporter_python: str | None = None
    openvino_model: str | None = None
    transformers_cache: PeerCache | None = None
    output_json: str | None = None


class Suite:
    """Measures one thing after the other. A workload or a measure that fails costs no other.

    `before`: what is gone on from; what failed in it is done again.

    Raises:
        ValueError: by the constructor, where `before` is of another model, precision or machine.
    """

    def __init__(
        self, options: SuiteOptions, model_config: ModelConfig, before: SuiteReport | None = None
    ) -> None:
        self._options = options
        self._model_config = model_config
        self._began = time.perf_counter()
        names, measures = expand_names(options.workloads)
        empty = SuiteReport(Machine.this(), Path(model_config.model).name, options.precision)
        if before is not None:
            check_same_run(before, empty)
        self.report = before or empty
        self._names = [name for name in names if not has_task(self.report, name)]
        self._measures = [name for name in measures if not has_measure(self.report, name)]
        self._left = [*self._names, *self._measures]

    def run(self) -> SuiteReport:
        """All that is asked for and not in the report yet."""
        tasks = [self._task(name) for name in self._names]
        for engine_set, same in groupby(tasks, key=lambda task: task.engine_set):
            same = list(same)
            try:
                self._run_set(engine_set, same)
            except Exception as error:
                logger.debug("the workloads of these engines ended", exc_info=True)
                for task in same:
                    if task.name in self._left:
                        self._left.remove(task.name)
                        self._leave_out(task.name, engine_set, reason(error))
        for name in self._measures:
            self._run_measure(name)
        return self.report

    def _task(self, name: str) -> Task:
        from vllm.benchmarks.peers.bart_model import NUM_SPECIAL_IDS, VOCAB_SIZE

        task = make_task(name, VOCAB_SIZE, self._options.engine_args.seed, range(NUM_SPECIAL_IDS))
        if task.engine_set.is_encoder_decoder:
            return task
        config = self._model_config
        excluded = cli_args.special_ids(config)
        return make_task(name, config.get_vocab_size(), self._options.engine_args.seed, excluded)

    def _run_set(self, engine_set: EngineSet, tasks: Sequence[Task]) -> None:
        specs, failed = self._specs(engine_set), {}
        needed = [spec.name for spec in specs[:2]]
        with engine_processes(
            _while_loaded(specs, needed, failed),
            failed.__setitem__,
            self._options.timeout_s,
            self._say,
        ) as loaded:
            for name, why in failed.items():
                self._leave_out(name, engine_set, why)
            if failed.keys() & needed:
                self._left = self._left[len(tasks) :]
                return
            probe, *engines = loaded
            size = None if engine_set.is_encoder_decoder else _model_size(engines[0])
            self._add_ready(engine_set, engines)
            bounds = LastBounds(probe.bounds)
            for task in tasks:
                self._run_task(task, bounds, engines, size)

    def _run_task(
        self,
        task: Task,
        bounds: LastBounds,
        engines: Sequence[EngineProcess],
        size: ModelSize | None,
    ) -> None:
        options, limit_s = self._options, self._time_for(task.name)
        try:
            table = run_task(engines, task, options.num_iters, bounds, self._say, limit_s)
            report = task_report(table, size)
        except Exception as error:
            logger.debug("%s failed", task.name, exc_info=True)
            self._leave_out(task.name, task.engine_set, reason(error))
            return
        self._keep(with_task(self.report, report, _suffix(task.engine_set)))
        print(task_text(report), file=sys.stderr, flush=True)

    def _run_measure(self, name: str) -> None:
        limit_s = self._time_for(name)
        try:
            measured = MeasureReport(name, run_measure(name, self._measure_plan(limit_s)))
        except Exception as error:
            logger.debug("%s failed", name, exc_info=True)
            measured = MeasureReport(name, failure=reason(error))
        self._keep(with_measure(self.report, measured))
        print(measure_text(measured), file=sys.stderr, flush=True)

    def _measure_plan(self, limit_s: float | None) -> MeasurePlan:
        options = self._options
        return MeasurePlan(
            engine_args=options.engine_args,
            num_iters=options.num_iters,
            vocab_size=self._model_config.get_vocab_size(),
            excluded_ids=tuple(cli_args.special_ids(self._model_config)),
            timeout_s=options.timeout_s,
            on_step=self._say,
            upstream_python=options.upstream_python,
            ends_at=None if limit_s is None else time.perf_counter() + limit_s,
        )

    def _specs(self, engine_set: EngineSet) -> list[BenchEngineSpec]:
        """The probe, our engine, the peers that can run."""
        options = self._options
        precision = engine_set.precision or options.precision
        args = options.engine_args
        if precision != "bf16" and args.quantization is None:
            args = dataclasses.replace(args, quantization=precision)
        if engine_set.is_encoder_decoder:
            args = _bart_args(args)
        peer_options = PeerOptions(
            args.model,
            args.dtype,
            precision,
            args.max_model_len,
            options.upstream_python,
            options.openvino_model if precision == options.precision else None,
            options.exporter_python,
            engine_set.is_encoder_decoder,
            options.transformers_cache,
        )
        specs: list[BenchEngineSpec] = [BoundsSpec(), VllmSpec(args)]
        for name in PEERS if options.peers is None else options.peers:
            try:
                why = missing_reason(name, peer_options)
                specs += make_peers(name, peer_options) if why is None else []
            except Exception as error:
                why = reason(error)
            if why is not None:
                self._leave_out(name, engine_set, why)
        return specs

    def _leave_out(self, name: str, engine_set: EngineSet, why: str) -> None:
        """`name`: of an engine, or of a workload that could not be run."""
        label = f"{name}{_suffix(engine_set)}"
        logger.warning("%s is left out: %s", label, why)
        self._add(left_out={**self.report.left_out, label: why})

    def _add_ready(self, engine_set: EngineSet, engines: Sequence[EngineProcess]) -> None:
        ready = {f"{e.name}{_suffix(engine_set)}": e.ready_seconds or 0.0 for e in engines}
        self._add(ready_seconds={**self.report.ready_seconds, **ready})

    def _add(self, **fields) -> None:
        """Takes it into the report, and writes the report down."""
        self._keep(dataclasses.replace(self.report, **fields))

    def _keep(self, report: SuiteReport) -> None:
        self.report = report
        if self._options.output_json:
            Path(self._options.output_json).write_text(to_json(self.report) + "\n")

    def _time_for(self, name: str) -> float | None:
        """Seconds for the workload or measure that begins: its share of what is left."""
        limit_s, share = self._options.time_limit_s, share_of_time(name, self._left)
        self._left.remove(name)
        return None if limit_s is None else max(limit_s - self._passed_s, 0.0) * share

    @property
    def _passed_s(self) -> float:
        return time.perf_counter() - self._began

    def _say(self, what: str) -> None:
        limit_s = self._options.time_limit_s
        of_limit = "" if limit_s is None else f" of {limit_s:.0f}"
        logger.info("[%.0f%s s] %s", self._passed_s, of_limit, what)


def _while_loaded(
    specs: Sequence[BenchEngineSpec], needed: Collection[str], failed: Mapping[str, str]
) -> Iterator[BenchEngineSpec]:
    """The specs, as long as none that is needed has failed: peers alone would be loaded for
    nothing."""
    for spec in specs:
        if not failed.keys() & needed:
            yield spec


def _model_size(engine: EngineProcess) -> ModelSize | None:
    """What bounds are reckoned from; without it the figures are there all the same."""
    try:
        return engine.call("model_size")
    except EngineFailed as error:
        logger.warning("no bound is reckoned: %s", error)
        return None


def _suffix(engine_set: EngineSet) -> str:
    """Tells sets apart in lists of engines."""
    return " (bart)" if engine_set.is_encoder_decoder else (
        f" ({engine_set.precision})" if engine_set.precision else ""
    )


def _bart_args(args: EngineArgs) -> EngineArgs:
    """Ours for the random BART, with what the user asked of the engine otherwise."""
    from vllm.benchmarks.peers.bart_model import random_bart

    return dataclasses.replace(
        args,
        model=str(random_bart()),
        tokenizer=None,
        quantization=None,
        max_model_len=None,
        skip_tokenizer_init=True,
        load_format="auto",
    )
