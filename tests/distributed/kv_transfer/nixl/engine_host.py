# SPDX-License-Identifier: Apache-2.0
"""Engines with NIXL in a process of a platform of its own, and how a test talks to them: commands as
JSON lines on standard input, answers as lines that begin with ANSWER. Between commands all engines go
on serving their peers, as servers do."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass, field
from unittest import mock

from tests.plugins_tests.conftest import PluginSite

BYTES_READ = "vllm:nixl_bytes_transferred"
READ_BEGUN = "a read has begun"


@dataclass(frozen=True)
class Setup:
    """An engine. kernel_blocks: tokens in a kernel block of a backend. options: the connector's."""

    model: str
    engine_args: dict = field(default_factory=dict)
    backend_per_kind: dict[str, str] = field(default_factory=dict)
    layout: str = "NHD"
    kernel_blocks: dict[str, int] = field(default_factory=dict)
    policy: str = "fail"
    options: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Made:
    """What an engine registered. r: kernel blocks of a page, by group. runs: runs of bytes of page 1
    of each group; region_bytes: of each region."""

    device: str
    engine_id: str
    backends: dict[str, str]
    r: list[int]
    runs: list[list[list[int]]]
    region_bytes: list[int]


@dataclass(frozen=True)
class Request:
    """Tokens of the prompt; of an encoder-decoder model, of the encoder's text as well."""

    prompt: list[int]
    text: list[int] | None = None
    kv_transfer_params: dict | None = None


@dataclass(frozen=True)
class Answers:
    """By request; logprobs: of its tokens. num_read, bytes_read: requests and bytes that came from
    peers, by the metrics."""

    tokens: list[list[int]]
    logprobs: list[list[float]]
    kv_transfer_params: list[dict | None]
    num_cached: list[int | None]
    finish_reasons: list[str | None]
    num_read: int
    bytes_read: int


