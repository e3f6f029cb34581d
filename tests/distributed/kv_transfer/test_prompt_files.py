# SPDX-License-Identifier: Apache-2.0
"""Files that hold something else than they should cost their own request's load, and nothing more."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from tests.distributed.kv_transfer.test_example_connector import files_in, make_llm, run, tokens
from tests.models.tiny import NATIVE, generate, make_model
from vllm.distributed.kv_transfer.kv_connector.v1.prompt_files import _checksum

NUM_NEW_TOKENS = 4


def rewrite(path: Path, change) -> None:
    """Lets `change` have tensors and metadata, and writes them with a right checksum."""
    with safe_open(path, "pt") as file:
        metadata = dict(file.metadata())
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    change(tensors, metadata)
    metadata["crc32"] = str(_checksum(tensors))
    save_file(tensors, path, metadata)


def replace_first(make):
    def change(tensors, metadata) -> None:
        name = sorted(tensors)[0]
        tensors[name] = make(tensors[name])

    return change


def set_metadata(name: str, value: str | None):
    def change(tensors, metadata) -> None:
        for key in [key for key in metadata if key.startswith(name)]:
            del metadata[key]
            if value is not None:
                metadata[key] = value

    return change


DAMAGES = {
    "first token is no number": set_metadata("first.", "x"),
    "first token is not said": set_metadata("first.", None),
    "another format": set_metadata("format", "1"),
    "a layer is missing": lambda tensors, metadata: tensors.pop(sorted(tensors)[0]),
    "nothing but metadata": lambda tensors, metadata: tensors.clear(),
    "fewer tokens": replace_first(lambda tensor: tensor[:-9].clone()),
    "no tokens": replace_first(lambda tensor: tensor[:0].clone()),
    "no dimensions": replace_first(lambda tensor: torch.tensor(1.0)),
    "another shape": replace_first(lambda tensor: tensor[..., :-1].clone()),
    "another dtype": replace_first(lambda tensor: tensor.to(torch.bfloat16)),
}


@pytest.fixture(scope="module")
def stored(tmp_path_factory):
    """A folder with a model and one with the files of prompts; a file for each damage and for a few
    more. Returns the folders, prompts and answers."""
    folder, storage = tmp_path_factory.mktemp("llama"), tmp_path_factory.mktemp("files")
    reference = make_model(NATIVE["llama"], folder)
    prompts = [[3 + i, *range(40, 40 + 32)] for i in range(len(DAMAGES) + 4)]
    expected = [answer[:NUM_NEW_TOKENS] for answer in generate(reference, prompts)]
    producer = make_llm(folder, storage, "kv_producer")
    paths = []
    for prompt in prompts:
        run(producer, [prompt], 1)
        paths += [path for path in files_in(storage) if path not in paths]
    for path, change in zip(paths, DAMAGES.values()):
        rewrite(path, change)
    junk, folder_there, of_another, good = paths[len(DAMAGES) :]
    junk.write_bytes(b"no safetensors")
    folder_there.unlink()
    folder_there.mkdir()
    shutil.copy(good, of_another)
    return folder, storage, prompts, expected


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_each_costs_its_own_load(stored, load_async, caplog_vllm):
    """All at once, computed anew where they cannot be loaded. Guards against an exception that ends
    the engine, pages that were filled in part, and another prompt's keys and values."""
    folder, storage, prompts, expected = stored
    consumer = make_llm(
        folder, storage, "kv_consumer", policy="recompute", load_async=load_async,
        enable_prefix_caching=False,
    )  # fmt: skip
    assert tokens(run(consumer, prompts, NUM_NEW_TOKENS)) == expected
    said = [r.getMessage() for r in caplog_vllm.records if "from a file" in r.getMessage()]
    assert len(said) == len(prompts) - 1 and not any("\n" in line for line in said)
    consumer.llm_engine.engine_core.call_utility("check_integrity")
