# SPDX-License-Identifier: Apache-2.0
"""Files in a shared folder: what one engine computed of a prompt another one loads, and goes on as if
it had computed it itself; what cannot be loaded is computed, or fails, as the policy says."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.models.tiny import NATIVE, NUM_NEW_TOKENS, generate, make_model, make_prompts

from vllm import LLM, SamplingParams

MODELS = ("llama", "gemma3", pytest.param("mistral", marks=pytest.mark.slow))
CHUNK = 16


@pytest.fixture(scope="module", params=MODELS)
def model(request, tmp_path_factory) -> tuple[Path, list[list[int]], list[list[int]]]:
    """A folder, prompts (some of which begin as others), and what Transformers makes of them."""
    folder = tmp_path_factory.mktemp(request.param)
    made = make_model(NATIVE[request.param], folder)
    prompts = [list(prompt) for prompt in make_prompts((100,))]
    return folder, prompts, generate(made, prompts)


def make_llm(folder: Path, storage: Path, role: str = "kv_both", **options) -> LLM:
    extra = {"shared_storage_path": str(storage), "load_async": options.pop("load_async", False)}
    transfer = {
        "kv_connector": "ExampleConnector",
        "kv_role": role,
        "kv_connector_extra_config": extra,
        "kv_load_failure_policy": options.pop("policy", "fail"),
    }
    defaults = dict(max_model_len=256, max_num_batched_tokens=64, kv_cache_memory_bytes=4 << 20)
    return LLM(
        model=str(folder), dtype="float32", skip_tokenizer_init=True,
        kv_transfer_config=transfer, **{**defaults, **options},
    )  # fmt: skip


def run(llm: LLM, prompts: list[list[int]], num_new_tokens: int = NUM_NEW_TOKENS):
    params = SamplingParams(temperature=0.0, max_tokens=num_new_tokens, ignore_eos=True)
    inputs = [{"prompt_token_ids": prompt} for prompt in prompts]
    return llm.generate(inputs, params, use_tqdm=False)


def tokens(outputs) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def num_loaded(prompt: list[int]) -> int:
    return min(len(prompt) // CHUNK * CHUNK, len(prompt) - 1)


def files_in(storage: Path) -> list[Path]:
    return sorted(storage.rglob("*.safetensors"))


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_what_one_computes_another_loads(model, tmp_path, load_async):
    """Prompts are computed in chunks by one engine, and loaded by another with pages of another
    size, all together. Guards against tokens in the wrong slots, windows that were cut off, and
    loads that did not happen at all."""
    folder, prompts, expected = model
    producer = make_llm(folder, tmp_path, "kv_producer", max_num_batched_tokens=24, max_num_seqs=8)
    assert tokens(run(producer, prompts, 1)) == [answer[:1] for answer in expected]
    assert len(files_in(tmp_path)) == len({tuple(p[: len(p) // CHUNK * CHUNK]) for p in prompts
                                           if len(p) >= CHUNK})  # fmt: skip
    consumer = make_llm(
        folder, tmp_path, "kv_consumer", block_size=32, load_async=load_async,
        enable_prefix_caching=False,
    )  # fmt: skip
    outputs = run(consumer, prompts)
    assert tokens(outputs) == expected
    assert [output.num_cached_tokens for output in outputs] == [num_loaded(p) for p in prompts]
    consumer.llm_engine.engine_core.call_utility("check_integrity")


def test_behind_a_prefix_in_the_cache(model, tmp_path):
    """The beginning is in the consumer's own cache: only what follows is loaded, and the shared
    pages stay as they are."""
    folder, prompts, expected = model
    run(make_llm(folder, tmp_path, "kv_producer"), prompts, 1)
    consumer = make_llm(folder, tmp_path, "kv_consumer")
    longest = max(prompts, key=len)
    short = longest[:40]
    before = tokens(run(consumer, [short]))
    outputs = run(consumer, prompts)
    assert tokens(outputs) == expected
    assert tokens(run(consumer, [short])) == before
    loaded = {tuple(p): o.num_cached_tokens for p, o in zip(prompts, outputs)}
    assert loaded[tuple(longest)] == num_loaded(longest)


def damage(path: Path, how: str) -> None:
    if how == "missing":
        path.unlink()
    elif how == "cut off":
        path.write_bytes(path.read_bytes()[:-100])
    else:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("how", ["missing", "cut off", "one bit"])
def test_damaged_file_is_computed_anew(model, tmp_path, how, load_async, monkeypatch):
    """Policy recompute: nobody's tokens change, whoever shares pages with the request."""
    folder, prompts, expected = model
    run(make_llm(folder, tmp_path, "kv_producer"), prompts, 1)
    consumer = make_llm(
        folder, tmp_path, "kv_consumer", policy="recompute", load_async=load_async
    )
    paths = files_in(tmp_path)
    damaged = paths[:: 2]
    for path in damaged:
        _damage_later(monkeypatch, consumer, path, how)
    outputs = run(consumer, prompts)
    assert tokens(outputs) == expected
    assert tokens(run(consumer, prompts)) == expected
    consumer.llm_engine.engine_core.call_utility("check_integrity")


