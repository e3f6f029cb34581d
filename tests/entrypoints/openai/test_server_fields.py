# SPDX-License-Identifier: Apache-2.0
"""Sampling fields and flags through a whole `vllm serve`, with the embedded model."""

from __future__ import annotations

import re
import threading

import httpx
import pytest

from tests.entrypoints.openai.conftest import events
from tests.entrypoints.openai.test_server import KEY, ServerProcess, eventually
from vllm.transformers_utils.embedded import find_embedded_model

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_embedded_model() is None, reason="the embedded model is not installed"),
]
COMPLETIONS = "/v1/completions"
TEXT = "The capital of France is"


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    config = tmp_path_factory.mktemp("serve") / "config.yaml"
    config.write_text(
        "scheduling-policy: priority\nenable-log-requests: true\nmax-num-seqs: 8\n"
        "logits-processors: ['tests.v1.sample.test_logits_processor:ForceToken']\n"
        "max-logprobs: -1\nenable-prompt-tokens-details: true\n"
        "generation-config: vllm\noverride-generation-config: {repetition_penalty: 1.0}\n"
    )
    started = ServerProcess("--config", str(config))
    yield started
    started.stop()


def ask(server, **body) -> dict:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 12, **body}
    response = server.client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    return response.json()["choices"][0]


def streamed(server, **body) -> list[dict]:
    body = {"prompt": TEXT, "temperature": 0, "max_tokens": 12, "stream": True, **body}
    text = server.client.post(COMPLETIONS, json=body).text
    import json

    return [json.loads(data)["choices"][0] for data in events(text)[:-1]]


def token_ids(server, text: str) -> list[int]:
    return server.client.post("/tokenize", json={"prompt": text}).json()["tokens"]


def test_fields_have_an_effect(server):
    """Against the plain answer; what a field asks for is what the answer shows."""
    plain = ask(server, return_token_ids=True)
    assert plain["text"].startswith(" Paris")
    (paris,) = token_ids(server, " Paris")
    assert plain["token_ids"][0] == paris
    assert not ask(server, logit_bias={str(paris): -100})["text"].startswith(" Paris")
    assert "Paris" not in ask(server, bad_words=["Paris"], max_tokens=30)["text"]
    only = ask(server, allowed_token_ids=[paris], max_tokens=4)
    assert only["text"] == " Paris" * 4
    ids = ask(server, repetition_penalty=1.8, max_tokens=40, return_token_ids=True)["token_ids"]
    assert len(set(ids)) > 0.9 * len(ids)
    ids = ask(server, presence_penalty=2.0, frequency_penalty=2.0, max_tokens=40,
              prompt="one two one two one two one two", return_token_ids=True)["token_ids"]  # fmt: skip
    assert max(map(ids.count, ids)) < 10
    assert ask(server, vllm_xargs={"force": paris}, max_tokens=3)["text"] == " Paris" * 3
    refused = server.client.post(COMPLETIONS, json={"prompt": "x", "vllm_xargs": {"force": "x"}})
    assert refused.status_code == 400 and "force" in refused.json()["error"]["message"]


def test_full_vocabulary(server):
    """Probabilities of all tokens sum to one."""
    import math

    chosen = ask(server, logprobs=-1, max_tokens=1, return_tokens_as_token_ids=True)
    (position,) = chosen["logprobs"]["top_logprobs"]
    assert len(position) == 49152
    assert math.fsum(map(math.exp, position.values())) == pytest.approx(1, abs=1e-4)
    named = ask(server, logprob_token_ids=[5, 6], max_tokens=1, return_tokens_as_token_ids=True)
    (few,) = named["logprobs"]["top_logprobs"]
    assert set(few) >= {"token_id:5", "token_id:6"}
    assert all(few[name] == pytest.approx(position[name], abs=1e-4) for name in few)


def test_echo_logprobs_are_the_prompts(server):
    """The logprob of a prompt's token is that of the same token when it was generated."""
    generated = ask(server, logprobs=0, max_tokens=4, return_token_ids=True)
    text = TEXT + generated["text"]
    ids = token_ids(server, TEXT) + generated["token_ids"]  # another tokenisation, maybe
    echoed = ask(server, prompt=ids, echo=True, max_tokens=0, logprobs=0)
    assert echoed["text"] == text
    values = echoed["logprobs"]["token_logprobs"]
    assert values[0] is None
    assert values[-4:] == pytest.approx(generated["logprobs"]["token_logprobs"], abs=1e-3)
    pieces = streamed(server, prompt=text, echo=True, max_tokens=2, logprobs=0, n=1)
    assert "".join(piece["text"] for piece in pieces).startswith(text)


