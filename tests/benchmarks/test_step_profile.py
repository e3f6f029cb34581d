# SPDX-License-Identifier: Apache-2.0
"""`--profile`: the parts add up, and timing them changes nothing that stays."""

from __future__ import annotations

import itertools

import pytest

from vllm.benchmarks.step_profile import (
    ATTENTION, FORWARD, INPUTS, PARTS, PRODUCTS, REST, SAMPLING, SCHEDULING, PartClock,
    profile_steps,
)  # fmt: skip


def test_a_part_does_not_count_what_is_inside_it():
    """Guards against time that is counted twice: the parts add up to the whole."""
    ticks = itertools.count()
    clock = PartClock(lambda: float(next(ticks)))  # each look at the clock takes a second
    clock.start()
    inner = clock.timed(ATTENTION, lambda: None)
    clock.timed(PRODUCTS, inner)()
    clock.stop()
    spent = {part: s for part, s in clock.seconds.items() if s}
    assert spent == {REST: 2.0, PRODUCTS: 2.0, ATTENTION: 1.0}


def test_a_part_that_raises_is_left():
    clock = PartClock()

    def fails():
        raise KeyError

    with pytest.raises(KeyError):
        clock.timed(PRODUCTS, fails)()
    clock.start()
    clock.stop()
    assert not clock.seconds[PRODUCTS]


@pytest.mark.slow
def test_profile_of_a_model(tmp_path):
    """Every part has its share, a step a token, and afterwards nothing is timed."""
    from tests.models.tiny import NATIVE, make_model
    from vllm import LLM, SamplingParams

    make_model(NATIVE["llama"], tmp_path)
    llm = LLM(model=str(tmp_path), max_model_len=64, skip_tokenizer_init=True,
              kv_cache_memory_bytes=1 << 22)  # fmt: skip
    params = SamplingParams(max_tokens=5, temperature=0.0, ignore_eos=True, detokenize=False)
    prompts = [{"prompt_token_ids": [1, 2, 3]}]

    def run():
        return llm.generate(prompts, params, use_tqdm=False)[0].outputs[0].token_ids

    expected, seen = run(), []
    profile = profile_steps(llm, lambda: seen.append(run()))
    assert seen == [expected] and profile.num_steps == 5
    assert tuple(profile.milliseconds) == PARTS
    for part in (PRODUCTS, ATTENTION, SAMPLING, SCHEDULING):
        assert profile.milliseconds[part] > 0
    whole = profile_steps(llm, lambda: seen.append(run()), with_modules=False)
    assert seen[-1] == expected and whole.num_steps == 5
    assert not whole.milliseconds[PRODUCTS] and whole.milliseconds[FORWARD] > 0
    assert whole.milliseconds[INPUTS] > 0
    core = llm.llm_engine.engine_core.engine_core
    assert "schedule" not in vars(core.scheduler)
    model = core.model_executor.driver_worker.get_model()
    assert not any(module._forward_hooks for module in model.modules())
    with pytest.raises(ValueError, match="nothing was computed"):
        profile_steps(llm, lambda: None)
