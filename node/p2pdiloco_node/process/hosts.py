"""At which addresses this machine may be reached, and whether a request came from this machine itself."""

from __future__ import annotations

import ipaddress

import psutil


def reachable_hosts(listen: str) -> list[str]:
    """IP literals at which others may reach a server that listens on `listen`."""
    address = ipaddress.ip_address(listen)
    if not address.is_unspecified:
        return [str(address)]
    found = []
    for addresses in psutil.net_if_addrs().values():
        for one in addresses:
            try:
                host = ipaddress.ip_address(one.address)
            except ValueError:
                continue  # a hardware address, or one with a zone
            if (
                not host.is_loopback
                and not host.is_link_local
                and (host.version == 4 or address.version == 6)
            ):
                found.append(host)
    # Public ones first: they work from everywhere.
    return [str(host) for host in sorted(found, key=lambda h: (h.is_private, h.version, int(h)))][:4]


def names_loopback(host: str) -> bool:
    """Against a page that points its own name at this machine (DNS rebinding). `host`: of a request."""
    name = host.rsplit(":", 1)[0].strip("[]")
    if name == "localhost":
        return True
    try:
        return ipaddress.ip_address(name).is_loopback
    except ValueError:
        return False
