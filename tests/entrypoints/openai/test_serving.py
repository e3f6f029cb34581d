# SPDX-License-Identifier: Apache-2.0
"""Answers have OpenAI's shapes, and what a request says reaches the engine."""

from __future__ import annotations

import json

import pytest

from tests.entrypoints.openai.conftest import events
from tests.entrypoints.openai.fake_engine import piece
from vllm.entrypoints.openai.cli_args import FrontendArgs
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.exceptions import EngineGenerateError, RequestRefusedError

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MODEL = "SmolLM2-135M-Instruct.Q4_1"
USER = {"role": "user", "content": "hi"}


def complete(server, **body):
    response = server.client.post(COMPLETIONS, json={"prompt": "hi", **body})
    assert response.status_code == 200, response.text
    return response


def chat(server, **body):
    response = server.client.post(CHAT, json={"messages": [USER], **body})
    assert response.status_code == 200, response.text
    return response


def chunks(response) -> list[dict]:
    assert response.headers["content-type"].startswith("text/event-stream")
    data = events(response.text)
    assert data[-1] == "[DONE]"
    return [json.loads(item) for item in data[:-1]]


def test_completion(hello_server):
    """The fields that clients read, and no others in their place."""
    body = complete(hello_server).json()
    assert body["id"].startswith("cmpl-") and body["object"] == "text_completion"
    assert body["model"] == MODEL and isinstance(body["created"], int)
    assert body["usage"] == {
        "prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3,
        "prompt_tokens_details": None,
    }  # fmt: skip
    (choice,) = body["choices"]
    assert (choice["index"], choice["text"], choice["finish_reason"]) == (0, "hello", "stop")
    assert choice["logprobs"] is None and choice["stop_reason"] is None


@pytest.mark.parametrize(
    ("prompt", "lengths"),
    [("hi", [1]), (["hi", "hi hi"], [1, 2]), ([5, 6, 7], [3]), ([[5], [6, 7]], [1, 2])],
)
def test_prompts_in_each_form(hello_server, prompt, lengths):
    """Texts and ids, one or several: a choice of each, in their order."""
    del hello_server.engine.seen[:]
    body = complete(hello_server, prompt=prompt).json()
    assert [choice["index"] for choice in body["choices"]] == list(range(len(lengths)))
    seen = sorted(hello_server.engine.seen, key=lambda item: item[0])
    assert [len(prompt["prompt_token_ids"]) for _, prompt, _, _ in seen] == lengths
    assert body["usage"]["prompt_tokens"] == sum(lengths)


def test_choice_indexes(hello_server):
    """Choice i of prompt p has the index p * n + i, in a stream too."""
    body = complete(hello_server, prompt=["a", "b"], n=2).json()
    assert [choice["index"] for choice in body["choices"]] == [0, 1, 2, 3]
    streamed = chunks(complete(hello_server, prompt=["a", "b"], n=2, stream=True))
    texts = {}
    for chunk in streamed:
        (choice,) = chunk["choices"]
        texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == dict.fromkeys(range(4), "hello")


def test_completion_stream(hello_server):
    """Pieces, the last with a finish_reason; usage only where it was asked for."""
    first, last = chunks(complete(hello_server, stream=True))
    assert first["choices"][0]["text"] + last["choices"][0]["text"] == "hello"
    assert first["choices"][0]["finish_reason"] is None
    assert last["choices"][0]["finish_reason"] == "stop"
    assert first["id"] == last["id"] and first["created"] == last["created"]
    assert "usage" not in first and "usage" not in last


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_in_streams(hello_server, path):
    """A last chunk without choices; `usage` is null in those before, or with continuous stats
    counts up."""
    ask = complete if path == COMPLETIONS else chat
    *rest, last = chunks(ask(hello_server, stream=True, stream_options={"include_usage": True}))
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 2
    assert all(chunk["usage"] is None for chunk in rest)
    options = {"include_usage": True, "continuous_usage_stats": True}
    counted = chunks(ask(hello_server, stream=True, stream_options=options))
    numbers = [chunk["usage"]["completion_tokens"] for chunk in counted]
    assert numbers == sorted(numbers) and numbers[-1] == 2
    assert ask(hello_server).json()["usage"] == last["usage"]


def test_chat(hello_server):
    """As OpenAI's clients read it."""
    body = chat(hello_server).json()
    assert body["id"].startswith("chatcmpl-") and body["object"] == "chat.completion"
    (choice,) = body["choices"]
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"] == "hello"
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "stop", None)


