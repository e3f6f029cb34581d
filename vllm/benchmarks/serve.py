# SPDX-License-Identifier: Apache-2.0
"""`vllm bench serve`: a running server under load, as its clients feel it."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np


if TYPE_CHECKING:
    from vllm.benchmarks.http_client import HTTPClient
    from vllm.benchmarks.serve_client import ServeRequest, Target, Timing
    from vllm.benchmarks.serve_metrics import ServeResult
    from vllm.tokenizers import TokenizerLike
    from vllm.utils.argparse_utils import FlexibleArgumentParser

BRIEF_HELP = """\
  --host, --port              of the server; or --base-url
  --num-prompts N             requests in all
  --max-concurrency N         most of them under way at once
  --request-rate R            requests a second, at random times; inf: all at once
  --random-input-len, --random-output-len
                              tokens of each prompt, and to generate for it
  --backend openai-chat       chat rather than completions
  --percentile-metrics, --metric-percentiles
                              what to print: ttft,tpot,itl,e2el; 50,90,99
  --save-result               write a JSON file

More: --help=all, --help=WORD"""
# Backend -> the route that it asks, unless --endpoint says otherwise.
ENDPOINTS = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
METRIC_NAMES = ("ttft", "tpot", "itl", "e2el")
_POSITIVE = ("num_prompts", "random_input_len", "random_output_len", "max_concurrency")


def add_cli_args(parser: FlexibleArgumentParser) -> None:
    """The flags of `vllm bench serve`, under upstream's names."""
    _add_server_args(parser)
    _add_load_args(parser)
    _add_result_args(parser)


def _add_server_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Server", "What is measured.")
    add = group.add_argument
    add("--backend", choices=tuple(ENDPOINTS), default="openai", help="Which API to ask.")
    add("--base-url", metavar="URL", help="The server, if not at --host and --port.")
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="Address of the server.")
    add("--port", type=int, default=8000, help="Port of the server.")
    add("--endpoint", metavar="PATH", help="Route; left out: the backend's.")
    add("--model", metavar="NAME", help="Model to ask for; left out: the server's first.")
    add("--served-model-name", metavar="NAME", help="Its name in requests, if another.")
    add("--tokenizer", metavar="NAME", help="Where the tokenizer is; left out: with the model.")
    add("--tokenizer-mode", default="auto", help="How the tokenizer is made: auto or hf.")
    add("--trust-remote-code", action="store_true", help="Run code of the tokenizer.")
    add("--header", nargs="*", default=[], metavar="KEY=VALUE", help="Headers of requests. "
        "OPENAI_API_KEY or VLLM_API_KEY is sent as the key.")  # fmt: skip
    add("--extra-body", type=_json_object, default={}, metavar="JSON", help="Further fields.")
    add("--ready-check-timeout-sec", type=float, default=600.0, metavar="SECONDS",
        help="How long to wait until a first request succeeds; 0: do not try one.")  # fmt: skip


def _add_load_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Load", "What is asked, and how fast.")
    add = group.add_argument
    add("--dataset-name", choices=("random",), default="random", help="Where prompts come from.")
    add("--num-prompts", type=int, default=1000, help="Requests in all.")
    add("--num-warmups", type=int, default=0, help="Requests before, which do not count.")
    add("--random-input-len", "--input-len", type=int, default=1024, help="Tokens of a prompt.")
    add("--random-output-len", "--output-len", type=int, default=128, help="Tokens to generate.")
    add("--random-range-ratio", type=float, default=0.0, metavar="R",
        help="Lengths vary evenly by this share of theirs, 0 to 1.")  # fmt: skip
    add("--random-prefix-len", type=int, default=0,
        help="Tokens that all prompts begin with, besides their own.")  # fmt: skip
    add("--request-rate", type=float, default=float("inf"), metavar="R",
        help="Requests a second; inf: all at once.")  # fmt: skip
    add("--burstiness", type=float, default=1.0, metavar="B",
        help="1: a Poisson process; less: in bursts; more: evenly.")  # fmt: skip
    add("--max-concurrency", type=int, help="Most requests under way at once.")
    add("--seed", type=int, default=0, help="Seed of prompts, lengths and times.")
    add("--ignore-eos", action="store_true",
        help="Generate to the full length. Random prompts always do.")  # fmt: skip
    add("--temperature", type=float, default=0.0, help="0: the likeliest tokens.")
    for name, kind in (("top-p", float), ("top-k", int), ("min-p", float)):
        add(f"--{name}", type=kind, help=f"{name} of requests; left out: the server's.")
    add("--logprobs", type=int, metavar="N", help="Logprobs to ask for at each token.")