def test_stop_string_across_tokens(server):
    """The prompt ends in ABC and the output goes on with the alphabet: nothing of the stop string is
    streamed, though it comes in several tokens; what is held back and becomes no stop string is
    given out at the end."""
    prompt = "Alphabet: ABCDEFGHIJKLMNOPQRSTUVWXYZ\nAlphabet: ABCDEFGHIJKLMNOPQRSTUVWXYZ\nAlphabet: ABC"
    plain = ask(server, prompt=prompt, return_token_ids=True)
    assert plain["text"].startswith("DEFGHIJ")
    pieces = streamed(server, prompt=prompt, stop=["DEFGHIJ"])
    assert "".join(piece["text"] for piece in pieces) == ""
    assert pieces[-1]["finish_reason"] == "stop" and pieces[-1]["stop_reason"] == "DEFGHIJ"
    pieces = streamed(server, prompt=prompt, stop=["DEFGHIJ!"], max_tokens=3)
    assert "".join(piece["text"] for piece in pieces) == ask(server, prompt=prompt, max_tokens=3)["text"]
    assert pieces[-1]["finish_reason"] == "length"
    pieces = streamed(server, prompt=prompt, stop=["DEFGHIJ"], include_stop_str_in_output=True)
    assert "".join(piece["text"] for piece in pieces) == "DEFGHIJ"


def test_stop_within_min_tokens(server):
    """Neither a stop string nor a stop token ends an output that is too short."""
    paris = token_ids(server, " Paris")
    early = ask(server, stop=["Paris"], min_tokens=8, max_tokens=8, return_token_ids=True)
    assert (early["finish_reason"], len(early["token_ids"])) == ("length", 8)
    assert "Paris" in early["text"]
    forced = ask(server, stop_token_ids=paris, min_tokens=3, max_tokens=6, return_token_ids=True)
    assert paris[0] not in forced["token_ids"][:3]
    at_once = ask(server, stop_token_ids=paris, return_token_ids=True)
    assert (at_once["finish_reason"], at_once["stop_reason"]) == ("stop", paris[0])
    assert at_once["text"] == ""


def test_seeds_beside_unseeded_neighbours(server):
    """Four runs of seeded requests, each time beside others: the same text."""
    seeded = dict(temperature=1.0, max_tokens=16, seed=11, top_p=0.95, n=2)

    def texts() -> list[str]:
        body = {"prompt": ["Once upon a time", TEXT], **seeded}
        choices = server.client.post(COMPLETIONS, json=body).json()["choices"]
        return [choice["text"] for choice in choices]

    alone = texts()
    assert len(set(alone)) == 4
    stop = threading.Event()

    def disturb(number: int) -> None:
        with httpx.Client(base_url=server.url, headers=server.client.headers, timeout=300) as client:
            while not stop.is_set():
                body = {"prompt": "x " * number, "temperature": 1.3, "max_tokens": 3 + number}
                client.post(COMPLETIONS, json=body)

    threads = [threading.Thread(target=disturb, args=(number,)) for number in (3, 7, 11)]
    for thread in threads:
        thread.start()
    try:
        assert [texts() for _ in range(4)] == [alone] * 4
    finally:
        stop.set()
        for thread in threads:
            thread.join(120)


