# SPDX-License-Identifier: Apache-2.0
"""SamplingParams: what is out of range is refused by name, and all of it reaches the engine."""

from __future__ import annotations

import copy

import msgspec
import pytest

from vllm.config import ModelConfig
from vllm.sampling_params import MAX_BAD_WORDS, RequestOutputKind, SamplingParams
from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

BAD = [
    ("n", 0), ("n", 10_000), ("n", True), ("n", 1.5), ("temperature", -0.1),
    ("temperature", float("nan")), ("temperature", "1"), ("top_p", 0.0), ("top_p", 1.01),
    ("top_k", -2), ("top_k", 1.5), ("min_p", -0.1), ("min_p", 1.1), ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1), ("repetition_penalty", 0), ("repetition_penalty", -1),
    ("repetition_penalty", 1e-300), ("repetition_penalty", float("inf")),
    ("seed", 2**63), ("seed", 1.5), ("max_tokens", 0), ("min_tokens", -1), ("min_tokens", 17),
    ("logprobs", -2), ("prompt_logprobs", 1.5), ("stop", [""]), ("stop", ["x"] * 65),
    ("stop_token_ids", ["x"]), ("stop_token_ids", [True]), ("allowed_token_ids", []),
    ("allowed_token_ids", ["x"]), ("allowed_token_ids", 5), ("logprob_token_ids", []),
    ("logprob_token_ids", list(range(129))), ("bad_words", [""]), ("bad_words", [3]),
    ("bad_words_token_ids", [[]]), ("bad_words_token_ids", [3]), ("bad_words_token_ids", [[True]]),
    ("bad_words", ["x"] * (MAX_BAD_WORDS + 1)), ("logit_bias", {"x": 1.0}),
    ("logit_bias", {1: float("nan")}), ("logit_bias", {1: "x"}), ("truncate_prompt_tokens", 0),
    ("truncate_prompt_tokens", -2), ("ignore_eos", "yes"), ("detokenize", None),
    ("flat_logprobs", 1), ("extra_args", [1]), ("no_repeat_ngram_size", -1),
    ("forced_eos_token_id", "x"), ("forced_eos_token_id", []), ("max_length", 0),
    ("min_length", -1),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD, ids=lambda v: repr(v)[:20])
def test_out_of_range(name, value):
    """The message begins with the field's name: the server's answers name it from there."""
    with pytest.raises(ValueError, match=rf"^{name}\b"):
        SamplingParams(**{name: value})


def test_every_field_travels():
    """A field that the wire loses would be dropped silently."""
    given = dict(
        n=2, presence_penalty=0.1, frequency_penalty=0.2, repetition_penalty=1.1, temperature=0.5,
        top_p=0.9, top_k=5, min_p=0.1, seed=3, stop=["a", "bc"], stop_token_ids=[4],
        ignore_eos=True, max_tokens=9, min_tokens=2, logprobs=1, prompt_logprobs=2,
        logprob_token_ids=[5, 6], flat_logprobs=True, skip_special_tokens=False,
        spaces_between_special_tokens=False, include_stop_str_in_output=True,
        output_kind=RequestOutputKind.DELTA, stream_interval=3, logit_bias={1: 2.0},
        allowed_token_ids=[1, 2], extra_args={"a": [1, "b"]}, bad_words=["x"],
        skip_reading_prefix_cache=True, truncate_prompt_tokens=7, no_repeat_ngram_size=3,
        forced_eos_token_id=[2], max_length=20, min_length=5,
    )  # fmt: skip
    params = SamplingParams(**given)
    copies = (
        copy.deepcopy(params),
        params.clone(),
        MsgpackDecoder(SamplingParams).decode(MsgpackEncoder().encode(params)),
        SamplingParams.from_optional(**given),
    )
    for made in copies:
        assert {name: getattr(made, name) for name in given} == given
        assert msgspec.structs.asdict(made) == msgspec.structs.asdict(params)


def test_greedy_ignores_filters_and_n():
    params = SamplingParams(temperature=0.0, top_p=0.1, top_k=3, min_p=0.5)
    assert (params.top_p, params.top_k, params.min_p) == (1.0, 0, 0.0)
    with pytest.raises(ValueError, match="n must be 1"):
        SamplingParams(n=2, temperature=0.0)


def test_logit_bias_of_the_api():
    """JSON has no integer keys; further out than 100 is the same as 100."""
    assert SamplingParams.from_optional(logit_bias={"5": 200, 6: -300}).logit_bias == {
        5: 100.0, 6: -100.0,
    }  # fmt: skip
    with pytest.raises(ValueError, match="^logit_bias"):
        SamplingParams.from_optional(logit_bias={"x": 1})


def test_n_may_be_raised(monkeypatch):
    monkeypatch.setenv("VLLM_MAX_N_SEQUENCES", "20000")
    assert SamplingParams(n=10_000).n == 10_000


class _Words:
    """Stands in for a tokenizer: letters are tokens, a space joins the letter after it."""

    def encode(self, text, add_special_tokens):
        assert not add_special_tokens
        return [t for t in text.replace(" a", "A").replace(" b", "B").encode() if t != 32]


def test_bad_words_are_banned_at_a_start_and_after_a_space():
    params = SamplingParams(bad_words=["ab", " b", "c"])
    params.update_from_tokenizer(_Words())
    ids = [bytes(word).decode() for word in params.bad_words_token_ids]
    assert ids == ["ab", "Ab", "b", "B", "c"]
    params.bad_words_token_ids = [[7, 8], [*b"ab"]]
    params.update_from_tokenizer(_Words())
    assert params.bad_words_token_ids[:3] == [[7, 8], [*b"ab"], [*b"Ab"]]
    assert len(params.bad_words_token_ids) == 6


@pytest.mark.parametrize(
    ("fields", "word"),
    [
        ({"stop_token_ids": [49152]}, "stop_token_ids"),
        ({"allowed_token_ids": [-1]}, "allowed_token_ids"),
        ({"logit_bias": {49152: 1.0}}, "logit_bias"),
        ({"logprob_token_ids": [10**9]}, "logprob_token_ids"),
        ({"bad_words_token_ids": [[1], [2, 49152]]}, "bad_words_token_ids"),
        ({"logprobs": 21}, "logprobs"),
        ({"logprobs": -1}, "logprobs"),
        ({"prompt_logprobs": 49152}, "prompt_logprobs"),
    ],
)
def test_what_only_the_model_can_tell(tmp_path, fields, word):
    """Token ids it does not have, and more logprobs than the server gives out."""
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64,'
        '"intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,'
        '"num_key_value_heads": 2, "vocab_size": 49152, "max_position_embeddings": 128}'
    )
    with pytest.raises(ValueError, match=rf"^{word}\b"):
        SamplingParams(**fields).verify(ModelConfig(model=str(tmp_path)))
