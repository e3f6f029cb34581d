# SPDX-License-Identifier: Apache-2.0
"""What the benchmarks ask of an engine under test, and this project's own answer to it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm.benchmarks.workload import Workload

if TYPE_CHECKING:
    from vllm.benchmarks.model_size import ModelSize
    from vllm.benchmarks.step_profile import StepProfile
    from vllm.engine.arg_utils import EngineArgs

_WARM_UP_TOKENS = 16
# An idle engine makes memory ready for a while: not on a peer's time.
_IDLE_WORK_S = 0.5


@dataclass(frozen=True)
class EngineInfo:
    """What a figure needs beside it to mean something."""

    name: str
    version: str
    dtype: str
    num_threads: int
    settings: str


@dataclass(frozen=True)
class Run:
    """One pass over a workload: its wall-clock time and the ids that each prompt got."""

    seconds: float
    token_ids: tuple[tuple[int, ...], ...]


class BenchEngine(Protocol):
    """An engine, loaded and ready. It lives in one process and is used by one thread."""

    @property
    def name(self) -> str: ...

    def prepare(self, workload: Workload) -> None:
        """Settles what the engine chooses by the workload's shape, and warms up."""

    def run(self, workload: Workload) -> Run:
        """All prompts at once, greedily, `output_len` tokens for each whatever they are."""

    def info(self) -> EngineInfo:
        """Name, version and settings; asked for after `prepare`."""


class BenchEngineSpec(Protocol):
    """Makes an engine in the process that runs it; picklable, so that it can be sent there."""

    @property
    def name(self) -> str: ...

    @property
    def is_peer(self) -> bool:
        """Whether it is another project's: it runs without what we set for ourselves."""

    def build(self) -> BenchEngine: ...


@dataclass(frozen=True)
class VllmSpec:
    """This project's engine, from the flags that the user gave."""

    engine_args: EngineArgs
    detokenize: bool = False
    name: str = "vllm"
    is_peer: bool = False

    def build(self) -> VllmEngine:
        return VllmEngine(self.engine_args, self.detokenize)


class VllmEngine:
    """`LLM` as a `BenchEngine`."""

    name = "vllm"

    def __init__(self, engine_args: EngineArgs, detokenize: bool = False) -> None:
        from vllm import LLM

        self._llm = LLM.from_engine_args(engine_args)
        self._detokenize = detokenize
        self._dtype = engine_args.dtype
        self._quantization = engine_args.quantization
        cache_config = self._llm.llm_engine.vllm_config.cache_config
        self._caches_prefixes = cache_config.enable_prefix_caching

    def prepare(self, workload: Workload) -> None:
        self.run(Workload(workload.prompts, min(_WARM_UP_TOKENS, workload.output_len)))

    def run(self, workload: Workload) -> Run:
        from vllm import SamplingParams, TokensPrompt

        prompts = [TokensPrompt(prompt_token_ids=list(ids)) for ids in workload.prompts]
        params = SamplingParams(
            temperature=0.0,
            max_tokens=workload.output_len,
            ignore_eos=True,
            detokenize=self._detokenize,
        )
        if self._caches_prefixes:  # the same prompts every round: none is to be found again
            self._llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        time.sleep(_IDLE_WORK_S)
        return Run(seconds, tuple(tuple(output.outputs[0].token_ids) for output in outputs))

    def profile(self, workload: Workload) -> StepProfile:
        """Where the time of a run's steps goes.

        Raises:
            ValueError: the engine core runs in a process of its own.
        """
        from vllm.benchmarks.step_profile import profile_steps

        return profile_steps(self._llm, lambda: self.run(workload))

    def model_size(self) -> ModelSize:
        """Of the model as it is loaded.

        Raises:
            TypeError, ValueError: the engine core runs in a process of its own.
        """
        from vllm.benchmarks.model_size import measure_model

        return measure_model(self._llm)

    def info(self) -> EngineInfo:
        import torch

        from vllm.version import __version__

        settings = "" if self._detokenize else "token ids out"
        weights = f", {self._quantization} weights" if self._quantization else ""
        return EngineInfo(
            self.name, __version__, self._dtype + weights, torch.get_num_threads(), settings
        )