def test_the_same_id_at_the_same_time(server):
    """Two requests may bear one id; each gets its own answer, and the log names it."""
    answers: dict[int, str] = {}

    def run(number: int) -> None:
        body = {"prompt": TEXT, "temperature": 0, "max_tokens": 8 * number, "ignore_eos": True}
        headers = {**server.client.headers, "X-Request-Id": "twice"}
        answer = httpx.post(server.url + COMPLETIONS, json=body, headers=headers, timeout=300).json()
        assert answer["id"] == "cmpl-twice"
        answers[number] = answer["choices"][0]["text"]

    threads = [threading.Thread(target=run, args=(number,)) for number in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(300)
    assert answers[2].startswith(answers[1]) and len(answers[2]) > len(answers[1])
    assert len(re.findall(r"Added request cmpl-twice-0: 5 prompt tokens", server.log)) == 2


def test_cancelling_everything_zeroes_every_gauge(server):
    """More requests than fit a batch, some waiting; their clients leave, and nothing is held."""
    body = {"prompt": ["a b c"] * 20, "max_tokens": 900, "ignore_eos": True, "stream": True}
    gauges = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")

    def values() -> dict[str, float]:
        text = server.client.get("/metrics").text
        pattern = rf"^vllm:({'|'.join(gauges)})\{{.*\}} (\S+)$"
        return {name: float(value) for name, value in re.findall(pattern, text, re.MULTILINE)}

    with pytest.raises(httpx.ReadTimeout):
        with server.client.stream("POST", COMPLETIONS, json=body) as response:
            pieces = response.iter_raw()
            next(pieces)
            eventually(lambda: values()["num_requests_waiting"] == 12, "some wait")
            assert values()["num_requests_running"] == 8 and values()["kv_cache_usage_perc"] > 0
            raise httpx.ReadTimeout("enough")
    eventually(lambda: set(values()) == set(gauges) and not any(values().values()), "zero")


def test_cached_tokens_and_salts(server):
    """A repeated prompt is found in the prefix cache, but not under another salt."""

    def cached(**body) -> int:
        response = server.client.post(COMPLETIONS, json={"prompt": [7] * 100, "max_tokens": 1, **body})
        return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    assert cached(cache_salt="a") == 0 and cached(cache_salt="a") == 96
    assert cached(cache_salt="b") == 0


def test_metrics_names(server):
    """Under upstream's names, which dashboards are made of."""
    ask(server)
    text = server.client.get("/metrics").text
    for name in (
        "num_requests_running", "num_requests_waiting", "kv_cache_usage_perc",
        "prefix_cache_queries_total", "prefix_cache_hits_total", "num_preemptions_total",
        "prompt_tokens_total", "generation_tokens_total", "request_success_total",
        "time_to_first_token_seconds_bucket", "inter_token_latency_seconds_bucket",
        "request_time_per_output_token_seconds_bucket", "e2e_request_latency_seconds_bucket",
        "request_queue_time_seconds_bucket", "request_inference_time_seconds_bucket",
        "request_prefill_time_seconds_bucket", "request_decode_time_seconds_bucket",
        "request_prompt_tokens_bucket", "request_generation_tokens_bucket",
        "request_params_max_tokens_bucket", "request_params_n_bucket",
        "request_max_num_generation_tokens_bucket", "iteration_tokens_total_bucket",
        "cache_config_info",
    ):  # fmt: skip
        assert f"\nvllm:{name}{{" in text, name


def test_key_is_asked_for(server):
    """Also on the routes beside completions."""
    for path in ("/tokenize", "/detokenize"):
        assert httpx.post(server.url + path, json={"prompt": "x"}).status_code == 401
    for path in ("/load", "/metrics", "/version", "/v1/models"):
        assert httpx.get(server.url + path).status_code == 401
        headers = {"Authorization": f"Bearer {KEY}"}
        assert httpx.get(server.url + path, headers=headers).status_code == 200


def test_beam_search(server):
    """Through the whole server: sequences best first, the best no worse than greedy decoding's; both
    routes, several prompts, and the plain answer afterwards."""
    body = dict(prompt=[TEXT, "Once upon a time"], use_beam_search=True, n=4, max_tokens=8,
                length_penalty=0, logprobs=1, ignore_eos=True)  # fmt: skip
    response = server.client.post(COMPLETIONS, json=body)
    assert response.status_code == 200, response.text
    choices = response.json()["choices"]
    assert [choice["index"] for choice in choices] == list(range(8))
    sums = [sum(choice["logprobs"]["token_logprobs"]) for choice in choices]
    assert sums[:4] == sorted(sums[:4], reverse=True) and sums[4:] == sorted(sums[4:], reverse=True)
    assert len({choice["text"] for choice in choices}) == 8
    greedy = ask(server, max_tokens=8, logprobs=1, ignore_eos=True)
    assert sums[0] >= sum(greedy["logprobs"]["token_logprobs"]) - 1e-3
    chat = dict(messages=[{"role": "user", "content": "What is 2+2?"}], use_beam_search=True, n=2)
    answers = server.client.post("/v1/chat/completions", json={**chat, "max_tokens": 20}).json()
    assert any("4" in choice["message"]["content"] for choice in answers["choices"])


def test_beam_search_ends_with_its_client(server):
    """A client that hangs up: every beam ends, and nothing keeps on running."""
    body = dict(prompt=TEXT, use_beam_search=True, n=4, max_tokens=1000, ignore_eos=True)
    with pytest.raises(httpx.ReadTimeout):
        server.client.post(COMPLETIONS, json=body, timeout=httpx.Timeout(10, read=1.0))

    def is_idle() -> bool:
        found = re.search(r"^vllm:num_requests_running\{.*\} (\S+)$", server.client.get("/metrics").text, re.M)
        return found is not None and float(found[1]) == 0

    eventually(is_idle, "its beams end")
