# SPDX-License-Identifier: Apache-2.0
"""`kv_transfer_params` reach the engine as they are and come back with the answer."""

from __future__ import annotations

import json

import pytest

from tests.entrypoints.openai.conftest import events

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
PARAMS = {
    "do_remote_decode": True,
    "remote_block_ids": [[1, 2], [3]],
    "remote_host": None,
    "remote_port": 5600,
}


def body_for(path: str, **fields) -> dict:
    prompt = {"prompt": "hi"} if path == COMPLETIONS else {"messages": [{"role": "user", "content": "hi"}]}
    return {**prompt, **fields}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_there_and_back(hello_server, path):
    """What routers send and read."""
    response = hello_server.client.post(path, json=body_for(path, kv_transfer_params=PARAMS))
    assert response.status_code == 200, response.text
    assert response.json()["kv_transfer_params"] == PARAMS
    params = hello_server.engine.seen[-1][2]
    assert params.extra_args == {"kv_transfer_params": PARAMS}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_in_a_stream(hello_server, path):
    """With the chunk that ends the answer; no other chunk has the field."""
    body = body_for(path, kv_transfer_params=PARAMS, stream=True)
    chunks = [json.loads(data) for data in events(hello_server.client.post(path, json=body).text)[:-1]]
    assert chunks[-1]["kv_transfer_params"] == PARAMS
    assert all("kv_transfer_params" not in chunk for chunk in chunks[:-1])


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_without(hello_server, path):
    """Nothing was asked: the engine's parameters hold nothing, and so does the answer."""
    for fields in ({}, {"kv_transfer_params": None}, {"kv_transfer_params": {}}):
        answer = hello_server.client.post(path, json=body_for(path, **fields)).json()
        assert answer["kv_transfer_params"] is None
        assert hello_server.engine.seen[-1][2].extra_args is None


def test_beside_arguments_of_logits_processors(hello_server):
    """Neither takes the other's place."""
    body = body_for(COMPLETIONS, kv_transfer_params=PARAMS, vllm_xargs={"a": 1})
    assert hello_server.client.post(COMPLETIONS, json=body).status_code == 200
    params = hello_server.engine.seen[-1][2]
    assert params.extra_args == {"a": 1, "kv_transfer_params": PARAMS}


@pytest.mark.parametrize("prompt", [["a", "b"], [[1, 2], [3]]])
def test_two_prompts_are_refused(hello_server, prompt):
    """Pages of one request cannot be those of two: both would read, and free, the same."""
    body = {"prompt": prompt, "kv_transfer_params": PARAMS}
    response = hello_server.client.post(COMPLETIONS, json=body)
    assert response.status_code == 400
    error = response.json()["error"]
    assert error["param"] == "kv_transfer_params" and "one prompt" in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"n": 2, "kv_transfer_params": PARAMS}, "n must be 1"),
        ({"kv_transfer_params": [1]}, "kv_transfer_params"),
        ({"kv_transfer_params": {"a": 1 << 70}}, "kv_transfer_params cannot be passed on"),
        ({"vllm_xargs": {"kv_transfer_params": "x"}}, "kv_transfer_params must be a dict"),
    ],
)
def test_refused(hello_server, path, fields, words):
    """A request that the engine or the connector could not take must not get that far."""
    response = hello_server.client.post(path, json=body_for(path, **fields))
    assert response.status_code == 400, response.text
    assert words in response.json()["error"]["message"]
