# SPDX-License-Identifier: Apache-2.0
"""Routes beside completions and chat, and the flags of the HTTP server around all of them."""

from __future__ import annotations

import shutil
import ssl
import subprocess
import threading

import httpx
import pytest

from tests.entrypoints.openai.fake_engine import forever
from tests.entrypoints.openai.test_lifecycle import wait_until
from vllm.entrypoints.openai.api_server import _tls_options
from vllm.entrypoints.openai.cli_args import FrontendArgs

COMPLETIONS = "/v1/completions"


def post(server, path, **body):
    return server.client.post(path, json=body)


def test_tokenize_and_back(hello_server):
    """What the tokenizer says, special tokens where they are asked for."""
    tokenizer = hello_server.engine.get_tokenizer()
    text = "Héllo <|im_end|> wörld"
    body = post(hello_server, "/tokenize", prompt=text, return_token_strs=True).json()
    assert body["tokens"] == tokenizer.encode(text)
    assert body["count"] == len(body["tokens"]) == len(body["token_strs"])
    assert body["token_strs"] == tokenizer.convert_ids_to_tokens(body["tokens"])
    assert body["max_model_len"] == 256
    back = post(hello_server, "/detokenize", tokens=body["tokens"]).json()
    assert back == {"prompt": text}
    assert post(hello_server, "/detokenize", tokens=[]).json() == {"prompt": ""}
    plain = post(hello_server, "/tokenize", prompt=text, add_special_tokens=False).json()
    assert plain["tokens"] == tokenizer.encode(text, add_special_tokens=False)
    assert plain["token_strs"] is None
    # Counting is what clients use it for, whatever the context.
    assert post(hello_server, "/tokenize", prompt="word " * 2000).json()["count"] >= 2000


def test_tokenize_a_conversation(hello_server):
    """The same ids that the engine gets of it."""
    messages = [{"role": "user", "content": "hi"}]
    body = post(hello_server, "/tokenize", messages=messages).json()
    hello_server.client.post("/v1/chat/completions", json={"messages": messages})
    assert hello_server.engine.seen[-1][1]["prompt_token_ids"] == body["tokens"]
    without = post(hello_server, "/tokenize", messages=messages, add_generation_prompt=False)
    assert without.json()["count"] < body["count"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"messages": [{"role": "user"}]}, "messages"),
        ("/tokenize", {"prompt": "a", "tools": [{}]}, "tools"),
        ("/tokenize", {"messages": [{"role": "user", "content": "b"}], "chat_template": "x"},
         "chat_template"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["a"]}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [10**30]}, "tokens"),
    ],
)  # fmt: skip
def test_bad_tokenization_requests(hello_server, path, body, param):
    response = hello_server.client.post(path, json=body)
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == param
    assert hello_server.client.post(path, json={"model": "x", **body}).status_code in (400, 404)


def test_ping(hello_server):
    """SageMaker asks with either method."""
    assert hello_server.client.get("/ping").status_code == 200
    assert hello_server.client.post("/ping").status_code == 200


@pytest.mark.parametrize("tracked", [False, True])
def test_load(serve, tracked):
    """Requests under way, counted until their streams have ended, however they end."""
    fake = serve(forever, args=FrontendArgs(enable_server_load_tracking=tracked))

    def load() -> int:
        return fake.client.get("/load").json()["server_load"]

    assert load() == 0
    with pytest.raises(httpx.ReadTimeout):
        with fake.client.stream("POST", COMPLETIONS, json={"prompt": "x", "stream": True}) as got:
            pieces = got.iter_raw()  # kept: without it the client hangs up
            next(pieces)
            assert load() == int(tracked)
            raise httpx.ReadTimeout("enough")
    wait_until(lambda: load() == 0, "load falls")
    assert post(fake, COMPLETIONS, prompt="").status_code == 400
    assert load() == 0


def test_reset_prefix_cache(serve, monkeypatch):
    """Only where the server's owner opens it; 409 while requests keep the cache."""
    assert post(serve(), "/reset_prefix_cache").status_code == 404
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    fake = serve()
    assert post(fake, "/reset_prefix_cache").status_code == 200
    fake.engine.running.add("one")
    refused = post(fake, "/reset_prefix_cache")
    assert refused.status_code == 409 and "in use" in refused.json()["error"]["message"]
    assert post(fake, "/reset_prefix_cache?reset_running_requests=true").status_code == 200


def test_request_id_headers(serve):
    """As asked for, or made up; errors have one too, and a bad one is not sent back."""
    fake = serve(args=FrontendArgs(enable_request_id_headers=True))
    given = {"X-Request-Id": "mine"}
    response = fake.client.post(COMPLETIONS, json={"prompt": "x"}, headers=given)
    assert response.headers["x-request-id"] == "mine" and response.json()["id"] == "cmpl-mine"
    response = post(fake, COMPLETIONS, prompt="x")
    assert response.json()["id"] == f"cmpl-{response.headers['x-request-id']}"
    assert "x-request-id" in post(fake, COMPLETIONS, prompt="").headers
    long = fake.client.post(COMPLETIONS, json={"prompt": "x"}, headers={"X-Request-Id": "x" * 129})
    assert len(long.headers["x-request-id"]) < 129 and long.status_code == 400
    assert "x-request-id" not in serve().client.get("/health").headers


