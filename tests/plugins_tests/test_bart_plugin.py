# SPDX-License-Identifier: Apache-2.0
"""A model plugin with an encoder, written for upstream's interfaces alone, in the place of the BART
that is built in."""

from __future__ import annotations

import json
import socket

import httpx
import pytest
from tests.plugins_tests.test_minimal_platform import wait_until_healthy
from tests.models.bart_dates import examples
from tests.models.make_bart import FOLDER

DATES = [text for text, _ in examples(8, 2, held_out=True)]
GENERATE = """
    import json
    from vllm import LLM, SamplingParams

    texts, folder = json.loads({texts!r}), {folder!r}
    llm = LLM(folder, dtype="float32", kv_cache_memory_bytes=8 << 20)
    params = SamplingParams(temperature=0, max_tokens=14)
    pairs = [
        {{
            "encoder_prompt": {{"prompt": "", "multi_modal_data": {{"text": text}}}},
            "decoder_prompt": "<s>",
        }}
        for text in texts
    ]
    of_pairs = llm.generate(pairs, params, use_tqdm=False)
    of_texts = llm.generate(texts, params, use_tqdm=False)
    print("RESULT" + json.dumps({{
        "class": llm.apply_model(lambda model: type(model).__module__)[0],
        "hook": llm.llm_engine.vllm_config.additional_config.get("bart_plugin"),
        "pairs": [list(o.outputs[0].token_ids) for o in of_pairs],
        "texts": [list(o.outputs[0].token_ids) for o in of_texts],
        "decoder": [o.prompt_token_ids for o in (*of_pairs, *of_texts)],
    }}))
"""


def by_transformers(texts: list[str]) -> list[list[int]]:
    """Greedy tokens behind start and forced BOS, EOS included."""
    import torch
    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    model = AutoModelForSeq2SeqLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    rows = []
    for text in texts:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.inference_mode():
            output = model.generate(
                ids, attention_mask=torch.ones_like(ids), num_beams=1, max_length=16
            )
        rows.append(output[0, 2:].tolist())
    return rows


@pytest.fixture
def with_plugin(site):
    site.install("vllm_bart_plugin")
    return site


def test_it_registers_in_the_place_of_ours(with_plugin):
    """Fault: a name that a plugin imports is not there, or means something else; what it puts into
    the tables of architectures is not looked at."""
    code = """
        from vllm.plugins import load_general_plugins

        load_general_plugins()
        load_general_plugins()
        import vllm.config.vllm as config
        from vllm.model_executor.models.config import MODELS_CONFIG_MAP
        from vllm.model_executor.models.registry import ModelRegistry

        name = "BartForConditionalGeneration"
        assert name in config.DEFAULT_V2_MODEL_RUNNER_ARCHITECTURES
        print(MODELS_CONFIG_MAP[name].__module__, ModelRegistry.resolve_model_cls(name, None)[0])
    """
    printed = with_plugin.output(code)
    assert printed == "vllm_bart_plugin.config <class 'vllm_bart_plugin.bart." \
        "BartForConditionalGeneration'>"


@pytest.mark.slow
def test_it_generates_what_transformers_does(with_plugin):
    """Token for token, greedy, float32, from pairs and from plain texts."""
    code = GENERATE.format(texts=json.dumps(DATES), folder=str(FOLDER))
    printed = with_plugin.output(code)
    result = json.loads(printed.partition("RESULT")[2].splitlines()[0])
    assert result["class"] == "vllm_bart_plugin.bart" and result["hook"] is True
    assert result["decoder"] == [[2, 0]] * (2 * len(DATES))
    expected = by_transformers(DATES)
    assert result["pairs"] == expected and result["texts"] == expected


@pytest.mark.slow
def test_it_is_served(with_plugin):
    """Both processes of a server take the plugin's classes: one its processor, one its model."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    command = ["serve", str(FOLDER), "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--kv-cache-memory-bytes", "8M"]
    with with_plugin.running("-m", "vllm.entrypoints.cli.main", *command) as server:
        wait_until_healthy(url, server, with_plugin.log)
        request = {"prompt": DATES[:2], "return_token_ids": True}
        answer = httpx.post(f"{url}/v1/completions", json=request, timeout=120)
        assert answer.status_code == 200, answer.text
        choices = answer.json()["choices"]
        assert [choice["token_ids"] for choice in choices] == by_transformers(DATES[:2])
        assert choices[0]["prompt_token_ids"] == [2, 0]
        ids = httpx.post(f"{url}/v1/completions", json={"prompt": [0, 5, 2]}, timeout=120)
        assert ids.status_code == 400 and "text must be a string" in ids.text
