# SPDX-License-Identifier: Apache-2.0
"""Prefill and decode apart, on one machine: starts two servers and a proxy before them.

    python examples/disaggregation.py                         # the small embedded model, over NIXL
    python examples/disaggregation.py --connector files       # over files, without NIXL
    python examples/disaggregation.py --model ./my-model --port 9000

Then talk to the proxy as to any server; Ctrl-C ends all three.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

VLLM = [sys.executable, "-m", "vllm.entrypoints.cli.main"]
START_TIMEOUT_S = 300
END_TIMEOUT_S = 30


def transfer_config(connector: str, folder: str) -> dict[str, object]:
    """`--kv-transfer-config` of either server."""
    common = {"kv_role": "kv_both", "kv_load_failure_policy": "recompute"}
    if connector == "nixl":
        return {"kv_connector": "NixlConnector", **common}
    options = {"shared_storage_path": folder}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": options, **common}


@contextmanager
def running(command: list[str], **env: str) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is told to end, and if need be made to."""
    process = subprocess.Popen(command, env={**os.environ, **env})
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    """Returns once the server answers.

    Raises:
        SystemExit: it has ended, or takes too long.
    """
    for _ in range(START_TIMEOUT_S * 5):
        if process.poll() is not None:
            raise SystemExit(f"the server for {url} has ended with status {process.returncode}")
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise SystemExit(f"{url} is not healthy after {START_TIMEOUT_S} s")


def start_servers(stack: ExitStack, args: argparse.Namespace, folder: str) -> list[str]:
    """The URLs of the prefill and the decode server, once both are healthy."""
    config = json.dumps(transfer_config(args.connector, folder))
    model = [args.model] if args.model else []
    started = []
    for number in (1, 2):
        port = args.port + 100 * number
        command = [*VLLM, "serve", *model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--kv-transfer-config", config, *args.serve_args]
        # Each engine tells its peers about itself at a port of its own.
        side_channel = str(args.side_channel_port + number - 1)
        process = stack.enter_context(
            running(command, VLLM_NIXL_SIDE_CHANNEL_PORT=side_channel)
        )
        started.append((f"http://127.0.0.1:{port}", process))
    for url, process in started:
        wait_until_healthy(url, process)
    return [url for url, _ in started]


def main() -> None:
    """Runs until it is interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("--model", help="as for vllm serve; left out: the embedded model")
    parser.add_argument("--connector", choices=["nixl", "files"], default="nixl")
    parser.add_argument("--port", type=int, default=8000, help="the proxy's; servers: + 100, + 200")
    parser.add_argument("--side-channel-port", type=int, default=5600, help="NIXL's; also + 1")
    parser.add_argument("serve_args", nargs="*", help="more for both servers, after --")
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    folder = tempfile.mkdtemp(prefix="vllm-disaggregation-")
    try:
        with ExitStack() as stack:
            prefill, decode = start_servers(stack, args, folder)
            proxy = [*VLLM, "disagg-proxy", "--prefill", prefill, "--decode", decode]
            process = stack.enter_context(running([*proxy, "--port", str(args.port)]))
            wait_until_healthy(f"http://127.0.0.1:{args.port}", process)
            print(
                f"\ncurl http://127.0.0.1:{args.port}/v1/completions -H 'Content-Type: "
                """application/json' -d '{"prompt": "The sea is", "max_tokens": 20}'\n""",
                flush=True,
            )
            process.wait()
    except KeyboardInterrupt:
        pass
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
