# SPDX-License-Identifier: Apache-2.0
"""A KV connector outside vLLM's tree: pages in memory, shared by the engines of one process."""


def register() -> None:
    """Makes the connector known by its short name."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    KVConnectorFactory.register_connector(
        "MemoryConnector", "vllm_memory_connector.connector", "MemoryConnector"
    )
