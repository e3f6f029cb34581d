# SPDX-License-Identifier: Apache-2.0
"""OpenVINO with an encoder-decoder model. Its GenAI library has no pipeline for text to text, so
the two models that optimum-intel exports are run by a loop that only takes the likeliest token."""

from __future__ import annotations

import importlib.metadata
import json
import time
from dataclasses import dataclass

import numpy as np

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions
from vllm.benchmarks.peers.openvino_export import exported
from vllm.benchmarks.workload import Workload
from vllm.platforms.cpu_threads import plan_threads


@dataclass(frozen=True)
class OpenVINOBartSpec:
    options: PeerOptions
    name: str = "openvino-genai"
    is_peer: bool = True

    def build(self) -> OpenVINOBartEngine:
        return OpenVINOBartEngine(self.options)


class OpenVINOBartEngine:
    """Products in bfloat16; the decoder keeps its cache itself, cross-attention's made once."""

    name = "openvino-genai"

    def __init__(self, options: PeerOptions) -> None:
        import openvino

        self._lib = openvino
        self._num_threads = plan_threads().num_threads
        folder = exported(options)
        config = json.loads((folder / "generation_config.json").read_text())
        begin = (config["decoder_start_token_id"], config.get("forced_bos_token_id"))
        self._begin = [token for token in begin if token is not None]
        properties = {
            "INFERENCE_PRECISION_HINT": "bf16",
            "INFERENCE_NUM_THREADS": self._num_threads,
            "PERFORMANCE_HINT": "LATENCY",
        }
        core = openvino.Core()
        encoder, decoder = (
            core.compile_model(folder / f"openvino_{part}_model.xml", "CPU", properties)
            for part in ("encoder", "decoder")
        )
        self._kv_type = decoder.get_property("KV_CACHE_PRECISION").get_type_name()
        self._encoder = encoder.create_infer_request()
        self._decoder = decoder.create_infer_request()

    def prepare(self, workload: Workload) -> None:
        self.run(Workload(workload.prompts, min(4, workload.output_len)))

    def run(self, workload: Workload) -> Run:
        began = time.perf_counter()
        ids, mask = _right_padded(workload.prompts)
        hidden = self._encoder.infer({"input_ids": ids, "attention_mask": mask}).to_tuple()[0]
        count = workload.num_prompts
        self._decoder.reset_state()
        self._decoder.set_tensor("encoder_hidden_states", self._lib.Tensor(hidden.copy()))
        self._decoder.set_tensor("encoder_attention_mask", self._lib.Tensor(mask))
        rows = np.arange(count, dtype=np.int32)
        self._decoder.set_tensor("beam_idx", self._lib.Tensor(rows))
        token_ids, steps = np.tile(np.array(self._begin, dtype=np.int64), (count, 1)), []
        for _ in range(workload.output_len):
            self._decoder.set_tensor("input_ids", self._lib.Tensor(token_ids))
            self._decoder.infer()
            logits = self._decoder.get_output_tensor(0).data
            token_ids = logits[:, -1].argmax(axis=-1)[:, None].astype(np.int64)
            steps.append(token_ids)
        seconds = time.perf_counter() - began
        return Run(seconds, tuple(map(tuple, np.concatenate(steps, axis=1).tolist())))

    def info(self) -> EngineInfo:
        version = importlib.metadata.version("openvino")
        settings = f"KV {self._kv_type}, one batch, exported by optimum-intel, a loop of ours"
        return EngineInfo("openvino", version, "bf16", self._num_threads, settings)


def _right_padded(prompts: tuple[tuple[int, ...], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Ids and mask, both int64 (prompts, longest), padded with 1 on the right."""
    shape = len(prompts), max(map(len, prompts))
    ids, mask = np.ones(shape, dtype=np.int64), np.zeros(shape, dtype=np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)], mask[row, : len(prompt)] = prompt, 1
    return ids, mask
