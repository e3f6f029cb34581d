# SPDX-License-Identifier: Apache-2.0
"""`use_beam_search` and its fields: what reaches the engine, and what is refused by name."""

from __future__ import annotations

import pytest

from vllm.sampling_params import BeamSearchParams

PATHS = ["/v1/completions", "/v1/chat/completions"]


def post(server, path: str, **fields):
    prompt = {"prompt": "hi"} if "chat" not in path else {"messages": [{"role": "user", "content": "hi"}]}
    return server.client.post(path, json={**prompt, "max_tokens": 7, **fields})


@pytest.mark.parametrize("path", PATHS)
def test_fields_reach_the_engine(hello_server, path):
    """`n` is the number of beams; what says how to draw has no effect, though a model or a client
    sets it; what forbids or penalises tokens goes along."""
    response = post(
        hello_server, path, use_beam_search=True, n=3, length_penalty=2, early_stopping="never",
        ignore_eos=True, include_stop_str_in_output=True, temperature=0.7, top_p=0.5, seed=3,
        repetition_penalty=1.3, min_tokens=2,
    )  # fmt: skip
    assert response.status_code == 200, response.text
    params = hello_server.engine.seen[-1][2]
    assert params.beam_search == BeamSearchParams(
        3, 7, ignore_eos=True, length_penalty=2.0, include_stop_str_in_output=True,
        early_stopping="never",
    )  # fmt: skip
    assert (params.n, params.temperature, params.top_p, params.seed) == (3, 0, 1, None)
    assert (params.repetition_penalty, params.min_tokens, params.max_tokens) == (1.3, 2, 7)


@pytest.mark.parametrize("path", PATHS)
def test_one_beam_is_greedy(hello_server, path):
    """As with Transformers; and neutral values pass without beams."""
    assert post(hello_server, path, use_beam_search=True).status_code == 200
    params = hello_server.engine.seen[-1][2]
    assert (params.n, params.temperature, params.beam_search) == (1, 0, None)
    plain = dict(use_beam_search=False, length_penalty=1, early_stopping=False)
    assert post(hello_server, path, **plain).status_code == 200
    assert hello_server.engine.seen[-1][2].temperature == 1


def test_defaults_of_the_model(hello_server, monkeypatch):
    """The model's own length_penalty and early_stopping hold where a request says nothing."""
    from vllm.config import ModelConfig

    config = {"length_penalty": 2.0, "early_stopping": True, "num_beams": 4}
    monkeypatch.setattr(ModelConfig, "try_get_generation_config", lambda self: config)
    from tests.entrypoints.openai.conftest import FakeServer
    from tests.entrypoints.openai.fake_engine import FakeEngine, hello

    with FakeServer(FakeEngine(hello)) as server:
        assert post(server, PATHS[0], use_beam_search=True, n=2).status_code == 200
        params = server.engine.seen[-1][2].beam_search
        assert (params.beam_width, params.length_penalty, params.early_stopping) == (2, 2.0, True)
        post(server, PATHS[0], use_beam_search=True, n=2, length_penalty=0.5, early_stopping=False)
        params = server.engine.seen[-1][2].beam_search
        assert (params.length_penalty, params.early_stopping) == (0.5, False)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("name", "value"), [
    ("stream", True), ("stop", "x"), ("prompt_logprobs", 1), ("logprob_token_ids", [1]),
    ("kv_transfer_params", {"a": 1}), ("n", 257), ("n", 0), ("length_penalty", "x"),
    ("length_penalty", 1000), ("early_stopping", "always"), ("use_beam_search", "maybe"),
])  # fmt: skip
def test_refused_with_beams(hello_server, path, name, value):
    response = post(hello_server, path, **{"use_beam_search": True, "n": 2, name: value})
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert name in error["message"] and (error["param"] or "").startswith(name)


@pytest.mark.parametrize(("name", "value"), [("length_penalty", 2), ("early_stopping", True)])
def test_refused_without_beams(hello_server, name, value):
    """They would have no effect."""
    error = post(hello_server, PATHS[0], **{name: value}).json()["error"]
    assert error["param"] == name and "use_beam_search" in error["message"]
