# SPDX-License-Identifier: Apache-2.0
"""A KV connector from a package of its own, by both of the ways in: it is used, in a model of one
kind of attention and in one with windows, for which it has not been made."""

from __future__ import annotations

import pytest
from tests.models.tiny import NATIVE, generate, make_model, make_prompts

CODE = """
    import json, sys
    from vllm import LLM, SamplingParams

    def answers(llm):
        params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
        inputs = [{{"prompt_token_ids": ids}} for ids in {prompts!r}]
        return [list(o.outputs[0].token_ids) for o in llm.generate(inputs, params, use_tqdm=False)]

    def make():
        return LLM(
            model={model!r}, dtype="float32", skip_tokenizer_init=True, max_model_len=256,
            kv_cache_memory_bytes=4 << 20, enable_prefix_caching=False,
            kv_transfer_config={transfer!r},
        )

    first = answers(make())
    from vllm_memory_connector.connector import LOADED
    num_before = sum(LOADED)
    second = answers(make())
    print(json.dumps([first, second, num_before, sum(LOADED)]))
"""


def run(site, folder, prompts, transfer):
    import json

    code = CODE.format(prompts=prompts, model=str(folder), transfer=transfer)
    done = site.run(code, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("name", "by_module_path"),
    [
        ("llama", False),
        ("gemma3", True),
        pytest.param("llama", True, marks=pytest.mark.slow),
        pytest.param("gemma3", False, marks=pytest.mark.slow),
    ],
)
def test_pages_of_one_engine_in_another(site, tmp_path, name, by_module_path):
    """Tokens are Transformers'; the second engine loads whole pages, each once."""
    site.install("vllm_memory_connector")
    model = make_model(NATIVE[name], tmp_path / "model")
    prompts = [list(prompt) for prompt in make_prompts()]
    transfer = {"kv_connector": "MemoryConnector", "kv_role": "kv_both"}
    if by_module_path:
        transfer["kv_connector_module_path"] = "vllm_memory_connector.connector"
    first, second, num_before, num_after = run(site, tmp_path / "model", prompts, transfer)
    assert first == second == generate(model, prompts)
    # Two prompts begin alike, but run in the same step: nothing is stored before it has ended.
    assert num_before == 0
    assert num_after == sum((len(prompt) - 1) // 16 for prompt in prompts)


def test_module_that_is_not_there(site, tmp_path):
    """One line that names it, and no engine."""
    make_model(NATIVE["llama"], tmp_path)
    transfer = {
        "kv_connector": "MemoryConnector", "kv_role": "kv_both",
        "kv_connector_module_path": "vllm_memory_connector.connektor",
    }  # fmt: skip
    site.install("vllm_memory_connector")
    code = CODE.format(prompts=[[5, 6]], model=str(tmp_path), transfer=transfer)
    done = site.run(code, OMP_NUM_THREADS="1")
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "KV connector MemoryConnector: module vllm_memory_connector.connektor cannot" in last
