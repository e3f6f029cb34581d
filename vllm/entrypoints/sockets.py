# SPDX-License-Identifier: Apache-2.0
"""The server's socket, claimed before anything is loaded. Imports nothing heavy."""

from __future__ import annotations

import errno
import socket


def create_server_socket(host: str | None, port: int) -> socket.socket:
    """A socket that listens on `host` (None: every interface) and `port` (0: any free one).

    It listens at once: two servers that start side by side could otherwise both bind the port, and
    the second would learn of it only when its model is loaded. Clients that come early wait.

    Raises:
        OSError: with a message that says what to do.
    """
    family = socket.AF_INET6 if host and ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    # Lets a server start again while connections of the last one time out.
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host or "", port))
        sock.listen(2048)
    except OSError as error:
        sock.close()
        raise OSError(error.errno, _advice(error, host, port)) from None
    except (OverflowError, UnicodeError) as error:
        sock.close()
        raise OSError(errno.EINVAL, f"{host!r}:{port} is no address: {error}") from None
    return sock


def _advice(error: OSError, host: str | None, port: int) -> str:
    where = f"port {port}" + (f" on {host}" if host else "")
    if error.errno == errno.EADDRINUSE:
        advice = "stop what listens there, or pass another --port (0: any free one)"
        return f"{where} is in use: {advice}"
    if error.errno == errno.EACCES:
        return f"{where} needs more rights than this process has: pass a --port of 1024 or more"
    return f"cannot listen on {where} ({error.strerror}): pass an address of this machine as --host"


def base_url(sock: socket.socket, scheme: str = "http") -> str:
    """A URL that reaches `sock` from this machine."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "localhost", "::": "localhost"}.get(host, host)
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}"
