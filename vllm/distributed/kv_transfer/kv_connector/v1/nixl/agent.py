# SPDX-License-Identifier: Apache-2.0
"""NIXL, as far as it is needed here: memory is registered, peers are known, their memory is read."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import Runs
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.regions import Region


class TransferError(RuntimeError):
    """A transfer did not happen, or not to its end."""


@dataclass(frozen=True)
class Memory:
    """Whose addresses are meant: NIXL's kind of memory, and the device's number."""

    mem_type: str = "DRAM"
    device_id: int = 0

    @classmethod
    def of_device(cls, device_index: int) -> Memory:
        """`device_index`: as `torch.Tensor.get_device` says it, -1 for the host."""
        return cls() if device_index < 0 else cls("VRAM", device_index)


class Transfer:
    """A read under way."""

    def __init__(self, agent: Any, handle: Any, nbytes: int, num_descriptors: int) -> None:
        self._agent = agent
        self._handle = handle
        self.nbytes = nbytes
        self.num_descriptors = num_descriptors

    def is_done(self) -> bool:
        """Whether every byte has arrived.

        Raises:
            TransferError: they will not.
        """
        try:
            state = self._agent.check_xfer_state(self._handle)
        except Exception as error:  # NIXL's own classes of errors differ between its builds.
            raise TransferError(f"NIXL: {error}") from error
        if state == "ERR":
            raise TransferError("NIXL: the transfer failed")
        return state == "DONE"

    def release(self) -> bool:
        """Gives it up. False: NIXL cannot stop it yet, so its bytes may still arrive."""
        if self._handle is None:
            return True
        try:
            self._agent.release_xfer_handle(self._handle)
        except Exception:
            return False
        self._handle = None
        return True


class NixlAgent:
    """An agent of this process with UCX.

    Args:
        progress_thread: NIXL's own thread serves peers. It never sleeps; without it `progress` does
            that whenever it is called.

    Raises:
        ValueError: NIXL is not installed.
    """

    def __init__(self, name: str, memory: Memory, progress_thread: bool = False) -> None:
        try:
            from nixl._api import nixl_agent, nixl_agent_config
        except ImportError as error:
            raise ValueError(
                f"NixlConnector needs NIXL, which cannot be imported ({error}): pip install nixl"
            ) from error
        self._agent = nixl_agent(name, nixl_agent_config(progress_thread, backends=["UCX"]))
        self.memory = memory
        # Peers by what they say of themselves, and how often each was added.
        self._names: dict[bytes, str] = {}
        self._num_users: Counter[str] = Counter()

    def register(self, regions: Sequence[Region]) -> Any:
        """Makes memory readable for peers and writable for reads; what `deregister` takes."""
        device = self.memory.device_id
        descs = [(region.address, region.nbytes, device, "") for region in regions]
        return self._agent.register_memory(descs, self.memory.mem_type)

    def deregister(self, registered: Any) -> None:
        """Takes back `register`."""
        self._agent.deregister_memory(registered)

    def metadata(self) -> bytes:
        """What peers need to read the registered memory."""
        return self._agent.get_agent_metadata()

    def add_peer(self, metadata: bytes) -> str:
        """A peer's name here. One that is reached at several addresses is known once, until
        `remove_peer` was called as often as this.

        Raises:
            TransferError: those are no metadata, or another's name is in them.
        """
        name = self._names.get(metadata)
        if name is None:
            try:
                told = self._agent.add_remote_agent(metadata)
            except Exception as error:
                raise TransferError(f"NIXL: {error}") from error
            name = told.decode() if isinstance(told, bytes) else told
            if name in self._names.values():
                raise TransferError(f"NIXL: another peer is called {name}")
            self._names[metadata] = name
        self._num_users[name] += 1
        return name

    def remove_peer(self, name: str) -> None:
        """Forgets a peer."""
        self._num_users[name] -= 1
        if self._num_users[name] <= 0:
            del self._num_users[name]
            self._names = {data: each for data, each in self._names.items() if each != name}
            self._agent.remove_remote_agent(name)

    def progress(self) -> None:
        """Serves peers that connect or read."""
        self._agent.get_new_notifs()

    def read(self, peer: str, runs: Runs, remote: Memory) -> Transfer:
        """Starts to copy `runs` (addresses) from the peer.

        Raises:
            TransferError: the peer is gone, or an address is outside what is registered.
        """
        try:
            local = self._descs(runs.local, runs.length, self.memory)
            theirs = self._descs(runs.remote, runs.length, remote)
            handle = self._agent.initialize_xfer("READ", local, theirs, peer)
        except Exception as error:
            raise TransferError(f"NIXL: {error}") from error
        transfer = Transfer(self._agent, handle, runs.nbytes, len(runs.length))
        try:
            state = self._agent.transfer(handle)
        except Exception as error:
            transfer.release()
            raise TransferError(f"NIXL: {error}") from error
        if state == "ERR":
            transfer.release()
            raise TransferError("NIXL: the transfer could not be started")
        return transfer

    def _descs(self, addresses: np.ndarray, lengths: np.ndarray, memory: Memory) -> Any:
        rows = np.empty((len(addresses), 3), dtype=np.uint64)
        rows[:, 0], rows[:, 1], rows[:, 2] = addresses, lengths, memory.device_id
        return self._agent.get_xfer_descs(rows, memory.mem_type)
