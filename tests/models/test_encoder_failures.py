# SPDX-License-Identifier: Apache-2.0
"""An encoder input that the model makes nothing of ends the requests that have it, and no others."""

from __future__ import annotations

import torch
from tests.models.tiny_encoder_decoder import (
    START,
    enc_dec_prompts,
    generate,
    make_bart,
    make_llm,
    random_ids,
    run,
)

from vllm import SamplingParams

NUM_NEW_TOKENS = 8
TEXTS = random_ids(20, 20, 33, 20, 17)
PROMPT = [START, *random_ids(20, seed=1)[0]]
BAD = 1


class Refusing:
    """The model's encoder, but for inputs with the text `TEXTS[BAD]`."""

    def __init__(self, embed) -> None:
        self.embed = embed

    def __call__(self, **kwargs):
        bad = torch.tensor(TEXTS[BAD])
        for values in kwargs.values():
            if any(torch.equal(one.flatten(), bad) for one in values):
                raise RuntimeError("forced\nby the test")
        return self.embed(**kwargs)


def test_one_bad_input_among_good_ones(tmp_path):
    """Inputs of one shape are encoded together, and one of them cannot be; another request has the
    same input and would use its pages. Guards against an engine that ends, neighbours that fail, and
    pages or stored files of what was never computed that later requests find."""
    folder = make_bart(tmp_path / "bart")
    texts = [*TEXTS, TEXTS[BAD]]
    prompts = [PROMPT] * len(texts)
    expected = generate(folder, texts, prompts, NUM_NEW_TOKENS)
    files = {"shared_storage_path": str(tmp_path / "files")}
    transfer = dict(
        kv_connector="ExampleConnector", kv_role="kv_producer", kv_connector_extra_config=files
    )
    llm = make_llm(
        folder, max_model_len=64, num_gpu_blocks_override=200, kv_transfer_config=transfer
    )
    model = llm.apply_model(lambda model: model)[0]
    embed, model.embed_multimodal = model.embed_multimodal, Refusing(model.embed_multimodal)
    params = SamplingParams(temperature=0, max_tokens=NUM_NEW_TOKENS, ignore_eos=True)
    outputs = llm.generate(enc_dec_prompts(texts, prompts), params, use_tqdm=False)
    for text, output, answer in zip(texts, outputs, expected):
        if text == TEXTS[BAD]:
            assert output.outputs[0].finish_reason == "error" and not output.outputs[0].token_ids
        else:
            assert list(output.outputs[0].token_ids) == answer
    assert len(list((tmp_path / "files").rglob("*.safetensors"))) == len(TEXTS) - 1
    model.embed_multimodal = embed
    assert run(llm, texts, prompts, NUM_NEW_TOKENS) == expected
    llm.llm_engine.engine_core.call_utility("check_integrity")


def test_a_step_of_bad_inputs_only(tmp_path):
    """Nothing is left to run in that step."""
    folder = make_bart(tmp_path)
    llm = make_llm(folder, max_model_len=64, num_gpu_blocks_override=200)
    model = llm.apply_model(lambda model: model)[0]
    model.embed_multimodal = Refusing(model.embed_multimodal)
    params = SamplingParams(temperature=0, max_tokens=2)
    (output,) = llm.generate(enc_dec_prompts([TEXTS[BAD]], [PROMPT]), params, use_tqdm=False)
    assert output.outputs[0].finish_reason == "error"
    wanted = generate(folder, TEXTS[:1], [PROMPT], 2)
    assert run(llm, TEXTS[:1], [PROMPT], 2) == wanted
