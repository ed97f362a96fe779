"""Peer addresses are chosen by strangers: checked here before anything connects (traps.md, Addresses).

Only IP literals; what hides an IPv4 address (mapped, 6to4, NAT64, IPv4-compatible) is judged by it, and it
is the IPv4 address that is returned. Ranges are written out rather than taken from `is_global`, whose
answers changed between releases of Python.
"""

from __future__ import annotations

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

from p2pdiloco.errors import PeerError

Address = IPv4Address | IPv6Address

LOOPBACK = (IPv4Network("127.0.0.0/8"), IPv6Network("::1/128"))
PRIVATE = (
    IPv4Network("10.0.0.0/8"),
    IPv4Network("172.16.0.0/12"),
    IPv4Network("192.168.0.0/16"),
    IPv6Network("fc00::/7"),
)
# Cloud metadata and wire servers that stand in otherwise allowed ranges.
METADATA = (
    IPv4Address("169.254.169.254"),
    IPv4Address("100.100.100.200"),
    IPv4Address("168.63.129.16"),
    IPv4Address("192.0.0.192"),
    IPv6Address("fd00:ec2::254"),
    IPv6Address("fd20:ce::254"),
)
NEVER = (
    (IPv4Network("0.0.0.0/8"), "unspecified"),
    (IPv4Network("100.64.0.0/10"), "carrier-grade NAT"),
    (IPv4Network("169.254.0.0/16"), "link-local"),
    (IPv4Network("192.0.0.0/24"), "reserved"),
    (IPv4Network("192.0.2.0/24"), "documentation"),
    (IPv4Network("192.88.99.0/24"), "6to4 relay"),
    (IPv4Network("198.18.0.0/15"), "benchmarking"),
    (IPv4Network("198.51.100.0/24"), "documentation"),
    (IPv4Network("203.0.113.0/24"), "documentation"),
    (IPv4Network("224.0.0.0/4"), "multicast"),
    (IPv4Network("240.0.0.0/4"), "reserved"),
    (IPv6Network("::/128"), "unspecified"),
    (IPv6Network("64:ff9b:1::/48"), "local NAT64"),
    (IPv6Network("100::/64"), "discard"),
    (IPv6Network("2001::/23"), "protocol assignment"),  # Teredo, ORCHID and others
    (IPv6Network("2001:db8::/32"), "documentation"),
    (IPv6Network("3fff::/20"), "documentation"),
    (IPv6Network("5f00::/16"), "segment routing"),
    (IPv6Network("fe80::/10"), "link-local"),
    (IPv6Network("fec0::/10"), "site-local"),
    (IPv6Network("ff00::/8"), "multicast"),
)
NAT64 = IPv6Network("64:ff9b::/96")
SIX_TO_FOUR = IPv6Network("2002::/16")
COMPATIBLE = IPv6Network("::/96")
ISATAP = (0x00005EFE, 0x02005EFE)  # upper half of an interface identifier that ends in an IPv4 address


def check_address(
    host: str, port: int, *, local: bool = False, same_public: bool = False, own: frozenset[tuple[str, int]]
) -> str:
    """The canonical literal that may be connected to.

    `local`: the RunSpec's admission is local, so loopback and private ranges are fine. `same_public`: this
    node and the peer share a public address, so private ones are. `own`: where this node listens itself.

    Raises:
        PeerError: BAD_ADDRESS with the reason.
    """
    if not 0 < port < 65536:
        raise PeerError("BAD_ADDRESS", f"port {port}")
    address = unwrapped(_literal(host))
    reason = forbidden(address, local=local, same_public=same_public)
    if reason is None and (str(address), port) in own:
        reason = "this node's own"
    if reason is not None:
        raise PeerError("BAD_ADDRESS", f"{address} is {reason}")
    return str(address)


def is_dialable(host: str) -> bool:
    """Whether nodes of an open run connect to this literal."""
    try:
        check_address(host, 1, own=frozenset())
    except PeerError:
        return False
    return True


def forbidden(address: Address, *, local: bool = False, same_public: bool = False) -> str | None:
    """Why nothing may connect to an unwrapped address, or None."""
    if address in METADATA:
        return "a cloud's metadata service"
    for network, reason in NEVER:
        if address in network:
            return reason
    if not local and any(address in network for network in LOOPBACK):
        return "loopback, allowed only where the run's admission is local"
    if not (local or same_public) and any(address in network for network in PRIVATE):
        return "private, allowed only in local runs and between peers behind one public address"
    if isinstance(address, IPv6Address) and (int(address) >> 32) & 0xFFFFFFFF in ISATAP:
        return forbidden(
            IPv4Address(int(address) & 0xFFFFFFFF), local=local, same_public=same_public
        )  # fmt: skip
    return None


def unwrapped(address: Address) -> Address:
    """The IPv4 address inside an IPv6 one, if there is one; each layer is taken off."""
    while isinstance(address, IPv6Address):
        if address.ipv4_mapped is not None:
            address = address.ipv4_mapped
        elif address in SIX_TO_FOUR:
            address = IPv4Address((int(address) >> 80) & 0xFFFFFFFF)
        elif address in NAT64 or (address in COMPATIBLE and int(address) > 1):
            address = IPv4Address(int(address) & 0xFFFFFFFF)
        else:
            break
    return address


def url_host(address: str) -> str:
    """A literal as it stands in a URL."""
    return f"[{address}]" if ":" in address else address


def _literal(host: str) -> Address:
    if "%" in host or not host.isascii():
        raise PeerError("BAD_ADDRESS", "an address with a zone or foreign digits")
    try:
        return ip_address(host)
    except ValueError:
        raise PeerError("BAD_ADDRESS", f"{host[:45]!r} is not an IP literal") from None


def canonical(host: str) -> str:
    """A socket's peer in one spelling, with IPv4 taken out of its IPv6 wrapping."""
    try:
        return str(unwrapped(ip_address(host.partition("%")[0])))
    except ValueError:
        return host
