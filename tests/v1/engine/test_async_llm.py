# SPDX-License-Identifier: Apache-2.0
"""`AsyncLLM` over an engine process without a model: requests, aborts, death."""

from __future__ import annotations

import asyncio
import gc
import glob
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time

import pytest
import zmq

from tests.v1.engine.echo_executor import POISON, EchoExecutor
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.reader import get_metrics_snapshot

REPO = os.path.dirname(os.path.dirname(os.path.dirname(os.path.dirname(__file__))))


def params(max_tokens=8, **more):
    more.setdefault("output_kind", RequestOutputKind.DELTA)
    return SamplingParams(max_tokens=max_tokens, ignore_eos=True, **more)


async def collect(engine, prompt, sampling_params, request_id="r"):
    """(text, ids, last output) of a request."""
    text, ids, output = "", [], None
    async for output in engine.generate(prompt, sampling_params, request_id):
        text += output.outputs[0].text
        ids += output.outputs[0].token_ids
    return text, ids, output


def metric(name, **labels):
    found = [
        m for m in get_metrics_snapshot()
        if m.name == f"vllm:{name}" and labels.items() <= m.labels.items()
    ]  # fmt: skip
    assert len(found) == 1, found
    return found[0].value


def gauges():
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
    return {name: metric(name) for name in names}


async def wait_until(condition):
    while not condition():
        await asyncio.sleep(0.01)


def run(make_config, scenario, **config):
    """Runs `scenario(engine)` with an engine of its own."""

    async def main():
        engine = AsyncLLM(make_config(**config), EchoExecutor)
        try:
            return await asyncio.wait_for(scenario(engine), 120)
        finally:
            engine.shutdown()

    return asyncio.run(main())


@pytest.fixture(scope="module")
def shared(make_config, tmp_path_factory):
    """`shared(scenario)` runs `scenario(engine)` with an engine that several tests use, one after
    the other: 79 usable pages of 16 tokens. Each must leave it idle."""
    folder = tmp_path_factory.mktemp("sockets")
    before, tempfile.tempdir = tempfile.tempdir, str(folder)
    with asyncio.Runner() as runner:

        async def start():
            config = make_config(max_model_len=2048, num_blocks=80, step_seconds=0.004)
            return AsyncLLM(config, EchoExecutor)

        engine = runner.run(start())
        tempfile.tempdir = before
        # The sockets' folder goes as soon as both sides are connected.
        assert not os.listdir(folder)

        async def idle_after(scenario):
            await asyncio.wait_for(scenario(engine), 120)
            await wait_until(lambda: not any(gauges().values()))
            assert not engine.output_processor.has_unfinished_requests()
            await engine.collective_rpc("get_pid")
            assert await engine.collective_rpc("num_known_requests") == [0]

        yield lambda scenario: runner.run(idle_after(scenario))
        engine.shutdown()


class Counted:
    """How much a counter has grown since."""

    def __init__(self, name, **labels):
        self.args = name, labels
        self.before = metric(name, **labels)

    def __call__(self):
        return metric(self.args[0], **self.args[1]) - self.before


def test_many_requests_are_neither_lost_nor_mixed_up(shared):
    """200 at once, preempted and resumed for want of pages, each must get its own number back; in
    the end nothing is left: gauges, pages, the runner's states."""

    async def scenario(engine):
        succeeded = Counted("request_success", finished_reason="length")
        generated, preempted = Counted("generation_tokens"), Counted("num_preemptions")
        prompts = [f"number {i} of two hundred" for i in range(200)]
        numbers = await asyncio.gather(
            *(collect(engine, p, params(40), "same id") for p in prompts)
        )
        for prompt, (text, ids, output) in zip(prompts, numbers):
            assert len(ids) == 40
            assert text.startswith(prompt)
            assert output.request_id == "same id"
        assert succeeded() == 200
        assert generated() == 200 * 40
        assert preempted() > 0

    shared(scenario)


