# SPDX-License-Identifier: Apache-2.0
"""`LLMEngine` and `LLM` over an executor without a model, in this process and in one of its own."""

from __future__ import annotations

import pytest
import torch

from tests.v1.engine.echo_executor import POISON, EchoExecutor
from vllm.entrypoints.llm import LLM
from vllm.outputs import RequestOutput
from vllm.sampling_params import SamplingParams
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.llm_engine import LLMEngine

GREEDY = SamplingParams(max_tokens=4, ignore_eos=True)


def make_llm(**more):
    more.setdefault("max_model_len", 256)
    return LLM(distributed_executor_backend=EchoExecutor, block_size=16, **more)


@pytest.fixture(scope="module")
def llm(tokenizer):
    return make_llm(num_gpu_blocks_override=9, disable_log_stats=False)


def test_order_is_kept(llm):
    """Short ones end first; answers come in the order of the questions."""
    prompts = [[i + 20] for i in range(6)]
    params = [SamplingParams(max_tokens=6 - i, ignore_eos=True) for i in range(6)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [list(o.outputs[0].token_ids) for o in outputs] == [
        [i + 20] * (6 - i) for i in range(6)
    ]


def test_one_prompt_in_every_form(llm):
    """A list of integers is one prompt; a list of anything else is many."""
    text = "hello"
    (token,) = llm.get_tokenizer().encode(text)
    single = (text, [token], {"prompt": text}, {"prompt_token_ids": [token]})
    for prompt in (*single, list(single)):
        for output in llm.generate(prompt, GREEDY, use_tqdm=False):
            assert list(output.outputs[0].token_ids) == [token] * 4
    assert llm.generate([], GREEDY) == []


def test_bad_prompt_runs_nothing(llm):
    """A fault in the last prompt must not cost the work on those before, nor leave them behind."""
    with pytest.raises(ValueError, match="prompt 1: .*empty"):
        llm.generate(["good", ""], GREEDY)
    with pytest.raises(ValueError, match="2 prompts, but 1 sampling_params"):
        llm.generate(["good", "too"], [GREEDY])
    assert not llm.llm_engine.has_unfinished_requests()


def test_request_that_outgrows_the_cache_fails_alone(llm):
    """8 usable pages of 16 tokens hold 128 tokens."""
    long = SamplingParams(max_tokens=200, ignore_eos=True)
    failed, good = llm.generate([[1] * 100, [2]], [long, GREEDY], use_tqdm=False)
    assert failed.outputs[0].finish_reason == "error"
    assert list(good.outputs[0].token_ids) == [2] * 4


def test_interruption_leaves_nothing_behind(llm, monkeypatch):
    """After Ctrl-C in a notebook the next call starts afresh."""
    step = llm.llm_engine.step
    calls = iter(range(100))

    def interrupted():
        if next(calls) == 2:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.llm_engine, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["one", "two"], SamplingParams(max_tokens=50, ignore_eos=True), use_tqdm=False)
    monkeypatch.undo()
    assert not llm.llm_engine.has_unfinished_requests()
    (output,) = llm.generate([[3]], GREEDY, use_tqdm=False)
    assert list(output.outputs[0].token_ids) == [3] * 4


def test_enqueue_and_wait(llm):
    """Requests add up; a call in between would mix its own with them."""
    ids = llm.enqueue([[4]], GREEDY) + llm.enqueue([5], GREEDY)
    with pytest.raises(RuntimeError, match="2 enqueued requests"):
        llm.generate("x", GREEDY)
    outputs = llm.wait_for_completion(RequestOutput, use_tqdm=False)
    assert [o.request_id for o in outputs] == ids
    assert [o.outputs[0].token_ids[0] for o in outputs] == [4, 5]


def test_chat_renders_the_template(llm):
    """What the model sees is the template's text, with its special tokens taken as such."""
    conversation = [{"role": "user", "content": [{"type": "text", "text": "Hi!"}]}]
    outputs = llm.chat([conversation, conversation], GREEDY, use_tqdm=False)
    tokenizer = llm.get_tokenizer()
    plain = [{"role": "user", "content": "Hi!"}]
    expected = tokenizer.apply_chat_template(plain, add_generation_prompt=True)
    assert [o.prompt_token_ids for o in outputs] == [expected] * 2
    with pytest.raises(ValueError, match="image_url"):
        llm.chat([{"role": "user", "content": [{"type": "image_url"}]}], GREEDY)
    with pytest.raises(ValueError, match="add_generation_prompt"):
        llm.chat(conversation, GREEDY, continue_final_message=True)


def test_caller_keeps_its_params(llm):
    """One SamplingParams may serve many calls."""
    params = SamplingParams(n=2, seed=3, max_tokens=None, temperature=1.0)
    before = repr(params)
    twice = SamplingParams(n=2, max_tokens=3, ignore_eos=True)
    (output,) = llm.generate([[1]], twice, use_tqdm=False)
    assert [c.index for c in output.outputs] == [0, 1]
    llm.llm_engine.input_processor.process_inputs("x", [1], params)
    assert repr(params) == before


def test_progress_bar(llm, capsys):
    """Speeds are in tokens, of prompt and output."""
    llm.generate([[1], [2]], GREEDY)
    shown = capsys.readouterr().err
    assert "2/2" in shown and "toks/s" in shown


