# SPDX-License-Identifier: Apache-2.0
"""`--kv-transfer-config`: what users write for upstream is taken, what cannot be is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from vllm.config import KVTransferConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.argparse_utils import FlexibleArgumentParser


def parse(*flags: str) -> KVTransferConfig | None:
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    args = EngineArgs.from_cli_args(parser.parse_args(list(flags)))
    return args.create_engine_config().kv_transfer_config


def test_no_flag_no_connector():
    assert parse() is None


def test_json_flag():
    """The line that users and routers already write."""
    value = {"kv_connector": "NixlConnector", "kv_role": "kv_both"}
    made = parse("--kv-transfer-config", json.dumps(value))
    assert made.kv_connector == "NixlConnector"
    assert made.is_kv_transfer_instance and made.is_kv_producer and made.is_kv_consumer
    assert made.kv_load_failure_policy == "fail"
    assert made.kv_buffer_device == "cpu"


@pytest.mark.parametrize(
    ("role", "produces", "consumes"),
    [("kv_producer", True, False), ("kv_consumer", False, True), ("kv_both", True, True)],
)
def test_roles(role: str, produces: bool, consumes: bool):
    made = KVTransferConfig(kv_connector="A", kv_role=role)
    assert (made.is_kv_producer, made.is_kv_consumer) == (produces, consumes)


def test_two_engines_have_different_ids():
    """Peers tell engines apart by it: two that left it out must not look like one."""
    ids = {KVTransferConfig(kv_connector="A", kv_role="kv_both").engine_id for _ in range(8)}
    assert len(ids) == 8
    assert KVTransferConfig(engine_id="mine").engine_id == "mine"


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ({"kv_connector": "A"}, ["kv_role", "kv_both", "kv_consumer", "kv_producer"]),
        ({"kv_connector": "A", "kv_role": "both"}, ["kv_role", "kv_both", "'both'"]),
        ({"kv_role": "kv_both"}, ["kv_connector", "NixlConnector"]),
        ({"kv_connector": "A", "kv_role": "kv_both", "kv_roel": 1}, ["kv_roel"]),
        (
            {"kv_connector": "A", "kv_role": "kv_both", "kv_load_failure_policy": "retry"},
            ["kv_load_failure_policy", "recompute", "fail"],
        ),
    ],
)
def test_refused_in_one_line(value: dict[str, object], words: list[str]):
    """A mistake in the JSON must not end as a connector that silently does nothing."""
    with pytest.raises(ValueError) as caught:
        parse("--kv-transfer-config", json.dumps(value))
    message = str(caught.value)
    assert "\n" not in message
    assert all(word in message for word in words), message


def test_fields_without_effect_warn(caplog: pytest.LogCaptureFixture):
    """Nothing is dropped silently."""
    with caplog.at_level("WARNING"):
        KVTransferConfig(kv_connector="A", kv_role="kv_both", kv_port=1)
    assert "kv_port has no effect" in caplog.text


def test_interface_without_torch():
    """The scheduler's half and the API server's metrics run where torch is not imported."""
    code = (
        "import sys\n"
        "import vllm.distributed.kv_transfer.kv_connector.factory\n"
        "import vllm.distributed.kv_transfer.kv_connector.v1.metrics\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
