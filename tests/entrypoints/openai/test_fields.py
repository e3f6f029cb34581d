# SPDX-License-Identifier: Apache-2.0
"""Fields that change what an answer holds: echo, token ids, usage, templates, truncation."""

from __future__ import annotations

import json

import pytest

from tests.entrypoints.openai.conftest import events
from vllm.entrypoints.openai.cli_args import FrontendArgs

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
USER = {"role": "user", "content": "hi"}


def ask(server, path, **body):
    body = {"prompt": "hi hi", "messages": [USER], **body}
    response = server.client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response


def choices_of_stream(response) -> dict[int, list[dict]]:
    """Pieces by choice."""
    by_index: dict[int, list[dict]] = {}
    for data in events(response.text)[:-1]:
        for choice in json.loads(data)["choices"]:
            by_index.setdefault(choice["index"], []).append(choice)
    return by_index


@pytest.mark.parametrize("prompt", ["hi hi", [24, 3, 5]])
@pytest.mark.parametrize(("max_tokens", "text"), [(5, "hello"), (0, "")])
def test_echo(hello_server, prompt, max_tokens, text):
    """The prompt and what follows it; with max_tokens 0 the prompt alone, whatever is drawn."""
    tokenizer = hello_server.engine.get_tokenizer()
    prompt_text = prompt if isinstance(prompt, str) else tokenizer.decode(prompt)
    asked = dict(prompt=prompt, echo=True, max_tokens=max_tokens, n=2, return_token_ids=True)
    whole = ask(hello_server, COMPLETIONS, **asked).json()
    pieces = choices_of_stream(ask(hello_server, COMPLETIONS, stream=True, **asked))
    for choice in whole["choices"]:
        assert choice["text"] == prompt_text + text
        assert choice["token_ids"] == ([5, 6] if max_tokens else [])
        assert choice["finish_reason"] == ("stop" if max_tokens else "length")
        own = pieces[choice["index"]]
        assert "".join(piece["text"] for piece in own) == choice["text"]
        assert [t for piece in own for t in piece["token_ids"]] == choice["token_ids"]
        assert own[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        assert all("prompt_token_ids" not in piece for piece in own[1:])
    assert whole["usage"]["completion_tokens"] == (4 if max_tokens else 0)


def test_echo_with_logprobs(hello_server):
    """An entry for each token of prompt and output, offsets over both; of the first token nothing is
    known. The engine is asked for logprobs of the prompt."""
    choice = ask(hello_server, COMPLETIONS, echo=True, logprobs=1).json()["choices"][0]
    logprobs = choice["logprobs"]
    assert logprobs["tokens"][0] == "hi" and logprobs["tokens"][-2:] == ["hel", "lo"]
    assert logprobs["token_logprobs"][0] is None and logprobs["top_logprobs"][0] is None
    lengths = [len(token) for token in logprobs["tokens"]]
    assert logprobs["text_offset"] == [sum(lengths[:i]) for i in range(len(lengths))]
    assert hello_server.engine.seen[-1][2].prompt_logprobs == 1
    assert choice["prompt_logprobs"] is None
    ask(hello_server, COMPLETIONS, logprobs=1)
    assert hello_server.engine.seen[-1][2].prompt_logprobs is None


def test_max_tokens_zero_needs_echo(hello_server):
    response = hello_server.client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 0})
    assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"


def test_chat_echo(hello_server):
    """The message that is gone on with comes before what follows it."""
    messages = [USER, {"role": "assistant", "content": "Sure, "}]
    asked = dict(
        messages=messages, echo=True, add_generation_prompt=False, continue_final_message=True
    )
    body = ask(hello_server, CHAT, **asked).json()
    assert body["choices"][0]["message"]["content"] == "Sure, hello"
    pieces = choices_of_stream(ask(hello_server, CHAT, stream=True, **asked))[0]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == "Sure, hello"
    body = ask(hello_server, CHAT, echo=True).json()
    assert body["choices"][0]["message"]["content"] == "hello"


def test_chat_token_ids(hello_server):
    body = ask(hello_server, CHAT, return_token_ids=True).json()
    prompt = hello_server.engine.seen[-1][1]["prompt_token_ids"]
    assert body["prompt_token_ids"] == prompt and body["choices"][0]["token_ids"] == [5, 6]
    response = ask(hello_server, CHAT, return_token_ids=True, stream=True)
    chunks = [json.loads(data) for data in events(response.text)[:-1]]
    assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == [prompt]
    ids = [t for c in chunks for choice in c["choices"] for t in choice.get("token_ids", [])]
    assert ids == [5, 6]
    body = ask(hello_server, CHAT).json()
    assert body["prompt_token_ids"] is None and body["choices"][0]["token_ids"] is None


