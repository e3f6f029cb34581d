# SPDX-License-Identifier: Apache-2.0
"""The port is claimed before a model is loaded, and a claim that fails says what to do."""

from __future__ import annotations

import socket

import pytest

from vllm.entrypoints.sockets import base_url, create_server_socket


def test_a_port_has_one_owner():
    """Two servers that start side by side must not both believe that the port is theirs."""
    with create_server_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(OSError, match=f"port {port} on 127.0.0.1 is in use: .*--port"):
            create_server_socket("127.0.0.1", port)
        with pytest.raises(OSError, match="in use"):
            create_server_socket(None, port)


def test_a_port_can_be_taken_again():
    """A server that was stopped starts again at once, though its old connections linger."""
    with create_server_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)):
            accepted, _ = first.accept()
            accepted.close()  # our side closes first, so our side lingers
    create_server_socket("127.0.0.1", port).close()


@pytest.mark.parametrize("host", ["203.0.113.7", "no such host.invalid", "256.1.1.1", "x" * 300])
def test_addresses_that_are_not_ours(host):
    """The flag at fault is named."""
    with pytest.raises(OSError, match="--host|is no address"):
        create_server_socket(host, 0)


@pytest.mark.parametrize(("host", "shown"), [(None, "localhost"), ("127.0.0.1", "127.0.0.1")])
def test_base_url(host, shown):
    """An address to paste: 0.0.0.0 is none."""
    with create_server_socket(host, 0) as sock:
        assert base_url(sock) == f"http://{shown}:{sock.getsockname()[1]}"
        socket.create_connection(("localhost", sock.getsockname()[1])).close()


def test_ipv6():
    """Brackets in the URL."""
    try:
        sock = create_server_socket("::1", 0)
    except OSError:
        pytest.skip("no IPv6 here")
    with sock:
        assert base_url(sock) == f"http://[::1]:{sock.getsockname()[1]}"