class EngineHost:
    """The process, as the test sees it.

    in_torch: ROCM_ATTN and TRITON_ATTN compute in torch, over the same caches: in Triton's interpreter
        a step takes seconds.
    """

    def __init__(
        self, site: PluginSite, log: str = "log", in_torch: bool = True, **env: str
    ) -> None:
        environment = site._environment(
            {"TRITON_INTERPRET": "1", "VLLM_DEBUG_CHECK_INTEGRITY": "1",
             "VLLM_NIXL_SIDE_CHANNEL_PORT": "0", "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
             "OMP_NUM_THREADS": "1", **env}
        )  # fmt: skip
        self._log = site.folder / log
        with self._log.open("w") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.distributed.kv_transfer.nixl.engine_host",
                 "torch" if in_torch else "triton"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True,
                env=environment, cwd=site.folder, bufsize=1,
            )  # fmt: skip

    def make(self, name: str, setup: Setup) -> Made:
        """Starts an engine.

        Raises:
            RuntimeError: it does not start.
        """
        return Made(**self._ask("make", name, setup=asdict(setup)))

    def run(
        self, name: str, requests: list[Request], num_new_tokens: int, keep: bool = False
    ) -> Answers:
        """Generates greedily, all requests at once. keep: pages are kept for a peer."""
        self.start(name, requests, num_new_tokens, keep)
        return self.finish()

    def start(
        self, name: str, requests: list[Request], num_new_tokens: int, keep: bool = False
    ) -> None:
        """As `run`, but the answer is had by `finish`."""
        asked = [asdict(request) for request in requests]
        self._send("run", name, requests=asked, num_new_tokens=num_new_tokens, keep=keep)

    def finish(self) -> Answers:
        """See `start`."""
        return Answers(**self._receive())

    def reset_prefix_cache(self, name: str) -> None:
        """Empties it."""
        self._ask("reset_prefix_cache", name)

    def fail_next_read(self, name: str) -> None:
        """The engine's next read raises what nobody expects."""
        self._ask("fail_next_read", name)

    @property
    def num_reads(self) -> int:
        """Reads that have begun in this process, ended or not."""
        return self.log.count(READ_BEGUN)

    def settle(self, name: str) -> dict:
        """Waits until no request and no peer has pages, and checks the engine's integrity. The ids of
        its peers, what it receives, and bytes of the staging buffer in use."""
        return self._ask("settle", name)

    @property
    def log(self) -> str:
        """What the process has written to standard error so far."""
        return self._log.read_text()

    def close(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.stdin.close()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()
        self.process.stdout.close()

    def _ask(self, *args, **kwargs) -> dict:
        self._send(*args, **kwargs)
        return self._receive()

    def _send(self, command: str, name: str, **arguments) -> None:
        print(json.dumps({"command": command, "name": name, **arguments}), file=self.process.stdin)

    def _receive(self) -> dict:
        for line in self.process.stdout:
            if line.startswith("ANSWER "):
                answer = json.loads(line.removeprefix("ANSWER "))
                if "error" in answer:
                    raise RuntimeError(answer["error"])
                return answer
        raise RuntimeError(f"the process has ended: {self.log[-4000:]}")


# In the process itself


class Engine:
    """One `LLM` with a core in this process."""

    def __init__(self, setup: Setup) -> None:
        from prometheus_client import REGISTRY

        from vllm import LLM
        from vllm.v1.attention.backends.registry import AttentionBackendEnum
        from vllm.v1.attention.backends.utils import set_kv_cache_layout

        set_kv_cache_layout(setup.layout)
        sizes = [
            mock.patch.object(
                AttentionBackendEnum[name].get_class(),
                "get_supported_kernel_block_sizes",
                staticmethod(lambda tokens=tokens: [tokens]),
            )
            for name, tokens in setup.kernel_blocks.items()
        ]
        for patch in sizes:
            patch.start()
        try:
            self.llm = LLM(
                model=setup.model,
                skip_tokenizer_init=True,
                generation_config="vllm",
                attention_config={"backend_per_kind": setup.backend_per_kind},
                disable_log_stats=False,
                kv_transfer_config={
                    "kv_connector": "NixlConnector", "kv_role": "kv_both",
                    "kv_load_failure_policy": setup.policy,
                    "kv_connector_extra_config": setup.options,
                },
                **setup.engine_args,
            )  # fmt: skip
        finally:
            for patch in sizes:
                patch.stop()
        # The registry has the metrics of the engine that was made last.
        self._bytes_read = REGISTRY._names_to_collectors[BYTES_READ]
        self.core = self.llm.llm_engine.engine_core.engine_core
        self._watch_reads()

    def _watch_reads(self) -> None:
        agent = self._worker().agent
        read = agent.read
        self._fails_next_read = False

        def watched(*args):
            if self._fails_next_read:
                self._fails_next_read = False
                raise RuntimeError("forced")
            transfer = read(*args)
            print(READ_BEGUN, file=sys.stderr, flush=True)
            return transfer

        agent.read = watched

    def fail_next_read(self) -> dict:
        self._fails_next_read = True
        return {}

    def _worker(self):
        found = self.llm.collective_rpc(_connector_worker)
        return found[0]

    def make(self) -> Made:
        from vllm.platforms import current_platform

        registration = self._worker().registration
        return Made(
            current_platform.device_name,
            self._worker().engine_id,
            {name: layer.backend for name, layer in registration.layers.items()},
            list(registration.kernel_blocks_per_page),
            [registration.page_runs(g, 1) for g in range(len(registration.kernel_blocks_per_page))],
            [region.nbytes for region in registration.regions],
        )

    def _read_so_far(self) -> tuple[int, int]:
        samples = [s for metric in self._bytes_read.collect() for s in metric.samples]
        return tuple(
            int(sum(s.value for s in samples if s.name == BYTES_READ + end))
            for end in ("_count", "_sum")
        )

    def run(self, requests: list[Request], num_new_tokens: int, keep: bool) -> Answers:
        before = self._read_so_far()
        outputs = self.llm.generate(
            [_prompt(request) for request in requests],
            [_sampling(request, num_new_tokens, keep) for request in requests],
            use_tqdm=False,
        )
        num_read, bytes_read = (now - then for now, then in zip(self._read_so_far(), before))
        return Answers(
            [list(output.outputs[0].token_ids) for output in outputs],
            [_logprobs(output.outputs[0]) for output in outputs],
            [output.kv_transfer_params for output in outputs],
            [output.num_cached_tokens for output in outputs],
            [output.outputs[0].finish_reason for output in outputs],
            num_read,
            bytes_read,
        )

    def reset_prefix_cache(self) -> dict:
        assert self.llm.reset_prefix_cache()
        return {}

    def settle(self) -> dict:
        pool = self.core.scheduler.kv_cache_manager.block_pool
        worker = self._worker()
        deadline = time.monotonic() + 30
        while pool.get_num_free_blocks() != pool.num_usable_blocks or worker.leases:
            assert time.monotonic() < deadline, "pages are not given back"
            self.core.step()
            time.sleep(0.002)
        self.llm.llm_engine.engine_core.call_utility("check_integrity")
        staging = worker._staging
        return {
            "peers": [peer.key.engine_id for peer in worker.peers],
            "receives": sum(len(peer.receives) for peer in worker.peers),
            "staging_in_use": sum(staging._taken.values()) if staging else 0,
        }


def _connector_worker(worker):
    return worker.model_runner.kv_connector.connector.connector_worker


def _prompt(request: Request) -> dict:
    if request.text is None:
        return {"prompt_token_ids": request.prompt}
    return {
        "encoder_prompt": {"prompt_token_ids": [], "multi_modal_data": {"text": request.text}},
        "decoder_prompt": {"prompt_token_ids": request.prompt},
    }


def _logprobs(completion) -> list[float]:
    return [
        of_step[token].logprob
        for token, of_step in zip(completion.token_ids, completion.logprobs or ())
    ]


def _sampling(request: Request, num_new_tokens: int, keep: bool):
    from vllm import SamplingParams

    params = request.kv_transfer_params
    if keep:
        params = {"do_remote_decode": True, "do_remote_prefill": False}
    return SamplingParams(
        temperature=0,
        max_tokens=num_new_tokens,
        logprobs=0,
        ignore_eos=True,
        detokenize=False,
        extra_args={"kv_transfer_params": params} if params else None,
    )


def _serve() -> None:
    lines: queue.Queue[str | None] = queue.Queue()

    def read() -> None:
        for line in sys.stdin:
            lines.put(line)
        lines.put(None)

    threading.Thread(target=read, daemon=True).start()
    engines: dict[str, Engine] = {}
    while True:
        try:
            line = lines.get(timeout=0.003)
        except queue.Empty:
            for engine in engines.values():
                engine.core.step()
            continue
        if line is None:
            os._exit(0)  # Agents that wait for dead peers' connections must not keep it.
        message = json.loads(line)
        command, name = message.pop("command"), message.pop("name")
        try:
            if command == "make":
                engines[name] = Engine(Setup(**message["setup"]))
                answer = asdict(engines[name].make())
            elif command == "run":
                message["requests"] = [Request(**one) for one in message["requests"]]
                answer = asdict(engines[name].run(**message))
            else:
                answer = getattr(engines[name], command)(**message)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print("ANSWER", json.dumps(answer), flush=True)


def _compute_in_torch() -> None:
    from vllm.v1.attention.backends.torch_attn import TorchAttentionImpl
    from vllm.v1.attention.backends.triton_attn import TritonAttentionImpl

    for name in ("_take_cache", "_write", "_attend"):
        setattr(TritonAttentionImpl, name, getattr(TorchAttentionImpl, name))


if __name__ == "__main__":
    if sys.argv[1] == "torch":
        _compute_in_torch()
    _serve()
