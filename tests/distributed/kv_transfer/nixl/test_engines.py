# SPDX-License-Identifier: Apache-2.0
"""Two engines and real NIXL: what the one computed of prompts the other goes on with, token for token
as one engine alone, with pages of another size, and every page comes back."""

from __future__ import annotations

import importlib.util
import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.models.tiny import NATIVE, VOCAB_SIZE, make_model

from vllm import LLM, SamplingParams

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed"),
]
BART = Path(__file__).parents[3] / "models" / "bart"
TRANSFER = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
REMOTE_DECODE = {"do_remote_decode": True, "do_remote_prefill": False}
NUM_TOKENS = 12


def make_llm(model: Path, transfer: dict | None, **options) -> LLM:
    return LLM(
        model=str(model), dtype="float32", max_num_batched_tokens=64,
        kv_cache_memory_bytes=4 << 20, kv_transfer_config=transfer, **options,
    )  # fmt: skip


def run(llm: LLM, prompts, num_tokens: int, params: list[dict | None], ignore_eos: bool):
    asked = [
        SamplingParams(
            temperature=0.0, max_tokens=num_tokens, ignore_eos=ignore_eos,
            extra_args=None if each is None else {"kv_transfer_params": each},
        )
        for each in params
    ]  # fmt: skip
    return llm.generate(prompts, asked, use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


@contextmanager
def stepping(llm: LLM) -> Iterator[None]:
    """An engine without requests goes on serving its peer, as in a server."""
    core = llm.llm_engine.engine_core.engine_core
    stop = threading.Event()

    def step() -> None:
        while not stop.is_set():
            core.step()
            time.sleep(0.002)

    thread = threading.Thread(target=step)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


@pytest.mark.parametrize("name", ["llama", "gemma3", "bart"])
def test_prefill_and_decode_apart(name, tmp_path, monkeypatch):
    """One kind of attention, windows beside it, and an encoder's output."""
    if name == "bart":
        model, options = BART, {"max_model_len": 64}
        texts = ["3rd of March 1999", "17 April 2024", "Friday, 5 June 1987"]
        prompts = [{"encoder_prompt": {"prompt": t}, "decoder_prompt": None} for t in texts * 2]
    else:
        make_model(NATIVE[name], tmp_path / "model")
        model, options = tmp_path / "model", {"max_model_len": 256, "skip_tokenizer_init": True}
        rng = random.Random(0)
        lengths = (5, 15, 16, 17, 40, 64, 100, 101)
        prompts = [
            {"prompt_token_ids": [rng.randrange(3, VOCAB_SIZE) for _ in range(n)]} for n in lengths
        ]
    ignore_eos, nothing = name != "bart", [None] * len(prompts)
    alone = make_llm(model, None, **options)
    expected = tokens(run(alone, prompts, NUM_TOKENS, nothing, ignore_eos))

    engines = []
    for port, block_size in ((5711, 16), (5712, 32)):
        monkeypatch.setenv("VLLM_NIXL_SIDE_CHANNEL_PORT", str(port))
        engines.append(make_llm(model, TRANSFER, block_size=block_size, **options))
    prefill, decode = engines
    try:
        first = run(prefill, prompts, 1, [REMOTE_DECODE] * len(prompts), ignore_eos)
        with stepping(prefill):
            params = [output.kv_transfer_params for output in first]
            outputs = run(decode, prompts, NUM_TOKENS, params, ignore_eos)
            assert tokens(outputs) == expected
            # All but the last token of each prompt came from the other engine.
            assert [o.num_cached_tokens for o in outputs] == [
                len(o.prompt_token_ids) - 1 for o in outputs
            ]
            pools = [
                e.llm_engine.engine_core.engine_core.scheduler.kv_cache_manager.block_pool
                for e in engines
            ]
            for _ in range(1000):
                if all(pool.get_num_free_blocks() == pool.num_usable_blocks for pool in pools):
                    break
                time.sleep(0.02)
            assert all(pool.get_num_free_blocks() == pool.num_usable_blocks for pool in pools)
    finally:
        for engine in engines:
            engine.llm_engine.engine_core.shutdown()
