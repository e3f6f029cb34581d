# SPDX-License-Identifier: Apache-2.0
"""Upstream's vLLM for CPUs, from an environment of its own: a script run by that interpreter
answers requests, one line of JSON each way."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from dataclasses import dataclass

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.model_files import hf_folder
from vllm.benchmarks.workload import Workload
from vllm.platforms.cpu_threads import plan_threads

_MARK = "@@bench "
_SCRIPT = r"""
import json, os, sys, time
out = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)
def say(value):
    out.write("@@bench " + json.dumps(value) + "\n")
def main():
    import vllm
    from vllm import LLM, SamplingParams
    options = json.loads(sys.argv[1])
    llm = LLM(enable_prefix_caching=True, **options)
    say({"version": vllm.__version__})
    for line in sys.stdin:
        task = json.loads(line)
        prompts = [{"prompt_token_ids": ids} for ids in task["prompts"]]
        params = SamplingParams(temperature=0.0, max_tokens=task["output_len"], ignore_eos=True,
                                detokenize=False)
        llm.reset_prefix_cache()
        began = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - began
        say({"seconds": seconds, "ids": [list(o.outputs[0].token_ids) for o in outputs]})
if __name__ == "__main__":
    main()
"""


def upstream_settings() -> dict[str, str]:
    """Environment variables that give it the same cores as the others have."""
    plan = plan_threads()
    cpus = ",".join(map(str, plan.cpus[: plan.num_threads]))
    return {"VLLM_CPU_KVCACHE_SPACE": "4", "VLLM_CPU_OMP_THREADS_BIND": cpus}


@dataclass(frozen=True)
class UpstreamSpec:
    options: PeerOptions
    name: str = "upstream"
    is_peer: bool = True

    def build(self) -> UpstreamEngine:
        return UpstreamEngine(self.options)


class UpstreamEngine:
    """Its `LLM`, compiled, with automatic prefix caching, emptied before each run. It has all the
    cores that the others have: by itself it leaves one of them to its front end.

    Raises:
        RuntimeError: its process ended; the last line that it wrote.
    """

    name = "upstream"

    def __init__(self, options: PeerOptions) -> None:
        self._num_threads = plan_threads().num_threads
        self._dtype = options.dtype
        settings = {
            "model": str(hf_folder(options.model, options.dtype)),
            "dtype": options.dtype,
            "max_model_len": options.max_model_len,
        }
        environment = {**os.environ, **upstream_settings()}
        environment.pop("PYTHONPATH", None)  # its vllm, not ours
        self._log = tempfile.TemporaryFile("w+")
        self._process = subprocess.Popen(
            [options.upstream_python, "-c", _SCRIPT, json.dumps(settings)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=environment,
            cwd="/",
        )
        self._version = self._answer()["version"]

    def _answer(self) -> dict:
        for line in self._process.stdout:
            if line.startswith(_MARK):
                return json.loads(line.removeprefix(_MARK))
        status = self._process.wait()
        self._log.seek(0)
        lines = [line.strip() for line in self._log if line.strip()]
        raise RuntimeError(f"upstream's process ended with exit status {status}: {lines[-1:]}")

    def prepare(self, workload: Workload) -> None:
        self.run(Workload(workload.prompts, min(4, workload.output_len)))

    def run(self, workload: Workload) -> Run:
        prompts = [list(ids) for ids in workload.prompts]
        task = {"prompts": prompts, "output_len": workload.output_len}
        self._process.stdin.write(json.dumps(task) + "\n")
        self._process.stdin.flush()
        answer = self._answer()
        return Run(answer["seconds"], tuple(map(tuple, answer["ids"])))

    def info(self) -> EngineInfo:
        settings = f"KV {self._dtype}, compiled, automatic prefix caching"
        return EngineInfo(self.name, self._version, self._dtype, self._num_threads, settings)
