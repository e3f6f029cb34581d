# SPDX-License-Identifier: Apache-2.0
"""What NixlConnector registers with NIXL for the platform's caches, and whether it is their pages."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from importlib.util import find_spec
from unittest import mock

from vllm_platform_kit.findings import Finding
from vllm_platform_kit.views import Layer

Run = tuple[int, int]
# Layer -> page -> what is taken for it, on each end of a transfer.
Pages = dict[str, dict[int, list[list[Run]]]]
# Of NIXL's agent: the argument that holds (address, bytes, device, ...), and what it is for.
RECORDED = {
    "register_memory": "regions",
    "get_reg_descs": "regions",
    "prep_xfer_dlist": "pages",
    "get_xfer_descs": "pages",
}


def why_not() -> str | None:
    """Why there is nothing to look at; None: there is."""
    return None if find_spec("nixl") else "nixl is not installed: pip install nixl"


@dataclass
class Recorder:
    """regions: (address, bytes) registered; pages: those that are named for transfers; connector: the
    one that registered."""

    regions: list[Run] = field(default_factory=list)
    pages: list[Run] = field(default_factory=list)
    connector: object = None

    def note(self, kind: str, arguments: Sequence) -> None:
        """Remembers the descriptors among a call's arguments."""
        for argument in arguments:
            rows = _rows(argument)
            if rows:
                getattr(self, kind).extend(rows)
                return

    def check(self, layers: list[Layer]) -> tuple[list[Finding], list[str]]:
        """Compares what was registered with where the pages of the bound caches are."""
        if self.connector is None:
            text = "register_kv_caches was never called: the worker does not register its caches"
            return [Finding("CONNECTOR_REGIONS", "NixlConnector", text)], []
        held = merged(self.regions)
        findings = [one for layer in layers for one in _outside(layer, held)]
        pages, how = self._pages_of(layers)
        if not findings and pages is not None:
            findings = [one for layer in layers for one in _misnamed(layer, pages[layer.name])]
        return findings, [f"{len(held)} stretches of memory registered; pages: {how}"]

    def _pages_of(self, layers: list[Layer]) -> tuple[Pages | None, str]:
        """What the connector takes for each page."""
        registration = getattr(
            getattr(self.connector, "connector_worker", None), "registration", None
        )
        if registration is not None:
            return _read_from_itself(registration), "as the connector would read them"
        if not self.pages:
            return None, "not looked at, this connector names none before a transfer"
        named = sorted(set(self.pages))
        pages = {
            layer.name: {
                page: [_touching(named, page_runs(layer, page))]
                for page in range(layer.geometry.num_pages)
            }
            for layer in layers
        }
        return pages, f"{len(named)} named for transfers"


def _read_from_itself(registration) -> Pages:
    """The runs of the connector's own way from pages to reads, with itself as the peer: those that are
    read and those that are written. Page 0 stands for none there."""
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.page_map import match_pages
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.peer import pair_groups

    own = [layer for layer in registration.layers.values() if layer.alias_of is None]
    pages: Pages = {}
    # No raw bytes: none are moved.
    for group in pair_groups(registration, dict.fromkeys(registration.layers), own):
        for bundle in group.bundles:
            pagings, count = bundle.layers[0].pagings, len(bundle.layers)
            names = [pair.local.name for pair in bundle.layers]
            for page in range(1, registration.num_blocks):
                pieces, _ = match_pages([page], [page], *pagings, pagings[0].tokens_per_page)
                columns = [column.reshape(count, -1).tolist() for column in bundle.runs(pieces)]
                for name, here, there, sizes in zip(names, *columns):
                    ends = [list(zip(there, sizes)), list(zip(here, sizes))]
                    pages.setdefault(name, {})[page] = ends
    aliases = {name: layer.alias_of or name for name, layer in registration.layers.items()}
    return {name: pages[alias] for name, alias in aliases.items()}


def _rows(argument: object) -> list[Run]:
    if isinstance(argument, str | bytes) or not hasattr(argument, "__len__"):
        return []
    try:
        return [(int(row[0]), int(row[1])) for row in argument]
    except (TypeError, IndexError, ValueError, KeyError):
        return []


def merged(runs: Sequence[Run]) -> list[Run]:
    """Runs of bytes, ascending, those that touch or overlap as one."""
    found: list[Run] = []
    for address, length in sorted(runs):
        if found and sum(found[-1]) >= address:
            start = found[-1][0]
            found[-1] = (start, max(sum(found[-1]), address + length) - start)
        else:
            found.append((address, length))
    return found


def page_runs(layer: Layer, page: int) -> list[Run]:
    """(address, bytes) of a page of the cache that the layer is bound to."""
    base = layer.tensor.untyped_storage().data_ptr()
    return [(base + offset, length) for offset, length in layer.geometry.page_runs(page)]


def _touching(named: list[Run], runs: list[Run]) -> list[Run]:
    return [
        one
        for one in named
        if any(one[0] < start + length and start < sum(one) for start, length in runs)
    ]


def _outside(layer: Layer, held: list[Run]) -> Iterator[Finding]:
    for page in range(layer.geometry.num_pages):
        for start, length in page_runs(layer, page):
            if not any(a <= start and start + length <= a + n for a, n in held):
                what = f"no registered region holds page {page} ({length} bytes of it)"
                yield Finding("CONNECTOR_REGIONS", f"layer {layer.name}", what)
                return


def _misnamed(layer: Layer, pages: dict[int, list[list[Run]]]) -> Iterator[Finding]:
    for page, ends in pages.items():
        right = merged(page_runs(layer, page))
        runs = next((one for one in ends if merged(one) != right), None)
        if runs is not None:
            base = layer.tensor.untyped_storage().data_ptr()
            words = ", ".join(f"{a - base} to {a - base + n}" for a, n in merged(runs)[:4])
            wanted = ", ".join(f"{a - base} to {a - base + n}" for a, n in right[:4])
            what = f"page {page} is bytes {wanted} of its memory, transferred are {words or 'none'}"
            yield Finding("CONNECTOR_PAGES", f"layer {layer.name}", what)
            return


@contextmanager
def recording() -> Iterator[Recorder]:
    """Watches NIXL's agent, which does its work all the same, and the connector's registration."""
    from nixl._api import nixl_agent
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    recorder = Recorder()
    connector_cls = KVConnectorFactory.get_connector_class_by_name("NixlConnector")
    register = connector_cls.register_kv_caches

    def registering(connector, *args, **kwargs):
        recorder.connector = connector
        return register(connector, *args, **kwargs)

    with ExitStack() as patches:
        patches.enter_context(
            mock.patch.object(connector_cls, "register_kv_caches", registering)
        )
        for name, kind in RECORDED.items():
            original = getattr(nixl_agent, name)
            watched = _watched(recorder, kind, original)
            patches.enter_context(mock.patch.object(nixl_agent, name, watched))
        port = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(_free_port())}
        patches.enter_context(mock.patch.dict(os.environ, port))
        yield recorder


def _watched(recorder: Recorder, kind: str, original):
    def call(agent, *args, **kwargs):
        recorder.note(kind, [*args, *kwargs.values()])
        return original(agent, *args, **kwargs)

    return call


def _free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]