def _add_result_args(parser: FlexibleArgumentParser) -> None:
    group = parser.add_argument_group("Result", "What is told.")
    add = group.add_argument
    add("--percentile-metrics", type=_metric_names, default=METRIC_NAMES[:3], metavar="NAMES",
        help=f"Of {','.join(METRIC_NAMES)}; left out: ttft,tpot,itl.")  # fmt: skip
    add("--metric-percentiles", type=_percentiles, default=(99.0,), metavar="NUMBERS",
        help="Percentiles to tell, such as 50,90,99; left out: 99.")  # fmt: skip
    add("--goodput", nargs="+", type=_limit, default=[], metavar="NAME:MS",
        help="Count requests that keep these limits, such as ttft:200 e2el:5000.")  # fmt: skip
    add("--save-result", action="store_true", help="Write the figures to a JSON file.")
    add("--save-detailed", action="store_true", help="With those of each request.")
    add("--result-dir", metavar="DIR", help="Folder of that file; left out: this one.")
    add("--result-filename", metavar="FILE", help="Name of that file; left out: made up.")
    add("--label", help="Begins that name.")
    add("--disable-tqdm", action="store_true", help="Show no progress.")


def validate(args: argparse.Namespace) -> None:
    """Checks what the parser cannot.

    Raises:
        ValueError: one line that says what to change.
    """
    for name in _POSITIVE:
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, not {value}")
    if not args.request_rate > 0 or not args.burstiness > 0:
        raise ValueError("--request-rate and --burstiness must be more than 0")
    if not 0 <= args.random_range_ratio < 1:
        raise ValueError("--random-range-ratio must be at least 0 and less than 1")
    if any("=" not in header for header in args.header):
        raise ValueError("--header takes KEY=VALUE")
    if args.save_detailed and not args.save_result:
        raise ValueError("--save-detailed has an effect only with --save-result")


def main(args: argparse.Namespace) -> None:
    """Measures and prints.

    Raises:
        ValueError: there is no server, or it answered nothing.
    """
    from vllm.benchmarks.serve_metrics import result_text

    result, target = asyncio.run(_run(args))
    errors = [timing.error for timing in result.timings if timing.error]
    if errors:
        message = f"{len(errors)} of {len(result.timings)} requests failed; the first: {errors[0]}"
        if len(errors) == len(result.timings):
            raise ValueError(message)
        print(f"warning: {message}", file=sys.stderr)
    print(result_text(result, args.percentile_metrics, args.max_concurrency, args.request_rate))
    if args.save_result:
        _save(args, result, target)


def _save(args: argparse.Namespace, result: ServeResult, target: Target) -> None:
    from vllm.benchmarks.serve_metrics import result_json

    now = datetime.now().strftime("%Y%m%d-%H%M%S")
    rate = "inf" if args.request_rate == float("inf") else args.request_rate
    record = {
        "date": now,
        "backend": args.backend,
        "label": args.label,
        "model_id": target.model,
        "num_prompts": args.num_prompts,
        "request_rate": rate,
        "burstiness": args.burstiness,
        "max_concurrency": args.max_concurrency,
        **result_json(result, args.save_detailed),
    }
    name = f"{args.label or args.backend}-{rate}qps-{os.path.basename(target.model)}-{now}.json"
    path = Path(args.result_dir or ".") / (args.result_filename or name)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n")
    print(f"wrote {path}", file=sys.stderr)


