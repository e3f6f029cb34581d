# SPDX-License-Identifier: Apache-2.0
"""llama.cpp by llama-cpp-python: a batch of sequences over its C API, argmax on the host."""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np

from vllm.benchmarks.engine import EngineInfo, Run
from vllm.benchmarks.peers import PeerOptions, common_prefix_len
from vllm.benchmarks.peers.model_files import gguf_file
from vllm.benchmarks.workload import Workload
from vllm.platforms.cpu_threads import plan_threads

_KINDS = {"bf16": ("BF16",), "int8": ("Q8_0",), "int4": ("Q4_1", "Q4_0")}
_BATCH_TOKENS = 2048
_LEAST_SHARED_TOKENS = 64


@dataclass(frozen=True)
class LlamaCppSpec:
    """`kind`: of the weights, as GGUF names it."""

    options: PeerOptions
    kind: str
    name: str = "llama-cpp"
    is_peer: bool = True

    def build(self) -> LlamaCppEngine:
        return LlamaCppEngine(self.options, self.kind, self.name)


def llama_cpp_specs(options: PeerOptions) -> list[LlamaCppSpec]:
    """One for each kind of weights that the precision has; the first bears the plain name."""
    first, *others = _KINDS[options.precision]
    rest = (LlamaCppSpec(options, kind, f"llama-cpp-{kind.lower()}") for kind in others)
    return [LlamaCppSpec(options, first), *rest]


class LlamaCppEngine:
    """Greedy decoding of all sequences together. A context as large as a workload needs; prompts
    that begin alike are computed once where that is worth telling it (`seq_cp`)."""

    def __init__(self, options: PeerOptions, kind: str, name: str) -> None:
        import llama_cpp

        self.name = name
        self._lib = llama_cpp
        self._kind = kind
        self._num_threads = plan_threads().num_threads
        self._log = llama_cpp.llama_log_callback(lambda level, text, data: None)
        llama_cpp.llama_log_set(self._log, None)
        llama_cpp.llama_backend_init()
        params = llama_cpp.llama_model_default_params()
        path = str(gguf_file(options.model, self._kind))
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), params)
        if not self._model:
            raise RuntimeError(f"llama.cpp cannot load {path}")
        vocab = llama_cpp.llama_model_get_vocab(self._model)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(vocab)
        self._context = None

    def prepare(self, workload: Workload) -> None:
        lib = self._lib
        if self._context:
            lib.llama_free(self._context)
        params = lib.llama_context_default_params()
        params.n_ctx = workload.num_input_tokens + workload.num_output_tokens
        params.n_batch = _BATCH_TOKENS
        params.n_seq_max = workload.num_prompts
        params.n_threads = params.n_threads_batch = self._num_threads
        params.kv_unified = True
        self._context = lib.llama_init_from_model(self._model, params)
        if not self._context:
            raise RuntimeError("llama.cpp cannot make a context for the workload")
        self.run(Workload(workload.prompts, min(4, workload.output_len)))

    def run(self, workload: Workload) -> Run:
        lib, prompts = self._lib, workload.prompts
        memory = lib.llama_get_memory(self._context)
        lib.llama_memory_clear(memory, True)
        batch = lib.llama_batch_init(_BATCH_TOKENS, 0, 1)
        began = time.perf_counter()
        tokens = [self._prefill(batch, memory, prompts)]
        lengths = [len(prompt) for prompt in prompts]
        for step in range(workload.output_len - 1):
            entries = [
                (int(token), length + step, seq, True)
                for seq, (token, length) in enumerate(zip(tokens[-1], lengths, strict=True))
            ]
            tokens.append(self._decode(batch, entries))
        seconds = time.perf_counter() - began
        lib.llama_batch_free(batch)
        return Run(seconds, tuple(map(tuple, np.stack(tokens, axis=1).tolist())))

    def _prefill(self, batch, memory, prompts) -> np.ndarray:
        shared = common_prefix_len(prompts)
        if shared < _LEAST_SHARED_TOKENS:
            shared = 0
        entries = [(token, place, 0, False) for place, token in enumerate(prompts[0][:shared])]
        for begin in range(0, shared, _BATCH_TOKENS):
            self._decode(batch, entries[begin : begin + _BATCH_TOKENS])
        if shared:
            for seq in range(1, len(prompts)):
                self._lib.llama_memory_seq_cp(memory, 0, seq, 0, shared)
        entries = [
            (token, place, seq, place == len(prompt) - 1)
            for seq, prompt in enumerate(prompts)
            for place, token in enumerate(prompt)
            if place >= shared
        ]
        parts = [
            self._decode(batch, entries[begin : begin + _BATCH_TOKENS])
            for begin in range(0, len(entries), _BATCH_TOKENS)
        ]
        return np.concatenate(parts)

    def _decode(self, batch, entries) -> np.ndarray:
        """Tokens after the entries (token, position, sequence, wanted) that are wanted."""
        lib = self._lib
        batch.n_tokens = len(entries)
        wanted = []
        for i, (token, position, seq, is_wanted) in enumerate(entries):
            batch.token[i], batch.pos[i] = token, position
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, seq
            batch.logits[i] = is_wanted
            if is_wanted:
                wanted.append(i)
        if lib.llama_decode(self._context, batch):
            raise RuntimeError("llama_decode failed")
        rows = [lib.llama_get_logits_ith(self._context, i) for i in wanted]
        shape = (self._vocab_size,)
        return np.array([np.ctypeslib.as_array(row, shape).argmax() for row in rows], dtype=np.int64)

    def info(self) -> EngineInfo:
        settings = "KV f16, one context for the batch, shared beginnings told by hand"
        return EngineInfo(
            self.name, self._lib.__version__, self._kind.lower(), self._num_threads, settings
        )
