# SPDX-License-Identifier: Apache-2.0
"""Runs in the environment of one vLLM: every cell of one layout, a line of JSON each.

    VLLM_KV_CACHE_LAYOUT=NHD python probe.py NHD
"""

import itertools
import json
import os
import re
import sys
import tempfile
from typing import Any

import judge
import torch
import vllm
from caches import HEAD_SIZE, NUM_PAGES, Case, importable, lay_out, share_a_device
from connector import PAGES, transfers
from vllm.config import KVTransferConfig, set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.engine.arg_utils import EngineArgs
from warned import Warned

MARK = "MATRIX "
HEADS, RATIOS = (1, 2, 8), (1, 4)
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "head_dim": HEAD_SIZE,
    "vocab_size": 128,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# What a refusal has to speak of so that its reader knows what to change.
_CLEAR = re.compile(r"layout|layer|backend|HND|NHD|K/V|blocks-first", re.IGNORECASE)
_REFUSALS = (ValueError, NotImplementedError, AssertionError, RuntimeError)
_VOLATILE = re.compile(r"0x[0-9a-f]+|\b\d{9,}\b")


def main() -> None:
    torch.set_num_threads(1)  # Tensors are small.
    with tempfile.TemporaryDirectory() as folder:
        configs = {heads: make_config(heads, folder) for heads in HEADS}
        with set_current_vllm_config(configs[HEADS[0]]):
            cases = announce(sys.argv[1])
            start_groups(folder)
        warned = Warned()
        for case in cases:
            with set_current_vllm_config(configs[case.heads]):
                say(cell(case, configs[case.heads], warned))


def start_groups(folder: str) -> None:
    """Groups of one process, where a release wants any before connectors are made."""
    if hasattr(parallel_state, "init_distributed_environment"):
        rendezvous = f"file://{folder}/rendezvous"
        parallel_state.init_distributed_environment(1, 0, rendezvous, 0, "gloo")
        parallel_state.ensure_model_parallel_initialized(1, 1)


def announce(layout: str) -> list[Case]:
    """All cells, said how many."""
    usable, missing = importable()
    cases = [
        case
        for heads, ratio in itertools.product(HEADS, RATIOS)
        for pair in itertools.product(usable, usable)
        if share_a_device(pair)
        and (case := Case(pair, heads, layout, ratio)).kernel_block_size is not None
    ]
    say({"version": vllm.__version__, "backends": usable, "missing": missing, "cells": len(cases)})
    return cases


def make_config(heads: int, folder: str) -> Any:
    """That of an engine with a NIXL connector and a model of so many KV heads."""
    model = os.path.join(folder, str(heads))
    os.mkdir(model)
    with open(os.path.join(model, "config.json"), "w") as file:
        json.dump({**MODEL, "num_key_value_heads": heads}, file)
    transfer = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu"
    )
    return EngineArgs(
        model=model,
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=128,
        num_gpu_blocks_override=NUM_PAGES,
        kv_transfer_config=transfer,
    ).create_engine_config()


def say(what: dict[str, Any]) -> None:
    print(MARK + json.dumps(what), flush=True)


def cell(case: Case, vllm_config: Any, warned: Warned) -> dict[str, Any]:
    """Both verdicts of a cell, and what it was warned of meanwhile."""
    warned.forget()
    found = verdicts(case, vllm_config)
    found["warning"] = _VOLATILE.sub("...", warned.text())[:400]
    for part in ("views", "connector"):
        if found[part] == judge.WRONG and found["warning"]:
            found[part] = judge.WARNED
    return found


def verdicts(case: Case, vllm_config: Any) -> dict[str, Any]:
    """What is wrong already is not registered."""
    found = {
        "pair": case.backends,
        "heads": case.heads,
        "layout": case.layout,
        "r": case.ratio,
        "views": judge.RIGHT,
        "why": "",
        "connector": "",
        "connector_why": "",
    }
    vllm_config.cache_config.block_size = case.specs()[0].block_size
    try:
        caches = lay_out(case, vllm_config)
    except Exception as error:
        found["views"], found["why"] = raised(error)
        return found
    harm = judge.find_harm(caches.layers, NUM_PAGES)
    if harm:
        found["views"], found["why"] = judge.WRONG, harm
        return found
    try:
        regions, runs = transfers(caches, vllm_config)
    except Exception as error:
        found["connector"], found["connector_why"] = raised(error)
        return found
    harm = judge.find_wrong_transfer(caches.layers, PAGES, regions, runs)
    found["connector"] = judge.WRONG if harm else judge.RIGHT
    found["connector_why"] = harm or ""
    return found


def raised(error: Exception) -> tuple[str, str]:
    """A refusal says what about layers, backends or layouts is wrong; anything else is a crash."""
    lines = str(error).strip().splitlines()
    message = _VOLATILE.sub("...", lines[0] if lines else "")
    clear = isinstance(error, _REFUSALS) and _CLEAR.search(message)
    return (judge.REFUSED if clear else judge.CRASHED), f"{type(error).__name__}: {message}"[:300]


if __name__ == "__main__":
    main()
