# SPDX-License-Identifier: Apache-2.0
"""What a client can get wrong is answered with the right status, in OpenAI's shape, in one line, and
nothing of it reaches the engine."""

from __future__ import annotations

import json

import pytest

from vllm.entrypoints.openai.errors import MAX_MESSAGE_CHARS
from vllm.entrypoints.openai.middleware import MAX_BODY_BYTES

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
JSON = {"content-type": "application/json"}
USER = {"role": "user", "content": "hi"}


def post(server, path, body):
    """`json=` of clients refuses NaN and half surrogate pairs, which other clients do send."""
    return server.client.post(path, content=json.dumps(body), headers=JSON)


def check_error(response, status, param=None, words=()) -> None:
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["code"] == status
    message = error["message"]
    assert message and "\n" not in message and len(message) <= MAX_MESSAGE_CHARS
    assert error["param"] == param, error
    assert all(word in message for word in words), message


BAD_PROMPTS = [
    "", [""], ["a", ""], [], [[]], [[1], []], [1, -1], [49152], [[1], [10**12]], [True], [1.5],
    ["a", 1], [1, "a"], [[1], "a"], [["a"]], [[[1]]], {"a": 1}, 7, None, "\ud800", ["\udfff"],
    "a " * 2000, "a" * 200_000, [5] * 256,
]  # fmt: skip


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("prompt", BAD_PROMPTS, ids=lambda p: repr(p)[:20])
def test_bad_prompts(hello_server, prompt, stream):
    """Also with `stream`: the status is decided before the first event."""
    seen = len(hello_server.engine.seen)
    check_error(post(hello_server, COMPLETIONS, {"prompt": prompt, "stream": stream}), 400, "prompt")
    assert len(hello_server.engine.seen) == seen


BAD_FIELDS = [
    # JSON's true is no number, though Python's is.
    ("n", True), ("seed", False), ("temperature", True), ("top_k", True), ("stop_token_ids", [True]),
    ("logit_bias", {"1": True}), ("priority", True),
    ("n", 0), ("n", -1), ("n", 10_000), ("n", "x"), ("max_tokens", 0), ("max_tokens", -1),
    ("max_tokens", 1000), ("max_tokens", 10**30), ("max_tokens", "x"), ("temperature", -1),
    ("temperature", float("nan")), ("temperature", float("inf")), ("temperature", "hot"),
    ("temperature", [1]), ("top_p", 0), ("top_p", 1.5), ("top_k", -2), ("top_k", 10**30),
    ("min_p", 2), ("seed", 2**70), ("seed", 1.5), ("stop", [""]), ("stop", [1]), ("stop", "\ud800"),
    ("stop", ["x"] * 1000), ("stop_token_ids", [10**6]), ("stop_token_ids", ["x"]),
    ("min_tokens", -1), ("min_tokens", 20), ("prompt_logprobs", 1000), ("priority", 3),
    ("priority", 2**80), ("stream", "maybe"), ("stream_options", {"include_usage": True}),
    ("presence_penalty", 2.1), ("frequency_penalty", -3), ("repetition_penalty", 0),
    ("logit_bias", {"x": 1}), ("logit_bias", {"49152": 1}), ("logit_bias", [1]),
    ("logit_bias", {"1": "x"}), ("allowed_token_ids", []), ("allowed_token_ids", [49152]),
    ("allowed_token_ids", "x"), ("bad_words", [""]), ("bad_words", "x"),
    ("bad_words", ["x"] * 2000), ("truncate_prompt_tokens", 0), ("truncate_prompt_tokens", 10**6),
    ("truncate_prompt_tokens", "x"), ("logprob_token_ids", [49152]), ("logprob_token_ids", []),
    ("vllm_xargs", [1]), ("vllm_xargs", {"a": {"b": 1}}), ("prompt_logprobs", -1),
    ("return_token_ids", "x"), ("request_id", "x" * 129), ("request_id", "a\nb"),
    ("echo", "maybe"), ("stream_options", 3), ("ignore_eos", "x"), ("cache_salt", ""), ("cache_salt", "x" * 5000),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value"), BAD_FIELDS, ids=lambda v: repr(v)[:20])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_bad_fields(hello_server, path, name, value):
    """Every field out of range or of another type is named."""
    if path == CHAT and name == "min_tokens" and value == 20:
        pytest.skip("a chat request has no small default of max_tokens")
    body = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [USER]}
    response = post(hello_server, path, {**body, name: value})
    check_error(response, 400, name, [name])


