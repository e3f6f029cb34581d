# SPDX-License-Identifier: Apache-2.0
"""What a request says of its prefill server, and what is read for it. Neither NIXL nor torch."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import RemoteMeta
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.scheduler import NixlConnectorScheduler
from vllm.sampling_params import SamplingParams
from vllm.v1.core.kv_cache_block import KVCacheBlock
from vllm.v1.core.kv_cache_manager import KVCacheBlocks
from vllm.v1.request import Request

PARAMS = {
    "do_remote_prefill": True,
    "remote_engine_id": "e",
    "remote_request_id": "r",
    "remote_host": "localhost",
    "remote_port": 5600,
    "remote_block_ids": [[1, 2, 3]],
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("remote_port", -1),
        ("remote_port", 0),
        ("remote_port", 1 << 16),
        ("remote_port", True),
        ("remote_port", "5600"),
        ("remote_host", None),
        ("remote_engine_id", 3),
        ("remote_block_ids", [1]),
        ("remote_block_ids", [[-1]]),
        ("remote_block_ids", [[True]]),
    ],
)
def test_what_no_prefill_server_says_is_refused(name, value):
    """Guards against what comes from a client reaching a socket or an address."""
    assert RemoteMeta.from_params(PARAMS).port == 5600
    with pytest.raises(ValueError, match=name):
        RemoteMeta.from_params({**PARAMS, name: value})


@pytest.mark.parametrize("told", [40, 100, 1000, None])
def test_what_is_read_ends_where_the_peer_ends(told):
    """The peer has computed a beginning of the prompt. Guards against asking it for tokens that it
    has not: with larger pages here, a page that it has in part would count as missing."""
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")
    )
    groups = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=None)])
    scheduler = NixlConnectorScheduler(config, "here", groups)
    params = {**PARAMS, "remote_num_tokens": told}
    request = Request(
        "a", list(range(100)), SamplingParams(extra_args={"kv_transfer_params": params})
    )
    scheduler.on_new_request(request)
    num_remote = min(100, told or 100)
    assert scheduler.get_num_new_matched_tokens(request, 16) == (num_remote - 16, True)
    pages = [KVCacheBlock(7), KVCacheBlock(8)]
    scheduler.update_state_after_alloc(request, KVCacheBlocks((pages,)), num_remote - 16)
    meta = scheduler.build_connector_meta().reqs_to_recv["a"]
    assert meta.num_tokens == (num_remote,) and meta.local_block_ids == ([7, 8],)