@pytest.mark.parametrize("by_default", [False, True])
def test_tokens_as_token_ids(serve, by_default):
    """A request's own word counts more than the server's."""
    fake = serve(args=FrontendArgs(return_tokens_as_token_ids=by_default))
    for asked, shown in ((None, by_default), (True, True), (False, False)):
        options = dict(return_tokens_as_token_ids=asked, logprobs=1)
        logprobs = ask(fake, COMPLETIONS, **options).json()["choices"][0]["logprobs"]
        assert logprobs["tokens"] == (["token_id:5", "token_id:6"] if shown else ["hel", "lo"])
        assert list(logprobs["top_logprobs"][0]) == logprobs["tokens"][:1]
        options |= dict(logprobs=True, top_logprobs=1)
        content = ask(fake, CHAT, **options).json()["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == logprobs["tokens"]
        assert bytes(content[0]["bytes"]) == b"hel"


@pytest.mark.parametrize(
    ("truncate", "kept"), [(1, 1), (3, 3), (255, 255), (-1, 255), (400, None), (None, None)]
)
def test_truncated_prompts(hello_server, truncate, kept):
    """The last tokens stay; of a prompt that is too long otherwise."""
    ids = list(range(10, 310))
    body = {"prompt": ids, "truncate_prompt_tokens": truncate, "max_tokens": 1}
    response = hello_server.client.post(COMPLETIONS, json=body)
    assert response.status_code == (200 if kept else 400), response.text
    if kept:
        assert hello_server.engine.seen[-1][1]["prompt_token_ids"] == ids[-kept:]
        body |= {"prompt": "word " * 500}
        assert hello_server.client.post(COMPLETIONS, json=body).status_code == 200
        seen = hello_server.engine.seen[-1][1]
        assert len(seen["prompt_token_ids"]) == kept and "prompt" not in seen
        body |= {"messages": [{"role": "user", "content": "word " * 500}]}
        assert hello_server.client.post(CHAT, json=body).status_code == 200
        assert len(hello_server.engine.seen[-1][1]["prompt_token_ids"]) == kept


def test_template_of_a_request(serve):
    """Code of a stranger runs only where the server's owner says so."""
    asked = dict(chat_template="<{{ messages[0].content }}{{ mark }}>")
    trusting = serve(
        args=FrontendArgs(
            trust_request_chat_template=True, default_chat_template_kwargs={"mark": "?"}
        )
    )
    ask(trusting, CHAT, **asked)
    assert trusting.engine.seen[-1][1]["prompt"] == "<hi?>"
    ask(trusting, CHAT, **asked, chat_template_kwargs={"mark": "!"})
    assert trusting.engine.seen[-1][1]["prompt"] == "<hi!>"


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_usage_flags(serve, path):
    """--enable-force-include-usage and --enable-prompt-tokens-details."""
    fake = serve(
        args=FrontendArgs(enable_force_include_usage=True, enable_prompt_tokens_details=True)
    )
    last = json.loads(events(ask(fake, path, stream=True).text)[-2])
    assert last["choices"] == []
    assert last["usage"]["prompt_tokens_details"] == {"cached_tokens": 0}
    assert ask(fake, path).json()["usage"] == last["usage"]


def test_bounded_logprobs(serve, monkeypatch):
    """Full-vocabulary logprobs of many tokens would fill the memory of the server, even where
    --max-logprobs lets a request ask for them."""
    from vllm.entrypoints.openai import serving_engine

    fake = serve()
    monkeypatch.setattr(fake.engine.model_config, "max_logprobs", -1)
    assert ask(fake, COMPLETIONS, logprobs=-1, max_tokens=100)
    monkeypatch.setattr(serving_engine, "MAX_LOGPROBS", 1 << 21)
    for name, body in (
        ("logprobs", {"logprobs": -1, "max_tokens": 100}),
        ("logprobs", {"logprobs": 30, "max_tokens": 200, "n": 1000}),
        ("prompt_logprobs", {"prompt_logprobs": -1, "prompt": [5] * 100}),
    ):
        response = fake.client.post(COMPLETIONS, json={"prompt": "x", **body})
        assert response.status_code == 400, response.text
        assert response.json()["error"]["param"] == name


@pytest.mark.parametrize("header", [None, "from-header"])
def test_request_id_field(hello_server, header):
    """A field for clients that cannot set headers; the header counts more."""
    headers = {} if header is None else {"X-Request-Id": header}
    body = {"prompt": "x", "request_id": "from-body"}
    response = hello_server.client.post(COMPLETIONS, json=body, headers=headers)
    assert response.json()["id"] == f"cmpl-{header or 'from-body'}"