REFUSED = {
    "structured_outputs": {"json": {}},
    "guided_json": {}, "response_format": {"type": "json_object"}, "best_of": 3,
    "thinking_token_budget": 5, "repetition_detection": {},
    "logits_processors": ["x"], "mm_processor_kwargs": {"a": 1},
}  # fmt: skip
REFUSED |= {
    "encoder_prompt": "x", "decoder_prompt": "x", "multi_modal_data": {"image": "x"},
    "multi_modal_uuids": {"image": ["x"]}, "max_length": 9, "min_length": 2,
    "no_repeat_ngram_size": 3, "forced_eos_token_id": 2, "num_beams": 4,
}  # fmt: skip
REFUSED_COMPLETION = {"suffix": "x", "prompt_embeds": "AAAA"}
REFUSED_CHAT = {
    "tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "required",
    "functions": [{"name": "f"}], "audio": {}, "modalities": ["audio"], "reasoning_effort": "high",
    "documents": [{"title": "x"}],
}  # fmt: skip


@pytest.mark.parametrize(("name", "value"), [*REFUSED.items(), *REFUSED_COMPLETION.items()])
def test_refused_completion_fields(hello_server, name, value):
    """What is not built is refused, never dropped."""
    response = post(hello_server, COMPLETIONS, {"prompt": "hi", name: value})
    check_error(response, 400, name, [f"{name} is not supported"])


@pytest.mark.parametrize(("name", "value"), [*REFUSED.items(), *REFUSED_CHAT.items()])
def test_refused_chat_fields(hello_server, name, value):
    """As above."""
    response = post(hello_server, CHAT, {"messages": [USER], name: value})
    check_error(response, 400, name, [f"{name} is not supported"])


def test_defaults_and_strangers_pass(hello_server):
    """Clients send OpenAI's defaults and fields of their own: neither may break a request."""
    extra = {
        "presence_penalty": 0, "frequency_penalty": 0.0, "logit_bias": {}, "best_of": 1,
        "echo": False, "suffix": None, "user": "u", "store": False, "metadata": {"a": "b"},
        "seed": None, "stop": None, "temperature": None, "stream": False, "stream_options": None,
        "x_unknown": 1,
    }  # fmt: skip
    assert post(hello_server, COMPLETIONS, {"prompt": "hi", **extra}).status_code == 200
    del extra["suffix"]
    chat = {
        "messages": [USER], **extra, "tools": [], "tool_choice": "none", "service_tier": "auto",
        "response_format": {"type": "text"}, "parallel_tool_calls": True, "modalities": ["text"],
    }  # fmt: skip
    assert post(hello_server, CHAT, chat).status_code == 200


@pytest.mark.parametrize(
    ("messages", "words"),
    [
        ([], "messages"),
        ("hi", "messages"),
        (["hi"], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"content": "x"}], "messages[0].role"),
        ([USER, {"role": 3, "content": "x"}], "messages[1].role"),
        ([{"role": "user", "content": 5}], "messages[0].content"),
        ([{"role": "user", "content": [5]}], "messages[0].content[0]"),
        ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url' are not supported"),
        ([{"role": "tool", "content": "x"}], "tool calls"),
        ([{"role": "assistant", "tool_calls": [{}]}], "tool calls"),
        ([{"role": "user", "content": "\ud800"}], "Unicode"),
        ([{"role": "user", "content": "a " * 5000}], "context"),
    ],
)
def test_bad_messages(hello_server, messages, words):
    """The message at fault is named."""
    check_error(post(hello_server, CHAT, {"messages": messages}), 400, "messages", [words])


@pytest.mark.parametrize(
    ("extra", "param"),
    [
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 1000}, "logprobs"),
        ({"max_completion_tokens": 5000}, "max_completion_tokens"),
        ({"continue_final_message": True}, "continue_final_message"),
        ({"chat_template_kwargs": {"messages": []}}, "messages"),
        ({"stream": True, "prompt_logprobs": 1}, "prompt_logprobs"),
        ({"chat_template": "{{ 1 }}"}, "chat_template"),
    ],
)
def test_chat_options_that_clash(hello_server, extra, param):
    """Options that need or exclude one another."""
    check_error(post(hello_server, CHAT, {"messages": [USER], **extra}), 400, param)


