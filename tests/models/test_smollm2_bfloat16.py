# SPDX-License-Identifier: Apache-2.0
"""bfloat16 costs no more accuracy here than in Transformers: same prompts, one forward pass each."""

from pathlib import Path

import pytest
import torch

from tests.models.smollm2 import model_path
from vllm import LLM, SamplingParams

pytestmark = pytest.mark.slow


def transformers_logprobs(prompts: list[list[int]], dtype: torch.dtype) -> torch.Tensor:
    """(prompts, vocab) float32: after each prompt's last token."""
    from transformers import AutoModelForCausalLM

    path = Path(model_path())
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=dtype
    ).eval()
    with torch.inference_mode():
        rows = [model(torch.tensor([ids]), logits_to_keep=1).logits[0, -1] for ids in prompts]
    return torch.stack(rows).float().log_softmax(-1)


def our_logprobs(prompts: list[list[int]], wanted: list[list[int]]) -> tuple[list[int], torch.Tensor]:
    """The first token after each prompt, and the logprobs of its `wanted` tokens."""
    llm = LLM(model=model_path(), dtype="bfloat16", max_model_len=512)
    params = [
        SamplingParams(temperature=0.0, max_tokens=1, logprobs=0, logprob_token_ids=ids)
        for ids in wanted
    ]
    inputs = [{"prompt_token_ids": ids} for ids in prompts]
    outputs = [output.outputs[0] for output in llm.generate(inputs, params, use_tqdm=False)]
    values = [[output.logprobs[0][i].logprob for i in ids] for output, ids in zip(outputs, wanted)]
    return [output.token_ids[0] for output in outputs], torch.tensor(values)


def test_bfloat16_is_as_close_to_float32_as_transformers_is(prompts):
    """First tokens: at least as many right as Transformers' own bfloat16, less two. Logprobs of the
    five most likely tokens: a median error of at most 1.25 times Transformers'. Guards against sums
    and norms rounded too early."""
    exact = transformers_logprobs(prompts, torch.float32)
    top = exact.topk(5).indices
    first = exact.argmax(-1)
    theirs = transformers_logprobs(prompts, torch.bfloat16)
    our_first, ours = our_logprobs(prompts, top.tolist())

    their_right = int((theirs.argmax(-1) == first).sum())
    our_right = int((torch.tensor(our_first) == first).sum())
    assert our_right >= their_right - 2
    their_error = (theirs.gather(-1, top) - exact.gather(-1, top)).abs().median()
    our_error = (ours - exact.gather(-1, top)).abs().median()
    assert our_error <= 1.25 * their_error
