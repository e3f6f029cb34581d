# SPDX-License-Identifier: Apache-2.0
"""Files over http(s) from hosts that are allowed, in bounded size and time.

A client who names a URL must not reach what only the server can: the name is resolved once, every
address it has must be public, and the connection goes to the address that was checked, so that a
second answer of the name server cannot lead elsewhere. Redirects are checked like the first URL.

`http.client` is used because it talks over whatever socket it is given; libraries with a pool
resolve the name once more themselves. No proxy is used, and no address of a user's account sent.
"""

from __future__ import annotations

import http.client
import socket
import ssl
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from urllib.parse import SplitResult, urljoin, urlsplit

from vllm.multimodal.media.address import check_host_name, is_public
from vllm.multimodal.media.image import MAX_MEDIA_BYTES

MAX_REDIRECTS = 5
MAX_URL_CHARS = 8192
# Of a name, that are tried.
MAX_ADDRESSES = 4
_CHUNK_BYTES = 1 << 16
_REDIRECTS = (301, 302, 303, 307, 308)
_PORTS = {"http": 80, "https": 443}
_LOOKUPS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="media-dns")

Resolver = Callable[[str, int], Sequence[str]]
"""(host, port) -> its addresses. May raise OSError."""
Connector = Callable[[str, int, float], socket.socket]
"""(address, port, seconds) -> a connected socket. May raise OSError."""


def resolve(host: str, port: int) -> Sequence[str]:
    """The system's resolver."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def connect(address: str, port: int, timeout_s: float) -> socket.socket:
    """A TCP connection to an address, which is a number and not a name."""
    return socket.create_connection((address, port), timeout_s)


@dataclass(frozen=True)
class Target:
    """Where a URL leads, its host checked against the allowed ones."""

    scheme: str
    host: str
    port: int
    path: str

    @property
    def host_header(self) -> str:
        """As the server expects it."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _PORTS[self.scheme] else f"{host}:{self.port}"