def test_chat_stream(hello_server):
    """The role first, once for each choice; then what it says; then why it ended."""
    streamed = chunks(chat(hello_server, stream=True, n=2))
    for index in (0, 1):
        own = [c["choices"][0] for c in streamed if c["choices"][0]["index"] == index]
        assert own[0]["delta"] == {"role": "assistant", "content": ""}
        assert "".join(c["delta"].get("content", "") for c in own) == "hello"
        assert [c["finish_reason"] for c in own] == [None] * (len(own) - 1) + ["stop"]
        assert all("role" not in c["delta"] for c in own[1:])
    assert all(chunk["object"] == "chat.completion.chunk" for chunk in streamed)


def test_completion_logprobs(hello_server):
    """-inf is no JSON: it is said as -9999. Offsets count characters of the choice."""
    logprobs = complete(hello_server, logprobs=1).json()["choices"][0]["logprobs"]
    assert logprobs == {
        "tokens": ["hel", "lo"], "token_logprobs": [-0.5, -9999.0], "text_offset": [0, 3],
        "top_logprobs": [{"hel": -0.5}, {"lo": -9999.0}],
    }  # fmt: skip
    parts = [c["choices"][0]["logprobs"] for c in chunks(complete(hello_server, logprobs=1, stream=True))]
    assert [part["text_offset"] for part in parts] == [[0], [3]]


def test_chat_logprobs(hello_server):
    """Each token with its bytes; the likeliest ones only where they were asked for."""
    content = chat(hello_server, logprobs=True, top_logprobs=1).json()["choices"][0]["logprobs"]
    entry = content["content"][0]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("hel", -0.5, [104, 101, 108])
    assert [top["token"] for top in entry["top_logprobs"]] == ["hel"]
    plain = chat(hello_server, logprobs=True).json()["choices"][0]["logprobs"]
    assert plain["content"][0]["top_logprobs"] == []


def test_fields_reach_the_engine(hello_server):
    """A field that is checked and then lost would be dropped silently."""
    fields = {
        "n": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": "x",
        "stop_token_ids": [4], "max_tokens": 9, "min_tokens": 2, "ignore_eos": True,
        "skip_special_tokens": False, "spaces_between_special_tokens": False,
        "include_stop_str_in_output": True, "prompt_logprobs": 1, "presence_penalty": 0.5,
        "frequency_penalty": -0.5, "repetition_penalty": 1.5, "allowed_token_ids": [1, 2],
        "bad_words": ["no"], "logprob_token_ids": [7, 8],
    }  # fmt: skip
    complete(
        hello_server, **fields, logprobs=2, cache_salt="s", logit_bias={"5": 200},
        vllm_xargs={"a": [1, "b"]},
    )  # fmt: skip
    _, prompt, params, _ = hello_server.engine.seen[-1]
    assert prompt["cache_salt"] == "s" and prompt["prompt"] == "hi"
    fields["stop"] = ["x"]
    assert {name: getattr(params, name) for name in fields} == fields
    assert params.logprobs == 2 and params.output_kind is RequestOutputKind.FINAL_ONLY
    assert params.logit_bias == {5: 100.0} and params.extra_args == {"a": [1, "b"]}
    chat(hello_server, logprobs=True, top_logprobs=3, max_completion_tokens=9, max_tokens=5)
    params = hello_server.engine.seen[-1][2]
    assert (params.logprobs, params.max_tokens) == (3, 9)


def test_how_many_tokens(hello_server):
    """A chat may fill what is left of the context; a completion has OpenAI's 16 and is cut to fit."""
    chat(hello_server)
    _, prompt, params, _ = hello_server.engine.seen[-1]
    assert params.max_tokens == 256 - len(prompt["prompt_token_ids"])
    complete(hello_server, prompt=[5] * 250)
    assert hello_server.engine.seen[-1][2].max_tokens == 6
    complete(hello_server)
    assert hello_server.engine.seen[-1][2].max_tokens == 16
    complete(hello_server, max_tokens=None)
    assert hello_server.engine.seen[-1][2].max_tokens == 255


