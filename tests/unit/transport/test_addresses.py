"""Two hundred spellings of addresses that must never be connected to (targets H5)."""

from __future__ import annotations

from ipaddress import IPv4Address, IPv6Address

import pytest

from p2pdiloco.errors import PeerError
from p2pdiloco_node.transport.addresses import check_address

ALWAYS = [
    "0.0.0.0",
    "0.1.2.3",
    "100.64.0.1",
    "100.100.100.200",
    "100.127.255.254",
    "168.63.129.16",
    "169.254.0.1",
    "169.254.169.254",
    "192.0.0.1",
    "192.0.0.192",
    "192.0.2.9",
    "192.88.99.1",
    "198.18.0.1",
    "198.19.255.255",
    "198.51.100.7",
    "203.0.113.5",
    "224.0.0.1",
    "239.255.255.250",
    "240.0.0.1",
    "255.255.255.255",
]
NOT_LOCAL = ["127.0.0.1", "127.1.2.3", "127.255.255.255"]
PRIVATE = ["10.0.0.1", "10.255.0.1", "172.16.0.1", "172.31.255.254", "192.168.0.1", "192.168.255.1"]
SIX = [
    "::",
    "fe80::1",
    "febf::1",
    "fec0::1",
    "ff02::1",
    "ff0e::1",
    "fd00:ec2::254",
    "fd20:ce::254",
    "2001:db8::1",
    "2001::1",
    "2001:0:4136:e378:8000:63bf:3fff:fdd2",
    "2001:10::1",
    "100::1",
    "3fff::1",
    "5f00::1",
    "64:ff9b:1::a00:1",
]
NOT_LITERALS = [
    "",
    " ",
    "localhost",
    "example.org",
    "127.1",
    "0x7f.1",
    "0x7f000001",
    "2130706433",
    "017700000001",
    "0177.0.0.1",
    "127.0.0.01",
    "127.0.0.1 ",
    " 127.0.0.1",
    "127.0.0.1\n",
    "127.0.0.1:80",
    "[::1]",
    "::1%lo",
    "fe80::1%eth0",
    "８.8.8.8",
    "8.8.8.8.",
    "8.8.8",
    "8.8.8.8/32",
    "http://8.8.8.8",
    "user@8.8.8.8",
    "1.2.3.4#5.6.7.8",
    "::ffff:127.0.0.1.5",
    "::1::",
    "12345::",
    "8.8.8.256",
    "-8.8.8.8",
    "+8.8.8.8",
    "8.8.8.8\0",
    "①.1.1.1",
]


def wrapped(four: str) -> list[str]:
    """The ways to hide an IPv4 address in an IPv6 one."""
    n = int(IPv4Address(four))
    return [
        f"::ffff:{four}",
        str(IPv6Address(0xFFFF << 32 | n)),
        IPv6Address(0xFFFF << 32 | n).exploded.upper(),
        str(IPv6Address(0x2002 << 112 | n << 80)),
        str(IPv6Address(0x2002 << 112 | n << 80 | 1)),
        str(IPv6Address(int(IPv6Address("64:ff9b::")) | n)),
        str(IPv6Address(int(IPv6Address("2600:1::")) | 0x5EFE << 32 | n)),
    ]


FORBIDDEN = [
    *SIX,
    *NOT_LITERALS,
    *ALWAYS,
    *NOT_LOCAL,
    *PRIVATE,
    "::1",
    "fc00::1",
    "fdff::1",
    "::7f00:1",
    *(w for four in [*ALWAYS, *NOT_LOCAL, *PRIVATE] for w in wrapped(four)),
]


def test_there_are_enough_of_them() -> None:
    assert len(set(FORBIDDEN)) >= 200


@pytest.mark.parametrize("host", FORBIDDEN)
def test_forbidden(host: str) -> None:
    with pytest.raises(PeerError, match="BAD_ADDRESS"):
        check_address(host, 80, own=frozenset())


@pytest.mark.parametrize("host", [*SIX, *NOT_LITERALS, *ALWAYS, *(w for a in ALWAYS for w in wrapped(a))])
def test_forbidden_in_local_runs_too(host: str) -> None:
    with pytest.raises(PeerError, match="BAD_ADDRESS"):
        check_address(host, 80, local=True, same_public=True, own=frozenset())


@pytest.mark.parametrize("host", [*NOT_LOCAL, *PRIVATE, "::1", "fc00::1"])
def test_loopback_and_private_in_local_runs(host: str) -> None:
    assert check_address(host, 80, local=True, own=frozenset()) == host


def test_private_behind_one_public_address() -> None:
    assert check_address("192.168.1.7", 80, same_public=True, own=frozenset()) == "192.168.1.7"
    with pytest.raises(PeerError):
        check_address("127.0.0.1", 80, same_public=True, own=frozenset())


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("8.8.8.8", "8.8.8.8"),
        ("2606:4700:4700:0:0:0:0:1111", "2606:4700:4700::1111"),
        ("::ffff:8.8.8.8", "8.8.8.8"),
        ("2002:808:808::1", "8.8.8.8"),
        ("64:ff9b::808:808", "8.8.8.8"),
        ("172.32.0.1", "172.32.0.1"),
        ("100.128.0.1", "100.128.0.1"),
    ],
)
def test_public_ones_come_out_in_one_spelling(host: str, expected: str) -> None:
    assert check_address(host, 443, own=frozenset()) == expected


@pytest.mark.parametrize("port", [0, -1, 65536])
def test_ports(port: int) -> None:
    with pytest.raises(PeerError):
        check_address("8.8.8.8", port, own=frozenset())


def test_own_address_in_any_spelling() -> None:
    own = frozenset({("8.8.8.8", 80)})
    for host in ("8.8.8.8", "::ffff:8.8.8.8", "2002:808:808::"):
        with pytest.raises(PeerError, match="own"):
            check_address(host, 80, own=own)
    assert check_address("8.8.8.8", 81, own=own)