@dataclass
class MediaFetcher:
    """Fetches from `allowed_domains` (host names, in full), in `timeout_s` seconds altogether."""

    allowed_domains: Sequence[str]
    timeout_s: float = 5.0
    max_bytes: int = MAX_MEDIA_BYTES
    resolver: Resolver = resolve
    connector: Connector = connect
    tls: ssl.SSLContext | None = None
    """None: certificates of the system's authorities."""
    _allowed: frozenset[str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        for host in self.allowed_domains:
            check_host_name(host)
        self._allowed = frozenset(_canonical(host) for host in self.allowed_domains)

    def fetch(self, url: str) -> bytes:
        """The body that a URL leads to.

        Raises:
            ValueError: it may not be fetched, or could not be; the message is for the client and
                tells no address.
        """
        deadline = time.monotonic() + self.timeout_s
        for _ in range(MAX_REDIRECTS + 1):
            target = self.check(url)
            try:
                found = self._get(target, deadline)
            except TimeoutError:
                raise ValueError(
                    f"{target.host} did not answer in {self.timeout_s:g} s"
                ) from None
            if isinstance(found, bytes):
                return found
            url = urljoin(url, found)
        raise ValueError(f"the URL redirects more than {MAX_REDIRECTS} times")

    def check(self, url: str) -> Target:
        """Raises ValueError where the URL's host is not allowed, or the URL is no plain one."""
        if len(url) > MAX_URL_CHARS or any(not 32 < ord(c) < 127 or c == "\\" for c in url):
            raise ValueError(
                f"the URL must be at most {MAX_URL_CHARS} printable ASCII characters without spaces"
            )
        try:
            parts = urlsplit(url)
            port = parts.port
            host = _canonical(parts.hostname or "")
        except ValueError:
            raise ValueError("the URL is not valid") from None
        if parts.scheme not in _PORTS:
            raise ValueError(f"URLs of {parts.scheme or 'no scheme'} are not supported")
        if "@" in parts.netloc:
            raise ValueError("the URL must not name a user")
        if host not in self._allowed:
            raise ValueError(
                f"media of {host or 'no host'} are not fetched: this server's "
                f"--allowed-media-domains has "
                f"{', '.join(sorted(self._allowed)) or 'none'}; send the image as a data URL"
            )
        port = _PORTS[parts.scheme] if port is None else port
        return Target(parts.scheme, host, port, _path_of(parts))

    def _get(self, target: Target, deadline: float) -> bytes | str:
        """The body, or the URL that the answer redirects to."""
        sock = self._connect(target, self._addresses_of(target, deadline), deadline)
        with _Deadline(sock, deadline) as connection:
            try:
                return self._exchange(connection, target, deadline)
            except (OSError, http.client.HTTPException) as error:
                if isinstance(error, TimeoutError) or time.monotonic() >= deadline:
                    raise TimeoutError from None
                reason = "is not trusted" if isinstance(error, ssl.SSLError) else "failed"
                raise ValueError(f"the connection to {target.host} {reason}") from None

    def _connect(
        self, target: Target, addresses: Sequence[str], deadline: float
    ) -> socket.socket:
        """A connection to the first address that takes one. Each may use its share of what time is
        left, so that one which says nothing leaves some for the next."""
        timed_out = False
        for index, address in enumerate(addresses):
            share_s = _left(deadline) / (len(addresses) - index)
            try:
                return self.connector(address, target.port, share_s)
            except OSError as error:
                timed_out |= isinstance(error, TimeoutError)
        if timed_out:
            raise TimeoutError
        raise ValueError(f"{target.host} cannot be reached")

    def _addresses_of(self, target: Target, deadline: float) -> list[str]:
        lookup = _LOOKUPS.submit(self.resolver, target.host, target.port)
        try:
            addresses = lookup.result(timeout=_left(deadline))
        except (OSError, UnicodeError):  # a timeout is an OSError
            lookup.cancel()
            raise ValueError(f"the name {target.host} cannot be resolved") from None
        # One that is not public is enough: an owner of the name could have it tried next.
        if not addresses or not all(is_public(address) for address in addresses):
            raise ValueError(f"media of {target.host} are not fetched: its address is not public")
        return list(addresses[:MAX_ADDRESSES])

    def _exchange(self, guarded: _Deadline, target: Target, deadline: float) -> bytes | str:
        guarded.sock.settimeout(_left(deadline))
        if target.scheme == "https":
            tls = self.tls or ssl.create_default_context()
            guarded.sock = tls.wrap_socket(
                guarded.sock, server_hostname=target.host, do_handshake_on_connect=False
            )
            guarded.sock.do_handshake()
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock = guarded.sock
        try:
            connection.putrequest("GET", target.path, skip_host=True, skip_accept_encoding=True)
            connection.putheader("Host", target.host_header)
            connection.putheader("Accept", "image/*")
            connection.putheader("Accept-Encoding", "identity")
            connection.putheader("Connection", "close")
            connection.endheaders()
            return self._answer(connection.getresponse(), target, deadline)
        finally:
            connection.close()

    def _answer(
        self, response: http.client.HTTPResponse, target: Target, deadline: float
    ) -> bytes | str:
        if response.status in _REDIRECTS:
            location = response.headers.get("Location")
            if not location:
                raise ValueError(f"{target.host} redirects to nowhere")
            return location
        if response.status != 200:
            raise ValueError(f"{target.host} answered with status {response.status}")
        if response.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise ValueError(f"{target.host} sent a compressed answer, which was not asked for")
        too_large = f"the file is larger than {self.max_bytes} bytes"
        if response.length is not None and response.length > self.max_bytes:
            raise ValueError(too_large)
        body = bytearray()
        while chunk := response.read1(_CHUNK_BYTES):
            body += chunk
            if len(body) > self.max_bytes:
                raise ValueError(too_large)
            _left(deadline)
        if response.length:
            raise http.client.IncompleteRead(bytes(body), response.length)
        _left(deadline)
        return bytes(body)


class _Deadline:
    """A connection that ends at a deadline: a server may send a byte a second, so that what bounds
    each read bounds nothing."""

    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self._timer = threading.Timer(max(deadline - time.monotonic(), 0.0), self._shut)
        self._timer.daemon = True

    def __enter__(self) -> _Deadline:
        self._timer.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._timer.cancel()
        self.sock.close()

    def _shut(self) -> None:
        try:
            # Not ssl's own, which takes the state away that a read in another thread uses.
            socket.socket.shutdown(self.sock, socket.SHUT_RDWR)
        except OSError:
            pass  # It has ended.


def _canonical(host: str) -> str:
    """A host name in one spelling."""
    return host.encode("idna").decode().lower().rstrip(".") if host else ""


def _path_of(parts: SplitResult) -> str:
    return (parts.path or "/") + (f"?{parts.query}" if parts.query else "")


def _left(deadline: float) -> float:
    """Seconds left.

    Raises:
        TimeoutError: none.
    """
    left = deadline - time.monotonic()
    if left <= 0:
        raise TimeoutError
    return left
