# SPDX-License-Identifier: Apache-2.0
"""What the scheduler's half tells of requests that wait."""

from __future__ import annotations

from types import SimpleNamespace

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import scheduler as module
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus


def ask(scheduler: NixlConnectorScheduler, name: str) -> Request:
    params = {
        "do_remote_prefill": True, "remote_engine_id": "e", "remote_request_id": f"peer's {name}",
        "remote_host": "localhost", "remote_port": 1, "remote_block_ids": [[1]],
    }  # fmt: skip
    params = SamplingParams(extra_args={"kv_transfer_params": params})
    request = Request(name, [1, 2], params)
    scheduler.on_new_request(request)
    return request


def beats(scheduler: NixlConnectorScheduler) -> set[str]:
    """Requests that the next step's heartbeats name."""
    told = scheduler.build_connector_meta().heartbeats.values()
    return {name.removeprefix("peer's ") for info in told for name in info.req_ids}


def test_who_is_told_of_in_which_step(monkeypatch):
    """A request that comes is told of at once and alone, all of them at each interval, and none that
    has ended. Guards against 10,000 names that each step sends while requests come."""
    now = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: now[0])
    config = KVTransferConfig(
        kv_connector="NixlConnector", kv_role="kv_both",
        kv_connector_extra_config={"heartbeat_seconds": 5},
    )  # fmt: skip
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    scheduler = NixlConnectorScheduler(
        SimpleNamespace(kv_transfer_config=config), "here", groups
    )
    first = ask(scheduler, "a")
    assert beats(scheduler) == {"a"} and beats(scheduler) == set()
    ask(scheduler, "b")
    ask(scheduler, "c")
    assert beats(scheduler) == {"b", "c"} and beats(scheduler) == set()
    now[0] += 4.9
    assert beats(scheduler) == set()
    now[0] += 0.2
    assert beats(scheduler) == {"a", "b", "c"}
    gone = ask(scheduler, "gone")
    for request in (first, gone):
        request.status = RequestStatus.FINISHED_ABORTED
        scheduler.request_finished(request, ([],))
    assert beats(scheduler) == set()
    now[0] += 5
    assert beats(scheduler) == {"b", "c"}
