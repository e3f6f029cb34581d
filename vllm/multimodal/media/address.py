# SPDX-License-Identifier: Apache-2.0
"""Which network addresses media may be fetched from: public ones."""

from __future__ import annotations

import ipaddress

# IPv6 that carries IPv4 addresses or goes through relays: what is behind cannot be told.
_TRANSITION = tuple(
    ipaddress.ip_network(network)
    for network in ("::/96", "64:ff9b::/96", "64:ff9b:1::/48", "2001::/32", "2002::/16")
)
_GLOBAL_UNICAST = ipaddress.ip_network("2000::/3")


def is_public(address: str) -> bool:
    """Whether an IP address belongs to the public internet: not to this machine, a private network,
    a link, a group, a transition mechanism, or nobody."""
    try:
        ip = ipaddress.ip_address(address)
    except ValueError:
        return False
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is not None:
            return is_public(str(ip.ipv4_mapped))
        if ip.scope_id is not None or ip not in _GLOBAL_UNICAST:
            return False
        if any(ip in network for network in _TRANSITION):
            return False
    special = (
        ip.is_loopback, ip.is_private, ip.is_link_local, ip.is_multicast, ip.is_reserved,
        ip.is_unspecified,
    )  # fmt: skip
    return ip.is_global and not any(special)


def check_host_name(host: str) -> None:
    """Raises ValueError where an entry of --allowed-media-domains could match no URL's host."""
    try:
        host.encode("idna")
        is_name = bool(host) and not any(c in "/@*?#" or c.isspace() for c in host)
    except UnicodeError:
        is_name = False
    if not is_name:
        raise ValueError(
            f"--allowed-media-domains takes host names such as images.example.org, not {host!r}"
        )