def test_content_parts_are_joined(hello_server):
    """A list of text parts is the text that they make, a line each."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(hello_server, messages=[{"role": "user", "content": parts}])
    listed = hello_server.engine.seen[-1][1]["prompt_token_ids"]
    chat(hello_server, messages=[{"role": "user", "content": "a\nb"}])
    assert hello_server.engine.seen[-1][1]["prompt_token_ids"] == listed


def test_continue_final_message(hello_server):
    """The model goes on with its own message, whose role the answer has."""
    body = chat(
        hello_server, messages=[USER, {"role": "assistant", "content": "Sure, "}],
        add_generation_prompt=False, continue_final_message=True,
    ).json()  # fmt: skip
    assert hello_server.engine.seen[-1][1]["prompt"].rstrip().endswith("Sure,")
    assert body["choices"][0]["message"]["role"] == "assistant"


def test_models_version_and_docs(hello_server):
    """What clients ask before they begin."""
    from vllm import __version__

    client = hello_server.client
    (card,) = client.get("/v1/models").json()["data"]
    assert (card["id"], card["object"], card["max_model_len"]) == (MODEL, "model", 256)
    assert client.get("/version").json() == {"version": __version__}
    assert "vLLM" in client.get("/docs").text
    schema = client.get("/openapi.json").json()
    assert {COMPLETIONS, CHAT, "/v1/models", "/health", "/metrics"} <= set(schema["paths"])
    assert "prompt" in schema["components"]["schemas"]["CompletionRequest"]["properties"]
    assert "python_info" in client.get("/metrics").text


def test_served_names(serve):
    """Every name is known; answers bear the one that was asked for."""
    fake = serve()
    fake.app.state.serving_models.names[:] = ["a", "b"]
    assert [card["id"] for card in fake.client.get("/v1/models").json()["data"]] == ["a", "b"]
    assert complete(fake, model="b").json()["model"] == "b"
    assert complete(fake).json()["model"] == "a"
    assert fake.client.post(COMPLETIONS, json={"prompt": "x", "model": "c"}).status_code == 404


def test_priority(serve):
    """Heeded where the scheduler does; refused elsewhere (test_errors)."""
    fake = serve(policy="priority")
    complete(fake, priority=-3)
    assert fake.engine.seen[-1][3] == -3


def test_chat_template_option(serve, tmp_path):
    """--chat-template takes the place of the model's; a request that it refuses is a 400."""
    template = tmp_path / "t.jinja"
    template.write_text(
        "{% if messages[0].content == 'no' %}{{ raise_exception('not this') }}{% endif %}"
        "<<{{ messages[0].content }}>>{{ extra }}"
    )
    fake = serve(args=FrontendArgs(chat_template=str(template)))
    chat(fake, chat_template_kwargs={"extra": "!"})
    assert fake.engine.seen[-1][1]["prompt"] == "<<hi>>!"
    refused = fake.client.post(CHAT, json={"messages": [{"role": "user", "content": "no"}]})
    assert refused.status_code == 400 and "not this" in refused.json()["error"]["message"]


def test_no_chat_template(serve, monkeypatch):
    """The answer says which option to start the server with."""
    fake = serve()
    monkeypatch.setattr(fake.engine.get_tokenizer(), "chat_template", None)
    refused = fake.client.post(CHAT, json={"messages": [USER]})
    assert refused.status_code == 400
    assert "--chat-template" in refused.json()["error"]["message"]


async def _fails_at_once(token_ids, params):
    raise EngineGenerateError("the request does not fit")
    yield


async def _fails_midway(token_ids, params):
    yield [piece(0, "a", [5])]
    raise EngineGenerateError("no more")


async def _breaks(token_ids, params):
    raise KeyError("secret detail")
    yield


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_engine_error_before_output(serve, path, stream):
    """No event has gone out yet, so it is a status, with `stream` too."""
    fake = serve(_fails_at_once)
    body = {"prompt": "x", "messages": [USER], "stream": stream}
    response = fake.client.post(path, json=body)
    assert response.status_code == 500
    assert response.json()["error"]["message"] == "the request does not fit"


async def _refuses(token_ids, params):
    raise RequestRefusedError("the KV cache holds at most 5 tokens of one request")
    yield


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("stream", [False, True])
def test_request_that_never_fits(serve, path, stream):
    """What the engine can never give is the client's error: trying again does not help."""
    body = {"prompt": "x", "messages": [USER], "stream": stream}
    response = serve(_refuses).client.post(path, json=body)
    assert response.status_code == 400
    assert response.json()["error"]["type"] == "BadRequestError"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_engine_error_within_a_stream(serve, path):
    """An event in OpenAI's shape, then the end: a client must not wait for ever, nor take the text
    for whole."""
    fake = serve(_fails_midway)
    body = {"prompt": "x", "messages": [USER], "stream": True}
    data = events(fake.client.post(path, json=body).text)
    assert data[-1] == "[DONE]"
    error = json.loads(data[-2])["error"]
    assert (error["message"], error["code"]) == ("no more", 500)


def test_one_prompt_fails(serve):
    """The request fails as a whole, and its other prompts are aborted."""

    async def second_fails(token_ids, params):
        if len(token_ids) == 2:
            raise EngineGenerateError("no")
        import asyncio

        await asyncio.Event().wait()
        yield []

    fake = serve(second_fails)
    response = fake.client.post(COMPLETIONS, json={"prompt": [[5], [5, 6], [5]]})
    assert response.status_code == 500
    assert not fake.engine.running and len(fake.engine.aborted) == 3


def test_faults_of_our_own(serve):
    """Something we did not expect: 500, in shape, its details in the log alone."""
    fake = serve(_breaks)
    response = fake.client.post(COMPLETIONS, json={"prompt": "x"})
    assert response.status_code == 500 and "secret" not in response.text
    assert response.json()["error"]["type"] == "InternalServerError"
    assert fake.client.get("/health").status_code == 200