async def _run(args: argparse.Namespace) -> tuple[ServeResult, Target]:
    from vllm.benchmarks.http_client import HTTPClient
    from vllm.benchmarks.serve_client import run_request
    from vllm.benchmarks.serve_metrics import ServeResult

    with closing(HTTPClient(_base_url(args), _headers(args))) as client:
        target, tokenizer_name = await _find_target(client, args)
        requests = random_requests(args, _tokenizer(args, tokenizer_name), target.is_chat)
        if args.ready_check_timeout_sec > 0:
            await _check_ready(client, target, requests[0], args.ready_check_timeout_sec)
        warmups = (requests * (1 + args.num_warmups // len(requests)))[: args.num_warmups]
        if warmups:
            print(f"Warming up with {len(warmups)} requests...", file=sys.stderr)
            await asyncio.gather(*(run_request(client, target, request) for request in warmups))
        begin = time.perf_counter()
        timings = await _send_all(client, target, requests, args)
        duration_s = time.perf_counter() - begin
    result = ServeResult(
        tuple(timings), duration_s, args.metric_percentiles, tuple(args.goodput)
    )
    return result, target


def _base_url(args: argparse.Namespace) -> str:
    return (args.base_url or f"http://{args.host}:{args.port}").rstrip("/")


def _headers(args: argparse.Namespace) -> dict[str, str]:
    headers = dict(header.split("=", 1) for header in args.header)
    key = os.environ.get("OPENAI_API_KEY") or os.environ.get("VLLM_API_KEY")
    if key:
        headers.setdefault("Authorization", f"Bearer {key}")
    return headers


async def _find_target(client: HTTPClient, args: argparse.Namespace) -> tuple[Target, str | None]:
    """Where to send requests; and where the server says that its model is."""
    from vllm.benchmarks.http_client import HTTPClientError
    from vllm.benchmarks.serve_client import Target

    model, root = args.served_model_name or args.model, None
    try:
        status, body = await client.get("/v1/models")
    except HTTPClientError as error:
        raise ValueError(
            f"{_base_url(args)} cannot be reached ({error}): is the server up, and is this its "
            "address (--host, --port, --base-url)?"
        ) from error
    if status == 200:
        cards = json.loads(body)["data"]
        model = model or cards[0]["id"]
        root = next((card.get("root") for card in cards if card["id"] == model), None)
    elif model is None:
        raise ValueError(f"/v1/models answers {status}: pass --model (and OPENAI_API_KEY, if needed)")
    endpoint = args.endpoint or ENDPOINTS[args.backend]
    return Target(endpoint, args.backend == "openai-chat", model, _options(args)), root


def _options(args: argparse.Namespace) -> dict[str, Any]:
    """Fields that all requests have."""
    options: dict[str, Any] = {"temperature": args.temperature}
    for name in ("top_p", "top_k", "min_p"):
        if getattr(args, name) is not None:
            options[name] = getattr(args, name)
    if args.logprobs is not None and args.backend == "openai-chat":
        options |= {"logprobs": True, "top_logprobs": args.logprobs}
    elif args.logprobs is not None:
        options["logprobs"] = args.logprobs
    # Random prompts say nothing that would come to an end by itself.
    if args.ignore_eos or args.dataset_name == "random":
        options["ignore_eos"] = True
    return {**options, **args.extra_body}


def _tokenizer(args: argparse.Namespace, root: str | None) -> TokenizerLike:
    from vllm.tokenizers import get_tokenizer

    name = args.tokenizer or args.model or root
    try:
        return get_tokenizer(name, args.tokenizer_mode, args.trust_remote_code)
    except (ValueError, OSError) as error:
        raise ValueError(
            f"no tokenizer for random prompts ({' '.join(str(error).split())}): pass --tokenizer"
        ) from error


def random_requests(
    args: argparse.Namespace, tokenizer: TokenizerLike, as_text: bool
) -> list[ServeRequest]:
    """Prompts of ids drawn evenly from the vocabulary; as text where the API takes no ids, whose
    length may differ by a little."""
    from vllm.benchmarks.serve_client import ServeRequest

    rng = np.random.default_rng(args.seed)
    ids = np.setdiff1d(np.arange(tokenizer.vocab_size), tokenizer.all_special_ids)
    prefix = rng.choice(ids, args.random_prefix_len).tolist()
    input_lens = _lengths(rng, args.random_input_len, args)
    output_lens = _lengths(rng, args.random_output_len, args)
    requests = []
    for input_len, output_len in zip(input_lens, output_lens):
        prompt = [*prefix, *rng.choice(ids, input_len).tolist()]
        text_or_ids = tokenizer.decode(prompt) if as_text else tuple(prompt)
        requests.append(ServeRequest(text_or_ids, len(prompt), output_len))
    return requests


def _lengths(rng: np.random.Generator, length: int, args: argparse.Namespace) -> list[int]:
    low = max(1, int(length * (1 - args.random_range_ratio)))
    high = max(low, int(length * (1 + args.random_range_ratio)))
    return rng.integers(low, high, args.num_prompts, endpoint=True).tolist()


async def _check_ready(
    client: HTTPClient, target: Target, request: ServeRequest, timeout_s: float
) -> None:
    """Waits for a first answer.

    Raises:
        ValueError: the server refuses the request, or there is no answer in time.
    """
    from vllm.benchmarks.serve_client import run_request

    print("Starting initial single prompt test run...", file=sys.stderr)
    deadline = time.perf_counter() + timeout_s
    while True:
        timing = await run_request(client, target, request)
        if timing.success:
            return
        if timing.error[:1] == "4" or time.perf_counter() > deadline:
            raise ValueError(f"the first request failed: {timing.error}")
        await asyncio.sleep(1)


async def _send_all(
    client: HTTPClient,
    target: Target,
    requests: Sequence[ServeRequest],
    args: argparse.Namespace,
) -> list[Timing]:
    """Sends each at its time, as far as --max-concurrency lets it."""
    from tqdm import tqdm

    from vllm.benchmarks.serve_client import run_request

    rng = np.random.default_rng(args.seed)
    gate = asyncio.Semaphore(args.max_concurrency) if args.max_concurrency else nullcontext()
    progress = tqdm(total=len(requests), disable=args.disable_tqdm)

    async def send(request: ServeRequest) -> Timing:
        async with gate:
            timing = await run_request(client, target, request)
        progress.update(1)
        return timing

    begin, due = time.perf_counter(), 0.0
    tasks = []
    for request in requests:
        if due:
            await asyncio.sleep(max(0.0, begin + due - time.perf_counter()))
        tasks.append(asyncio.create_task(send(request)))
        if args.request_rate != float("inf"):
            mean = 1 / args.request_rate
            due += float(rng.gamma(args.burstiness, mean / args.burstiness))
    timings = await asyncio.gather(*tasks)
    progress.close()
    return timings


def _metric_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in METRIC_NAMES]
    if unknown:
        raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(METRIC_NAMES)}")
    return names


def _percentiles(text: str) -> tuple[float, ...]:
    try:
        values = tuple(float(part) for part in text.split(","))
    except ValueError:
        values = (-1.0,)
    if not all(0 <= value <= 100 for value in values):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of percentiles such as 50,99")
    return values


def _limit(text: str) -> tuple[str, float]:
    name, _, limit = text.partition(":")
    try:
        if name in METRIC_NAMES and name != "itl":
            return name, float(limit)
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is no limit such as ttft:200, tpot:50 or e2el:5000")


def _json_object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"{text!r} is not a JSON object")
    return value