def test_engine_is_another_process_and_idle_means_idle(shared):
    """Guards against a loop that spins while it has nothing to do."""

    def cpu_seconds(pid):
        with open(f"/proc/{pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    async def scenario(engine):
        (pid,) = await engine.collective_rpc("get_pid")
        assert pid == engine.engine_core.engine_process.pid != os.getpid()
        await collect(engine, "hello", params())
        before = cpu_seconds(pid)
        await asyncio.sleep(1.0)
        assert cpu_seconds(pid) - before < 0.2

    shared(scenario)


@pytest.mark.parametrize("how", ["close", "cancel", "abort"])
def test_abort_returns_everything(shared, how):
    """A client that goes away must leave no request, page or count behind."""

    async def scenario(engine):
        aborted = Counted("request_success", finished_reason="abort")
        stream = engine.generate("hello world", params(200), "gone")
        await anext(stream)
        await wait_until(lambda: gauges()["num_requests_running"] == 1)
        if how == "close":
            await stream.aclose()
        elif how == "cancel":
            task = asyncio.ensure_future(anext(stream))
            await asyncio.sleep(0)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
        else:
            await engine.abort("gone")
            outputs = [output async for output in stream]
            assert outputs[-1].outputs[0].finish_reason == "abort"
        assert aborted() == 1

    shared(scenario)


def test_a_bad_request_hurts_only_itself(shared):
    """Refused prompts and requests that outgrow the pool end with their reason; neighbours run."""

    async def scenario(engine):
        neighbour = asyncio.ensure_future(collect(engine, "a good one", params(30)))
        for bad in ("", [], [10**9], [-1], [True], {"prompt": 3}, {"prompts": "x"}, 5, [1] * 2048):
            with pytest.raises(ValueError):
                await collect(engine, bad, params())
        with pytest.raises(ValueError, match="logprobs"):
            await collect(engine, "x", params(logprobs=21))
        # It fits at first, and then no more.
        with pytest.raises(EngineGenerateError, match="79 pages"):
            await collect(engine, [1] * 1240, params(200))
        for n in (1, 3):
            with pytest.raises(EngineGenerateError, match="79 pages"):
                await collect(engine, [1] * 1300, params(n=n))
        text, ids, _ = await neighbour
        assert text.startswith("a good one") and len(ids) == 30

    shared(scenario)


def test_utilities(shared):
    """What may be called, and what is refused without harm."""

    async def scenario(engine):
        assert await engine.get_supported_tasks() == ("generate",)
        assert await engine.reset_prefix_cache() is True
        with pytest.raises(RuntimeError, match="unknown engine utility"):
            await engine._call("shutdown")
        with pytest.raises(RuntimeError, match="no_such_method"):
            await engine.collective_rpc("no_such_method")
        with pytest.raises(RuntimeError, match="cannot be sent"):
            await engine.collective_rpc("get_function")
        with pytest.raises(TypeError, match="process of its own"):
            await engine.collective_rpc(lambda worker: 1)
        text, _, _ = await collect(engine, "still here", params())
        assert text.startswith("still here")

    shared(scenario)


def test_signals_to_the_group_do_not_reach_the_engine(shared):
    """Ctrl-C and SIGTERM go to the whole group; the front must be able to drain its requests."""

    async def scenario(engine):
        request = asyncio.ensure_future(collect(engine, "drain me", params(30)))
        await wait_until(lambda: gauges()["num_requests_running"] == 1)
        for number in (signal.SIGINT, signal.SIGTERM):
            os.kill(engine.engine_core.engine_process.pid, number)
        text, ids, _ = await request
        assert text.startswith("drain me") and len(ids) == 30

    shared(scenario)


def test_n_completions(shared):
    """n streams in one; each has its index and all its tokens."""

    async def scenario(engine):
        for kind in RequestOutputKind:
            tokens = {}
            wanted = params(6, n=3, output_kind=kind)
            async for output in engine.generate([5, 6, 7], wanted, "n"):
                for one in output.outputs:
                    delta = kind is RequestOutputKind.DELTA
                    before = tokens.get(one.index, []) if delta else []
                    tokens[one.index] = before + list(one.token_ids)
            assert output.finished
            assert tokens == {i: [5, 6, 7, 5, 6, 7] for i in range(3)}
        stream = engine.generate([5, 6, 7], params(200, n=3), "n")
        await anext(stream)
        await stream.aclose()

    shared(scenario)


def test_stop_strings_end_the_request_in_the_engine(shared):
    """The engine does not know of stop strings: it must be told."""

    async def scenario(engine):
        stopped = Counted("request_success", finished_reason="stop")
        text, _, output = await collect(engine, "one two three", params(200, stop=["two"]))
        assert text == "one "
        assert output.outputs[0].finish_reason == "stop"
        assert output.outputs[0].stop_reason == "two"
        assert stopped() == 1

    shared(scenario)


# From here on with engines of their own, whose metrics take the place of the shared one's.


@pytest.mark.parametrize("how", ["killed", "killed idle", "failed step"])
def test_dead_engine_fails_every_request(make_config, how):
    """Clients of a dead engine must not wait for ever; health must say so; callbacks must come."""

    async def scenario(engine):
        count = 0 if how == "killed idle" else 20
        requests = [
            asyncio.ensure_future(collect(engine, f"request {i}", params(200)))
            for i in range(count)
        ]
        await wait_until(lambda: gauges()["num_requests_running"] == count)
        died = asyncio.Event()
        engine.add_death_callback(died.set)
        await engine.check_health()
        if how != "failed step":
            os.kill(engine.engine_core.engine_process.pid, signal.SIGKILL)
        else:
            requests.append(asyncio.ensure_future(collect(engine, [POISON], params())))
        results = await asyncio.gather(*requests, return_exceptions=True)
        assert all(type(result) is EngineDeadError for result in results)
        await died.wait()
        assert engine.errored and not engine.is_running
        assert not any(gauges().values())
        with pytest.raises(EngineDeadError):
            await engine.check_health()
        with pytest.raises(EngineDeadError):
            await collect(engine, "more", params())
        with pytest.raises(EngineDeadError):
            await engine.reset_prefix_cache()
        status = engine.engine_core.engine_process._process.returncode
        assert status == (1 if how == "failed step" else -signal.SIGKILL)

    run(make_config, scenario, step_seconds=0.01)


def test_start_failures_are_told(make_config):
    """The user's errors come as ValueErrors with advice, others name the cause; nothing is left."""
    with pytest.raises(ValueError, match="--max-model-len"):
        AsyncLLM(make_config(kv_bytes=4096), EchoExecutor)
    with pytest.raises(RuntimeError, match="told to fail"):
        AsyncLLM(make_config(fail_at_start=True), EchoExecutor)


def test_max_model_len_that_fits(make_config):
    """-1 asks for what the cache holds; the front must learn of it."""

    async def scenario(engine):
        # 99 usable pages of 16 tokens.
        assert engine.model_config.max_model_len == 99 * 16
        with pytest.raises(ValueError, match="1584"):
            await collect(engine, [1] * 2000, params())

    run(make_config, scenario, max_model_len=-1, kv_bytes=100 * 16 * 2 * 8 * 4)


ORPHAN = """
    import asyncio, os, sys
    sys.path.insert(0, {repo!r})
    from tests.v1.engine.echo_executor import EchoExecutor
    from vllm.config import ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.launch import launch_engine_core

    process = launch_engine_core()
    print(process.pid, flush=True)
    if {when!r} == "loading":
        model = ModelConfig(max_model_len=256)
        config = VllmConfig(model_config=model)
        process.send_config(config, EchoExecutor)
    if {when!r} == "serving":
        config = VllmConfig(model_config=ModelConfig(max_model_len=256))
        engine = AsyncLLM(config, EchoExecutor, engine_process=process)
    print("there", flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("when", ["launched", "loading", "serving"])
def test_no_orphan_and_no_files_after_the_front_was_killed(tokenizer, tmp_path, when):
    """A front that is killed can tell nobody: its engine must see it, at any time."""
    code = textwrap.dedent(ORPHAN).format(repo=REPO, when=when)
    front = subprocess.Popen(
        [sys.executable, "-c", code],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        text=True,
    )
    try:
        pid = int(front.stdout.readline())
        assert front.stdout.readline().strip() == "there"
    finally:
        front.kill()
        front.wait()
    while _is_alive(pid):
        time.sleep(0.05)
    assert not glob.glob(f"{tmp_path}/vllm-*")


def _is_alive(pid):
    """Whether a process runs; one that only waits for its parent to ask for it does not."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_a_finished_engine_closes_nobody_elses_socket(make_config):
    """Guards against closing a socket through a second object: the first would close it again when
    it is collected, by an address that a later engine's socket may have by then."""
    left = []

    async def scenario(engine):
        await collect(engine, "x", params())
        left.append(engine.engine_core)

    run(make_config, scenario)
    context = zmq.Context.instance()
    for _ in range(50):  # Until the closed socket's memory is somebody else's.
        time.sleep(0.01)
        later = [context.socket(zmq.PULL) for _ in range(20)]
        if not left[0].engine_process.output_socket.closed:
            break
        for socket in later:
            socket.close()
    else:  # The allocator keeps it: nothing of the old socket's may close any of these either.
        later = [context.socket(zmq.PULL) for _ in range(20)]
    left.clear()
    gc.collect()
    assert not any(socket.closed for socket in later)
    for socket in later:
        socket.close()