def test_metrics_and_commands(llm):
    """Counts are those of the requests above; functions reach the worker in this process."""
    names = {m.name for m in llm.get_metrics()}
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries", "prefix_cache_hits", "num_preemptions", "prompt_tokens",
        "generation_tokens", "request_success", "time_to_first_token_seconds",
        "inter_token_latency_seconds", "request_time_per_output_token_seconds",
        "e2e_request_latency_seconds", "request_queue_time_seconds",
        "request_inference_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_prompt_tokens", "request_generation_tokens",
        "request_params_max_tokens", "iteration_tokens_total", "cache_config_info",
    ):  # fmt: skip
        assert f"vllm:{name}" in names
    assert llm.reset_prefix_cache() is True
    assert llm.collective_rpc(lambda worker: type(worker).__name__) == ["EchoExecutor"]
    assert llm.get_world_size() == 1


def test_unknown_argument_is_refused(tokenizer):
    """A misspelt option must not be dropped silently."""
    with pytest.raises(TypeError, match="max_modle_len"):
        LLM(max_modle_len=3)


def test_config_is_read_only_after_the_start(llm):
    """What the engine was built from must not seem to change."""
    with pytest.raises(AttributeError, match="read-only"):
        llm.llm_engine.vllm_config.scheduler_config.max_num_seqs = 1


def test_process_mode(make_config):
    """The same engine in a process of its own; its death is an error, not a wait."""
    engine = LLMEngine(make_config(), EchoExecutor, multiprocess_mode=True)
    for i in range(20):
        engine.add_request(str(i), [i + 20], GREEDY)
    done = {}
    while engine.has_unfinished_requests():
        done.update({o.request_id: o for o in engine.step() if o.finished})
    assert {k: o.outputs[0].token_ids[-1] for k, o in done.items()} == {
        str(i): i + 20 for i in range(20)
    }
    assert engine.reset_prefix_cache() is True
    with pytest.raises(TypeError, match="process of its own"):
        engine.apply_model(lambda model: None)
    engine.add_request("poison", [POISON], GREEDY)
    with pytest.raises(EngineDeadError):
        while True:
            engine.step()
    engine.shutdown()


class GreedyExecutor(EchoExecutor):
    """Wants more memory than there is."""

    def initialize_from_config(self, kv_cache_configs):
        raise MemoryError("Unable to allocate 10.9 PiB")


class GreedyTorchExecutor(EchoExecutor):
    """Wants it of torch."""

    def initialize_from_config(self, kv_cache_configs):
        torch.empty(10**15, dtype=torch.uint8)


def test_too_little_memory_is_said_in_one_line(tokenizer):
    """What was wanted, and every setting that can be lowered: no traceback of an allocator."""
    with pytest.raises(ValueError, match=r"10.9 PiB.*--max-num-seqs 7, .*override 999$"):
        LLM(
            distributed_executor_backend=GreedyExecutor, max_model_len=64, max_num_seqs=7,
            num_gpu_blocks_override=999,
        )  # fmt: skip
    with pytest.raises(ValueError, match="you tried to allocate 1000000000000000 .*--max-num-seqs"):
        LLM(distributed_executor_backend=GreedyTorchExecutor, max_model_len=64)


def test_a_seed_beyond_64_bits_is_named(tokenizer):
    for seed in (2**64, -(2**64)):
        with pytest.raises(ValueError, match="seed"):
            make_llm(seed=seed)


@pytest.mark.parametrize("call, error, says", [
    (lambda llm: llm.generate(None), TypeError, "prompts must be .*not None"),
    (lambda llm: llm.generate(3), TypeError, "prompts must be .*not int"),
    (lambda llm: llm.generate([None]), ValueError, "prompt 0: a prompt must be"),
    (lambda llm: llm.generate("a\ud800"), ValueError, r"prompt 0: .*ud800 at character 1"),
    (lambda llm: llm.generate({"prompt": "\ud800"}), ValueError, "not valid Unicode"),
    (lambda llm: llm.generate("a", {"n": 2}), TypeError, "SamplingParams or a list of it, not dict"),
    (lambda llm: llm.generate(["a"], [None]), TypeError, "sampling_params must be .*not None"),
    (lambda llm: llm.generate(["a"], priority=["x"]), TypeError, "priority must be int"),
    (lambda llm: llm.chat([]), ValueError, "conversation is empty"),
    (lambda llm: llm.chat([[]]), ValueError, "conversation is empty"),
    (lambda llm: llm.chat(None), TypeError, "messages must be a list .*not None"),
    (lambda llm: llm.chat("hello"), TypeError, "messages must be a list .*not str"),
    (lambda llm: llm.chat(["hello"]), TypeError, "conversation must be a list .*not str"),
    (lambda llm: llm.chat([{"role": "user", "content": "\udfff"}]), ValueError, "not valid Unicode"),
    (lambda llm: llm.chat([{"role": "user", "content": 3}]), ValueError, "content must be a text"),
    (lambda llm: llm.chat([{"role": "user", "content": [{"type": "text"}]}]), ValueError, "part's"),
])  # fmt: skip
def test_what_is_no_prompt_is_said_plainly(llm, call, error, says):
    """Nothing raw from below, and nothing is left behind."""
    with pytest.raises(error, match=says):
        call(llm)
    assert not llm.llm_engine.has_unfinished_requests()
