# SPDX-License-Identifier: Apache-2.0
"""CTranslate2's `Generator`."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.model_files import cached, hf_folder
from vllm.benchmarks.workload import Workload
from vllm.platforms.cpu_threads import plan_threads

_BEST_TYPES = ("bfloat16", "float32")


@dataclass(frozen=True)
class CTranslate2Spec:
    options: PeerOptions
    name: str = "ctranslate2"
    is_peer: bool = True

    def build(self) -> CTranslate2Engine:
        return CTranslate2Engine(self.options)


def _convert(folder: Path, path: Path) -> None:
    from ctranslate2.converters import TransformersConverter

    TransformersConverter(str(folder)).convert(str(path), quantization="float32")


class CTranslate2Engine:
    """All prompts in one batch, by the first of bfloat16 and float32 that this CPU's build has."""

    name = "ctranslate2"

    def __init__(self, options: PeerOptions) -> None:
        import ctranslate2
        from tokenizers import Tokenizer

        folder = hf_folder(options.model, options.dtype)
        model = cached(options.model, "ctranslate2", lambda path: _convert(folder, path))
        supported = ctranslate2.get_supported_compute_types("cpu")
        wanted = ("int8",) if options.precision == "int8" else _BEST_TYPES
        self._type = next(name for name in wanted if name in supported)
        self._version = ctranslate2.__version__
        self._num_threads = plan_threads().num_threads
        self._generator = ctranslate2.Generator(
            str(model), compute_type=self._type, intra_threads=self._num_threads, inter_threads=1
        )
        self._id_to_token = Tokenizer.from_file(str(folder / "tokenizer.json")).id_to_token

    def prepare(self, workload: Workload) -> None:
        self.run(Workload(workload.prompts, min(4, workload.output_len)))

    def run(self, workload: Workload) -> Run:
        prompts = [[self._id_to_token(token) for token in ids] for ids in workload.prompts]
        began = time.perf_counter()
        results = self._generator.generate_batch(
            prompts,
            max_length=workload.output_len,
            min_length=workload.output_len,
            sampling_topk=1,
            include_prompt_in_result=False,
            end_token=[],
        )
        seconds = time.perf_counter() - began
        return Run(seconds, tuple(tuple(result.sequences_ids[0]) for result in results))

    def info(self) -> EngineInfo:
        settings = f"KV {'float32' if self._type in ('int8', 'float32') else self._type}, one batch"
        return EngineInfo(self.name, self._version, self._type, self._num_threads, settings)