@pytest.mark.parametrize(
    ("content", "headers", "status"),
    [
        (b"{bad", JSON, 400),
        (b"", JSON, 400),
        (b"[1]", JSON, 400),
        (b"null", JSON, 400),
        (b"\xff\xfe", JSON, 400),
        (b"[" * 100_000, JSON, 400),
        (b'{"prompt": 1' + b"0" * 10_000 + b"}", JSON, 400),
        (b'{"prompt": "a"}', {"content-type": "text/plain"}, 415),
        (b'{"prompt": "a"}', {}, 415),
        (b'{"prompt": "a"}', {"content-type": "application/x-www-form-urlencoded"}, 415),
        (b"{}", JSON, 400),
    ],
    ids=lambda v: repr(v)[:20],
)
def test_bad_bodies(hello_server, content, headers, status):
    """Neither the parser nor a nested body may become a 500."""
    response = hello_server.client.post(COMPLETIONS, content=content, headers=headers)
    param = "prompt" if content == b"{}" else None
    check_error(response, status, param)


def test_content_type_with_charset(hello_server):
    """As browsers send it."""
    headers = {"content-type": "Application/JSON; charset=utf-8"}
    response = hello_server.client.post(COMPLETIONS, content=b'{"prompt":"a"}', headers=headers)
    assert response.status_code == 200


def test_large_bodies(hello_server):
    """Declared or not, a body over the bound is refused before it is all in memory."""
    body = b'{"prompt": "' + b"a" * MAX_BODY_BYTES + b'"}'
    check_error(hello_server.client.post(COMPLETIONS, content=body, headers=JSON), 413)

    def chunks():
        for _ in range(1 + MAX_BODY_BYTES // (1 << 20)):
            yield b"a" * (1 << 20)

    check_error(hello_server.client.post(COMPLETIONS, content=chunks(), headers=JSON), 413)
    assert post(hello_server, COMPLETIONS, {"prompt": "hi"}).status_code == 200


def test_many_choices(hello_server):
    """prompts x n is bounded too: each choice is a request of the engine."""
    body = {"prompt": ["a"] * 100, "n": 1000}
    check_error(post(hello_server, COMPLETIONS, body), 400, "prompt", ["100000 choices"])


def test_routes_that_do_not_exist(hello_server):
    """Also these have OpenAI's shape."""
    check_error(hello_server.client.get("/v1/nothing"), 404)
    check_error(hello_server.client.get(COMPLETIONS), 405)
    response = post(hello_server, COMPLETIONS, {"prompt": "a", "model": "x" * 100_000})
    check_error(response, 404, "model", ["does not exist"])
    response = post(hello_server, COMPLETIONS, {"prompt": "a", "model": "\ud800"})
    check_error(response, 404 if response.status_code == 404 else 400, "model")


@pytest.mark.parametrize("value", [b"x" * 129, b"a\tb", b"\xe9"])
def test_request_id_header(hello_server, value):
    """A header of the client's goes into logs and ids: it is bounded."""
    response = hello_server.client.post(
        COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": value}
    )
    check_error(response, 400, "X-Request-Id")


def test_same_request_id_twice(hello_server):
    """A client's id is its own affair: two requests may bear the same."""
    for _ in range(2):
        response = hello_server.client.post(
            COMPLETIONS, json={"prompt": "a"}, headers={"X-Request-Id": "mine"}
        )
        assert response.json()["id"] == "cmpl-mine"


def test_long_heads(hello_server):
    """A parser keeps what it is sent: a head without end must not fill the memory."""
    import socket

    port = hello_server.sock.getsockname()[1]
    for head in (b"GET /health HTTP/1.1\r\nX-A: ", b"GET /", b"GET /health HTTP/1.1\r\n"):
        with socket.create_connection(("127.0.0.1", port), timeout=60) as sock:
            sent, answer = 0, b""
            filler = b"a: b\r\n" * 2730 if head.endswith(b"\r\n") else b"a" * (16 << 10)
            try:
                sock.sendall(head)
                while sent < (8 << 20):
                    sock.sendall(filler)
                    sent += len(filler)
            except OSError:
                pass
            try:
                answer = sock.recv(1000)
            except OSError:
                pass
            assert sent < (8 << 20), f"the server took {sent} bytes of a head"
            assert not answer or b" 400 " in answer
    assert hello_server.client.get("/health").status_code == 200


def test_a_text_with_a_token_that_the_model_lacks(serve):
    """Its own request is refused: the embedding has no row for what was added to the tokenizer."""
    server = serve()
    server.engine.model_config.hf_text_config_dict["vocab_size"] = 100
    for route, body, param in [
        ("/v1/completions", {"prompt": "one more"}, "prompt"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "messages"),
    ]:
        answer = server.client.post(route, json=body)
        error = answer.json()["error"]
        assert answer.status_code == 400 and error["param"] == param
        assert "the model has ids from 0 to 99" in error["message"]