def _damage_later(monkeypatch, llm: LLM, path: Path, how: str) -> None:
    """A file that was there when the scheduler looked and is not, or not whole, when it is read."""
    connector = llm.llm_engine.engine_core.engine_core.scheduler.get_kv_connector()
    files = connector._files
    if how != "missing":
        damage(path, how)
        return
    found = type(files).num_stored_tokens

    def look_then_lose(self, keys):
        num_tokens = found(self, keys)
        if num_tokens and self.path(keys[num_tokens // CHUNK - 1]) == path and path.exists():
            path.unlink()
        return num_tokens

    monkeypatch.setattr(type(files), "num_stored_tokens", look_then_lose)


@pytest.mark.parametrize("load_async", [False, True], ids=["sync", "async"])
def test_damaged_file_fails_its_request(model, tmp_path, load_async):
    """Policy fail: that request ends with an error that says why; its neighbours do not."""
    folder, prompts, expected = model
    run(make_llm(folder, tmp_path, "kv_producer"), prompts, 1)
    consumer = make_llm(
        folder, tmp_path, "kv_consumer", policy="fail", load_async=load_async,
        enable_prefix_caching=False,
    )  # fmt: skip
    connector = consumer.llm_engine.engine_core.engine_core.scheduler.get_kv_connector()
    long = [p for p in prompts if len(p) == 100]
    digest = {f.stem for f in files_in(tmp_path)}
    damage(connector._files.path(_key(connector, long[0])), "one bit")
    outputs = run(consumer, prompts)
    assert len(digest) > 1
    for prompt, output, answer in zip(prompts, outputs, expected):
        if prompt == long[0]:
            assert output.outputs[0].finish_reason == "error"
        else:
            assert list(output.outputs[0].token_ids) == answer
    consumer.llm_engine.engine_core.call_utility("check_integrity")
    assert tokens(run(make_llm(folder, tmp_path / "other"), prompts)) == expected


def _key(connector, prompt: list[int]) -> str:
    from tests.v1.core.utils import make_request

    return connector._files.keys(make_request("key", prompt))[-1]


def test_what_cannot_be_stored_harms_nobody(tmp_path, monkeypatch):
    """No room in the folder. Guards against the kind of error that safetensors makes of it, which is
    no OSError, ending the engine."""
    from safetensors import SafetensorError

    make_model(NATIVE["llama"], tmp_path)
    llm = make_llm(tmp_path, tmp_path / "stored", "kv_producer")

    def fail(tensors, path, metadata):
        path.write_bytes(b"half")
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("safetensors.torch.save_file", fail)
    (output,) = run(llm, [list(range(3, 40))], 2)
    assert len(output.outputs[0].token_ids) == 2
    assert not list((tmp_path / "stored").rglob("*.*"))


def test_other_model_other_files(tmp_path):
    """Keys and values of one model are nothing to another, whatever the prompts."""
    prompts = [list(prompt) for prompt in make_prompts()]
    make_model(NATIVE["llama"], tmp_path / "a")
    other = make_model(NATIVE["qwen2"], tmp_path / "b")
    run(make_llm(tmp_path / "a", tmp_path / "files"), prompts, 1)
    before = files_in(tmp_path / "files")
    outputs = run(make_llm(tmp_path / "b", tmp_path / "files"), prompts)
    assert tokens(outputs) == generate(other, prompts)
    assert {path.parent for path in files_in(tmp_path / "files")} > {p.parent for p in before}


@pytest.mark.parametrize(
    "extra", [{}, {"shared_storage_path": 3}, {"shared_storage_path": "x", "load_asynk": True}]
)
def test_options_are_checked(tmp_path, extra):
    """A misspelt option must not be a folder that nobody reads."""
    make_model(NATIVE["llama"], tmp_path)
    transfer = {
        "kv_connector": "ExampleConnector", "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }  # fmt: skip
    with pytest.raises(ValueError, match="shared_storage_path.*load_async"):
        LLM(
            model=str(tmp_path), skip_tokenizer_init=True, max_model_len=64,
            kv_cache_memory_bytes=4 << 20, kv_transfer_config=transfer,
        )  # fmt: skip