def test_cors(serve):
    """A browser's question before the request is answered without a key; others' pages may read."""
    args = FrontendArgs(api_key=["k"], allowed_origins=["https://a.example"])
    fake = serve(args=args)
    question = {
        "Origin": "https://a.example", "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization",
    }  # fmt: skip
    allowed = fake.client.options(COMPLETIONS, headers=question)
    assert allowed.status_code == 200
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    refused = fake.client.options(COMPLETIONS, headers=question | {"Origin": "https://b.example"})
    assert refused.status_code == 400
    unauthorised = fake.client.post(
        COMPLETIONS, json={"prompt": "x"}, headers={"Origin": "https://a.example"}
    )
    assert unauthorised.status_code == 401
    assert unauthorised.headers["access-control-allow-origin"] == "https://a.example"
    everyone = serve().client.get("/health", headers={"Origin": "https://b.example"})
    assert everyone.headers["access-control-allow-origin"] == "*"


def test_root_path(serve):
    """With the proxy's prefix and without it; the docs name it."""
    fake = serve(args=FrontendArgs(root_path="/llm", api_key=["k"]))
    for path in ("/health", "/llm/health"):
        assert fake.client.get(path).status_code == 200
    headers = {"Authorization": "Bearer k"}
    for path in (COMPLETIONS, "/llm" + COMPLETIONS):
        assert post(fake, path, prompt="x").status_code == 401
        assert fake.client.post(path, json={"prompt": "x"}, headers=headers).status_code == 200
    assert "/llm/openapi.json" in fake.client.get("/docs", headers=headers).text


def test_no_docs(serve):
    fake = serve(args=FrontendArgs(disable_fastapi_docs=True))
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert fake.client.get(path).status_code == 404
    assert post(fake, COMPLETIONS, prompt="x").status_code == 200


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate of localhost and its key."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    folder = tmp_path_factory.mktemp("tls")
    subprocess.run(
        [openssl, "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj",
         "/CN=localhost", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1",
         "-keyout", folder / "key.pem", "-out", folder / "cert.pem"],
        check=True, capture_output=True,
    )  # fmt: skip
    return str(folder / "cert.pem"), str(folder / "key.pem")


def test_tls(certificate):
    """A client that knows the certificate gets its answer over HTTPS."""
    import asyncio

    from tests.entrypoints.openai.fake_engine import FakeEngine, hello
    from vllm.entrypoints.launcher import make_server, serve_http
    from vllm.entrypoints.openai.api_server import build_app
    from vllm.entrypoints.sockets import base_url, create_server_socket

    args = FrontendArgs(ssl_certfile=certificate[0], ssl_keyfile=certificate[1])
    args.validate()
    engine, ready = FakeEngine(hello), threading.Event()
    with create_server_socket("127.0.0.1", 0) as sock:
        server = make_server(
            build_app(engine, args), on_ready=ready.set, drain_timeout_s=1, log_level="warning",
            tls=_tls_options(args),
        )  # fmt: skip
        thread = threading.Thread(target=lambda: asyncio.run(serve_http(server, sock, engine)))
        thread.start()
        try:
            assert ready.wait(60)
            context = ssl.create_default_context(cafile=certificate[0])
            with httpx.Client(base_url=base_url(sock, "https"), verify=context) as client:
                assert client.post(COMPLETIONS, json={"prompt": "x"}).status_code == 200
        finally:
            server.should_exit = True
            thread.join(60)


def test_bad_frontend_flags(certificate, tmp_path):
    """Refused before anything is loaded, by the flag's name."""
    empty = tmp_path / "empty.pem"
    empty.write_text("")
    for args, words in (
        (dict(ssl_keyfile="x"), "--ssl-keyfile has no effect without --ssl-certfile"),
        (dict(ssl_cert_reqs=2), "--ssl-cert-reqs"),
        (dict(ssl_certfile="/nowhere"), "--ssl-certfile"),
        (dict(ssl_certfile=str(empty)), "--ssl-certfile"),
        (dict(ssl_certfile=certificate[0], ssl_keyfile=str(empty)), "--ssl-keyfile"),
        (dict(ssl_certfile=certificate[0], ssl_keyfile=certificate[1], ssl_ciphers="none"),
         "--ssl-ciphers"),
        (dict(root_path="llm"), "--root-path"),
        (dict(root_path="/llm/"), "--root-path"),
        (dict(allow_credentials=True), "--allow-credentials"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=words):
            FrontendArgs(**args).validate()
